"""Checks of the project, which `manage.py check` and `migrate` run."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core import checks
from django.core.management import get_commands, load_command_class


def check_command(**_: Any) -> list[checks.CheckMessage]:
    """Report an app whose `migrate` replaces the gated one: no replica would take a turn."""
    from dblock.integrations.django.management.commands.migrate import Command

    if not getattr(settings, "DBLOCK_MIGRATE", {}).get("enabled", True):
        return []
    app = get_commands()["migrate"]
    command = app if not isinstance(app, str) else load_command_class(app, "migrate")
    if isinstance(command, Command):
        return []
    name = app if isinstance(app, str) else type(app).__module__
    return [
        checks.Error(
            f"`migrate` is the command of {name}, so that migrations run without dblock's gate.",
            hint=f"Put 'dblock.integrations.django' in front of {name!r} in INSTALLED_APPS, or let that command "
            "inherit from dblock.integrations.django.management.commands.migrate.Command.",
            id="dblock.E001",
        )
    ]
