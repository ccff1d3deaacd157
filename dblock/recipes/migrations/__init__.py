"""Many replicas, one migration, and DDL that a stale process cannot finish.

Three fronts use this package: `dblock migrate` (any migrator), `dblock.integrations.alembic` and
`dblock.integrations.django`. They share these parts:

- `contract`: what every session that runs DDL carries, so that it can be found and ended.
- `turn`: one replica's turn, from the check without a lock to the record of the run.
- `keeper`: a process that holds the lock for a migrator that is a library in this process.
- `gate`: this process's side of that keeper.
- `blockers` and `retry`: what happens if a transaction cannot lock a table.
- `version_fence`: the fence on the table in which a migrator records what it has applied.
- `versions` and `exit_codes`: how a version is named, and with what a program exits.
- `invalid_indexes`: what a failed CONCURRENTLY has left, and which of it to drop before a migration.

Guarantee: no statement of a session under this contract takes effect after the next holder has sent its first one, if
the session was opened before. The next holder first ends every session whose grant does not hold the lock any more, and
waits until the session is gone. A session that a stale program opens later is ended within a second. A statement of
such a session takes no effect if it is in a transaction that proves the lease, or if a proof comes before it.
"""
