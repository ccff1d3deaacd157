"""The app, which Django finds by itself."""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks


class DblockConfig(AppConfig):
    """The app without models. Its `migrate` command replaces Django's."""

    name = "dblock.integrations.django"
    label = "dblock"
    verbose_name = "dblock"

    def ready(self) -> None:
        """Register the checks."""
        from dblock.integrations.django.checks import check_command

        checks.register(check_command)
