"""Install the lock service in a database of the project."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DEFAULT_DB_ALIAS, connections

from dblock.errors import DblockError
from dblock.integrations.django.conninfo import conninfo_of


class Command(BaseCommand):
    """Installs or upgrades the schema of dblock."""

    help = "Install or upgrade the schema of dblock in a database of the project."

    def add_arguments(self, parser: Any) -> None:
        """Add the options."""
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="the alias of the database")
        parser.add_argument("--schema", default="dblock", help="the schema to install into")

    def handle(self, *args: Any, **options: Any) -> None:
        """Install the schema."""
        from dblock.admin.schema import install

        try:
            install(conninfo_of(connections[options["database"]]), options["schema"])
        except DblockError as error:
            raise CommandError(f"dblock: {error}") from error
        self.stdout.write(f"The schema {options['schema']} is installed in the database {options['database']}.")
