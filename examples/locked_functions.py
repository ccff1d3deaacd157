"""Run functions under a lock: `locked` takes the lock's name from the arguments of each call.

`withdraw` and `charge_fee` both lock the account, and `withdraw` calls `charge_fee` under its lock. With
`reentrant=True` both share one grant. `book` takes no lock, and refuses a caller that holds none.

    python examples/locked_functions.py
"""

from __future__ import annotations

import os

import dblock
from dblock import embedded
from dblock.admin import schema

balances = {"ada": 100}


def book(account: str, amount: int) -> None:
    """Change a balance. The caller holds the account's lock."""
    dblock.assert_locked(f"example:account:{account}")
    balances[account] += amount


def main() -> None:
    dsn = os.environ.get("DBLOCK_DSN") or embedded.start().url
    schema.install(dsn)
    with dblock.Client(dsn) as client:

        @client.locked("example:account:{account}", timeout=5, reentrant=True)
        def charge_fee(account: str) -> int:
            book(account, -1)
            return dblock.current_lease().token

        @client.locked("example:account:{account}", timeout=5, reentrant=True)
        def withdraw(account: str, amount: int) -> None:
            book(account, -amount)
            same = charge_fee(account) == dblock.current_lease().token
            print("the fee is booked under the token of the withdrawal:", same)

        @client.locked("example:report", on_busy="skip")
        def report() -> str:
            return f"balances: {balances}"

        withdraw("ada", 30)
        print(report())
        with client.lock("example:report"):
            print("while another caller builds the report:", report())
        try:
            book("ada", 1000)
        except dblock.NotLocked:
            print("a booking without the lock is refused")


if __name__ == "__main__":
    main()
