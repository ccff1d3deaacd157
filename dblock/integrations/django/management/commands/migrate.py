"""Django's `migrate`, behind the gate."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError
from django.core.management.commands import migrate as django_migrate

from dblock.errors import DblockError
from dblock.integrations.django.executor import GatedExecutor
from dblock.integrations.django.gate import MigrationGate, gate_for
from dblock.recipes.migrations.exit_codes import exit_code

# Django's command looks its executor up in its own module. Without an active gate the two behave the same.
django_migrate.MigrationExecutor = GatedExecutor


class Command(django_migrate.Command):
    """Updates the database schema, one replica at a time."""

    help = django_migrate.Command.help

    def handle(self, *args: Any, **options: Any) -> Any:
        """Run Django's command. Its executor takes the turn when it finds something to do."""
        gate = None if options["plan"] or options["check_unapplied"] else gate_for(options["database"])
        if gate is None:
            return super().handle(*args, **options)
        try:
            return self._handle_gated(gate, *args, **options)
        except DblockError as error:
            raise CommandError(f"dblock: {error}", returncode=exit_code(error)) from error

    def _handle_gated(self, gate: MigrationGate, *args: Any, **options: Any) -> Any:
        with self._messages(), gate.active():
            if options["prune"] or options["run_syncdb"]:
                gate.enter()  # both write before they plan
            return super().handle(*args, **options)

    @contextlib.contextmanager
    def _messages(self) -> Iterator[None]:
        """Print what dblock logs in the body, for example for what it waits, unless the project logs it elsewhere."""
        logger = logging.getLogger("dblock")
        level, handlers = logger.level, [*logger.handlers, *logging.getLogger().handlers]
        if any(not isinstance(one, logging.NullHandler) for one in handlers):
            yield
            return
        handler = logging.StreamHandler(self.stderr)
        handler.terminator = ""  # Django's output adds it
        logger.addHandler(handler)
        logger.setLevel(level or logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
