"""The dashboard: pages for an operator, beside the API."""

from __future__ import annotations

from starlette.routing import BaseRoute


def routes() -> list[BaseRoute]:
    """Return the routes."""
    return []
