"""Show which locks are held, by which process, and how many wait."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand
from django.db import DEFAULT_DB_ALIAS, connections


class Command(BaseCommand):
    """Shows the locks that are held or waited for."""

    help = "Show the locks that are held or waited for. `dblock ls` and `dblock watch` show more."

    def add_arguments(self, parser: Any) -> None:
        """Add the options."""
        parser.add_argument("pattern", nargs="?", default="%", help="a LIKE pattern of names")
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="the alias of the database")
        parser.add_argument("--schema", default="dblock", help="the schema of dblock")

    def handle(self, *args: Any, **options: Any) -> None:
        """Print a line for each lock."""
        connection = connections[options["database"]]
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT name, coalesce(holder, '-'), token, remaining, waiting"
                f" FROM {connection.ops.quote_name(options['schema'])}.list_locks(%s)",
                [options["pattern"]],
            )
            for name, holder, token, remaining, waiting in cursor.fetchall():
                left = f"{remaining:.1f} s left" if remaining else "free"
                self.stdout.write(f"{name}  {holder}  token {token}  {left}  {waiting} waiting")
