"""The database in memory: the meaning of dblock's SQL functions, without Postgres.

The memory clients and the simulation of tests/robustness/simulation use it. `tests/robustness/test_simulation.py` and
`tests/dblock/testing/test_memory_answers_as_postgres.py` send the same random calls to it and to Postgres, and compare
the replies, the tables and the notifications.

| module | contents |
|---|---|
| tables, store, queue | what the functions of locks and queues do |
| shared_locks, several, deadlocks | what the functions of shared locks, sets of locks and deadlocks do |
| elections, schedules, barriers | what the functions of these recipes do |
| recipes | one store with all of these |
| statements, columns | a client's statements, executed on the store: arguments and rows as text |
| fence | a resource that refuses stale writers |
| null_observer | an observer that ignores every change |

Row locks are left out: no two transactions run at once, so nothing is ever `busy`.
"""
