"""Run Alembic's migrations from every replica: one of them migrates, the others wait and find the work done.

In env.py, after `context.configure(…)`:

    from dblock.integrations.alembic import migration_gate

    with migration_gate(context):
        with context.begin_transaction():
            context.run_migrations()

Guarantee: while the body runs with something to do, this process holds the lock of the version table, and every
transaction of Alembic's connection proves it first. A transaction without the lease does not commit. A statement
outside transactions is covered by the mark of its session: the next holder ends that session before it begins.

A command that has nothing to do takes no lock: `upgrade` at the head, and `current`, `check`, `history` and `revision`,
which run env.py too. Offline (`--sql`) the gate does nothing.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from dblock.errors import DblockError
from dblock.recipes.migrations.exit_codes import EXIT_CODES, exit_code

__all__ = ["EXIT_CODES", "migration_gate"]


@contextlib.contextmanager
def migration_gate(
    context: Any,
    *,
    name: str | None = None,
    dsn: str | None = None,
    listen_dsn: str | None = None,
    ttl: float = 15.0,
    timeout: float | None = None,
    attempts: int = 1,
    when_ahead: str = "fail",
    lock_timeout: float = 5.0,
    retries: int = 10,
    schema: str = "dblock",
    fence: bool | None = None,
    drop_invalid: bool = False,
) -> Iterator[None]:
    """Run the body under the lock of these migrations, if the command has something to do.

    `context` is `alembic.context`, after `configure`. `name` is the lock, by default `alembic:SCHEMA.VERSION_TABLE`.
    `dsn` is where dblock connects, by default the database of Alembic's engine; `listen_dsn` is a direct one beside a
    pooler. `timeout` bounds the wait for the lock, in seconds. `attempts` is how often a version may fail in all, over
    all replicas. `when_ahead` says what to do if the database has a revision that these scripts do not know: fail, or
    with 'ok' run nothing. `lock_timeout` bounds the wait of a statement for a table, and `retries` is how often a
    transaction that waited too long, or deadlocked, is run again. `fence` protects the version table with a fence of
    fenced_store: by default if fenced_store is installed in the database, always (True), or never (False).
    `drop_invalid` drops, before the first revision, the invalid indexes that the script of a pending revision names: a
    CREATE INDEX CONCURRENTLY that was cut off has left them.
    """
    migrations = context.get_context()
    if migrations.as_sql:
        yield
        return
    from dblock.integrations.alembic.command import Command

    command = Command(migrations)
    if not command.migrates:
        with command.reading():
            yield
        return
    from dblock.integrations.alembic.passage import Options, Passage

    # `fileConfig` in env.py disables every logger that alembic.ini does not name.
    logging.getLogger("dblock").disabled = False
    options = Options(
        *(name, dsn, listen_dsn, ttl, timeout, attempts, when_ahead, lock_timeout, retries, schema, fence, drop_invalid)
    )
    with _reported(context.config), Passage(migrations, command, options):
        yield


@contextlib.contextmanager
def _reported(config: Any) -> Iterator[None]:
    """In the program `alembic`, report dblock's errors as Alembic reports its own, with an exit code for each kind."""
    try:
        yield
    except DblockError as error:
        if getattr(config, "cmd_opts", None) is None:
            raise
        _exit(error)


def _exit(error: DblockError) -> NoReturn:
    sys.stderr.write(f"FAILED: {error}\n")
    raise SystemExit(exit_code(error)) from error
