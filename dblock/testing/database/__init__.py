"""The database in memory: the meaning of dblock's SQL functions, without Postgres.

The memory clients and the simulation of tests/robustness/simulation use it. `tests/robustness/test_simulation.py` sends
the same random calls to it and to Postgres, and compares the replies, the tables and the notifications.

| module | contents |
|---|---|
| tables, store, queue | what the functions of locks and queues do |
| shared_locks, elections, schedules, barriers, recipes | what those of the other kinds do |
| statements, columns | a client's statements, executed on the store: arguments and rows as text |
| fence | a resource that refuses stale writers |
| unseen | an observer that ignores every change |

Row locks are left out: no two transactions run at once, so nothing is ever `busy`.
"""
