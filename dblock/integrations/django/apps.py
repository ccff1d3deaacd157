"""The app, which Django finds by itself."""

from __future__ import annotations

from django.apps import AppConfig


class DblockConfig(AppConfig):
    """The app without models. Its `migrate` command replaces Django's."""

    name = "dblock.integrations.django"
    label = "dblock"
    verbose_name = "dblock"
