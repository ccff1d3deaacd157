"""Let many readers in together, one writer alone, and a few at a time to a scarce resource.

Two readers read the prices at the same time. A writer waits until both have left, changes the prices, and reads them
back under a read lease, without a moment in which another writer could enter. Then three workers share two GPUs, each
with a number of its own.

    python examples/shared_locks.py
"""

from __future__ import annotations

import os
import threading

import dblock
from dblock import embedded
from dblock.admin import schema

PRICES = "example:prices-of-today"
GPUS = "example:gpus"


def main() -> None:
    dsn = os.environ.get("DBLOCK_DSN") or embedded.start().url
    schema.install(dsn)
    with dblock.Client(dsn) as client:
        prices = {"tea": 3}
        first, second = client.read_lock(PRICES).acquire(), client.read_lock(PRICES).acquire()
        print("readers inside:", len(client.read_lock(PRICES).holders()))

        def update() -> None:
            with client.write_lock(PRICES) as writer:
                prices["tea"] = 4
                reader = writer.downgrade()
                print("updated and still inside, under a higher token:", reader.token > writer.token)

        updater = threading.Thread(target=update)
        updater.start()
        while not client.write_lock(PRICES).queue():
            pass  # the writer is on its way to the queue
        print("a reader that comes now waits behind the writer:", client.read_lock(PRICES).try_acquire() is None)
        print("the prices have not changed:", prices["tea"] == 3)
        first.release()
        second.release()
        updater.join()

        gpus = client.semaphore(GPUS, permits=2)
        with gpus as one, gpus as other:
            print("GPUs in use:", sorted([one.permit, other.permit]))
            print("a third worker gets one:", gpus.try_acquire() is not None)
        print("GPUs free:", gpus.available())


if __name__ == "__main__":
    main()
