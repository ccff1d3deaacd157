"""What the command that runs env.py would do: its steps, from the revisions that the database has now."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from alembic.runtime.migration import HeadMaintainer, RevisionStep
from alembic.util.exc import CommandError
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from dblock.errors import InvalidArgument
from dblock.integrations.alembic.drivers import forget, sqlstate
from dblock.recipes.migrations.versions import version_of

UNDEFINED_TABLE = "42P01"


@dataclass(frozen=True)
class Found:
    """What one look at the version table has found."""

    revision: str
    """The revisions that the database has."""
    version: str
    """The revisions that it will have."""
    has_steps: bool
    unknown: str | None = None
    """Revisions of the database that these scripts do not have: the database is ahead."""
    scripts: tuple[str, ...] = ()
    """The files of the revisions that are pending."""


class Command:
    """The command that runs env.py."""

    def __init__(self, migrations: Any) -> None:
        self._migrations = migrations
        self._steps_of = migrations._migrations_fn

    @property
    def migrates(self) -> bool:
        """Whether it is upgrade, downgrade or stamp. `current`, `check`, `history` and `revision` are not."""
        return "destination_rev" in self._migrations.opts

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keep a command that does not migrate from creating the version table, and from running steps."""
        migrations = self._migrations
        # Alembic would create an empty version table, and wait for a first migration that is creating it.
        migrations.opts["dont_mutate"] = True
        migrations._migrations_fn = self._without_steps
        try:
            yield
        finally:
            migrations._migrations_fn = self._steps_of

    def look(self) -> Found:
        """Look at the version table. Leaves no transaction on the connection."""
        migrations = self._migrations
        heads = () if migrations.purge else self._heads()
        script = migrations.script
        revision = version_of(heads)
        unknown = [head for head in heads if not _is_known(script, head)]
        if unknown and getattr(self._steps_of, "__name__", "") not in ("downgrade", "do_stamp"):
            return Found(revision, version_of(script.get_heads()), False, version_of(unknown))
        steps = list(self._steps_of(heads, migrations))
        scripts = tuple(step.revision.path for step in steps if isinstance(step, RevisionStep))
        after = version_of(_after(migrations, heads, steps))
        return Found(revision, after, bool(steps) or bool(migrations.purge), scripts=scripts)

    def _heads(self) -> tuple[str, ...]:
        migrations = self._migrations
        connection = migrations.connection
        try:
            # One statement, where Alembic asks first whether there is a table.
            return tuple(connection.execute(select(migrations._version.c.version_num)).scalars())
        except DBAPIError as error:
            if sqlstate(error) != UNDEFINED_TABLE:
                raise
            return ()
        finally:
            forget(connection, external=migrations._in_external_transaction)

    def _without_steps(self, heads: Any, migrations: Any) -> Iterable[Any]:
        for _ in self._steps_of(heads, migrations) or ():
            raise InvalidArgument(
                "These migrations were not run, because migration_gate does not know where they lead. Pass "
                "destination_rev to EnvironmentContext, as the commands of Alembic do."
            )
        return ()


class _Forecast(HeadMaintainer):
    """The revisions after some steps, without writing them."""

    def _insert_version(self, version: str) -> None:
        self.heads.add(version)

    def _delete_version(self, version: str) -> None:
        self.heads.discard(version)

    def _update_version(self, from_: str, to_: str) -> None:
        self.heads.discard(from_)
        self.heads.add(to_)


def _after(migrations: Any, heads: Iterable[str], steps: Iterable[Any]) -> set[str]:
    forecast = _Forecast(migrations, heads)
    for step in steps:
        forecast.update_to_step(step)
    return forecast.heads


def _is_known(script: Any, revision: str) -> bool:
    try:
        found = script.get_revision(revision)
    except CommandError:
        return False
    return found is not None and found.revision == revision
