"""Refuse the previous holder from the moment of the grant, before the new holder has written anything.

A resource learns of a new token when that token is first used. Until then, the previous holder could still write. With
`claims`, the grant itself raises the fences, in the same transaction.

    python examples/claim_resources.py
"""

from __future__ import annotations

import os

import dblock
import fenced_store
from dblock import embedded
from dblock.admin import schema

PRICES = "example:prices"


def write_late(store: fenced_store.FencedStore, token: int) -> str:
    """Write as the previous holder would that was paused and knows of nothing."""
    try:
        store.put(PRICES, {"tea": 1}, fence=token)
    except fenced_store.StaleTokenError:
        return "refused"
    return "accepted"


def main() -> None:
    dsn = os.environ.get("DBLOCK_DSN") or embedded.start().url
    schema.install(dsn)
    fenced_store.install(dsn)
    with dblock.Client(dsn) as client, fenced_store.FencedStore(dsn) as store:
        with client.lock(PRICES) as previous:
            store.put(PRICES, {"tea": 3}, fence=previous)

        with client.lock(PRICES):
            print("without a claim, the previous holder's late write is", write_late(store, previous.token))

        with client.lock(PRICES, claims=[PRICES]):
            print("with a claim, the previous holder's late write is", write_late(store, previous.token))


if __name__ == "__main__":
    main()
