"""`/metrics`, for Prometheus. Needs the role `see`, unless the settings open it."""

from __future__ import annotations

from starlette.routing import BaseRoute


def routes() -> list[BaseRoute]:
    """Return the routes."""
    return []
