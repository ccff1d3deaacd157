"""`dblock demo`: two workers, one lock and a ledger, narrated as it happens.

Real processes contend for one lock on a real Postgres and keep a ledger under it. Nothing in the report is invented:
each event is recorded when it has happened, with its token and its time, and the sums come from the ledger's tables.

`story` is the conductor, which gives the cues. `cast` starts, freezes and ends the worker processes. `worker` is the
program that they run. `ledger` is the database schema that they write to. `events` defines the recorded events, which
`timeline` draws.
"""
