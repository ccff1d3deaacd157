"""Transfer money between accounts, with the locks of both accounts, in any order.

Eight workers transfer in both directions at once. If each took its two locks one after the other, they would deadlock.
"""

from __future__ import annotations

import os
import random
import threading

import dblock
from dblock import embedded
from dblock.admin import schema

ACCOUNTS = ["account:1", "account:2", "account:3"]
TRANSFERS = 10


def main() -> None:
    """Run the workers and print the sum of all balances, which transfers do not change."""
    dsn = os.environ.get("DBLOCK_DSN") or embedded.start().url
    schema.install(dsn)
    balances = dict.fromkeys(ACCOUNTS, 100)
    with dblock.Client(dsn) as client:

        def work(seed: int) -> None:
            choose = random.Random(seed)
            for _ in range(TRANSFERS):
                source, target = choose.sample(ACCOUNTS, 2)
                with client.lock_all([source, target], timeout=60) as locks:
                    amount = choose.randint(1, 10)
                    before = balances[source], balances[target]
                    locks.raise_if_lost()
                    balances[source], balances[target] = before[0] - amount, before[1] + amount

        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

        with client.lock_any(ACCOUNTS) as lease:
            print("any account:", lease.name)
    print("sum of all balances:", sum(balances.values()))


if __name__ == "__main__":
    main()
