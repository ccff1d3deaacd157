"""Once per schedule, on whichever host: the unit is the slot, not the lock.

- `cron`: the slots of a cron expression, by a library that knows daylight saving.
- `run`: one run of a slot, as the scheduled function sees it.
- `schedule`: a scheduled function, for threads and for asyncio.

Guarantee: each slot is decided once, on the database's clock, for all hosts together. A run holds a lock with a fencing
token of its own. The outcome of a run is in the ledger before the next run starts, also if the runner died, unless runs
may overlap.
"""
