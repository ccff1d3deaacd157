"""Turn templates into pages.

Jinja2 escapes every value for HTML. Before that, characters that would reverse or hide other text are escaped, so that
no name of a lock can look like another name.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from dblock._core.printing import printable
from dblock.server.access import Caller
from dblock.server.dashboard.timeline import LABELS
from dblock.server.service import service_of

FOLDER = Path(__file__).parent

PLACES = {
    "locks.html": "Locks",
    "graph.html": "Wait graph",
    "schedules.html": "Schedules",
    "losses.html": "Losses",
}
"""The pages of the navigation."""


def spell(seconds: Any) -> str:
    """Return a duration in whole units, as the browser also spells it while it counts."""
    if seconds is None:
        return "\N{EN DASH}"
    whole = float(seconds)
    if whole < 1:
        return "< 1 s"
    minutes, left = divmod(int(whole), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {left:02} s" if minutes else f"{left} s"


def _clean(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def lock_href(name: str, **more: Any) -> str:
    """Return the address of a lock's page, relative to the dashboard."""
    return "lock?" + urlencode({"name": name, **more})


@cache
def environment() -> Environment:
    """Return Jinja2 with the templates."""
    made = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["spell"] = spell
    made.globals.update(lock_href=lock_href, urlencode=urlencode, labels=LABELS, version=version())
    return made


@cache
def version() -> str:
    """Return a hash of the static files, so that browsers may cache these."""
    found = hashlib.sha256()
    for path in sorted((FOLDER / "static").iterdir()):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def base_of(request: Request) -> str:
    """Return what every address begins with: nothing, because all pages are in one folder, or the proxy's prefix."""
    prefix = service_of(request).settings.prefix
    return f"{prefix}/" if prefix else ""


def page(request: Request, template: str, caller: Caller | None, status: int = 200, **values: Any) -> Response:
    """Return a page."""
    service = service_of(request)
    values.setdefault("stream", "")
    values.setdefault("stamp", "")
    values.setdefault("snapshot", None)
    text = (
        environment()
        .get_template(template)
        .render(
            base=base_of(request) or "./",
            caller=caller,
            here=PLACES.get(template),
            signed_in=bool(service.settings.credentials) and caller is not None,
            **values,
        )
    )
    # With no-referrer, a browser sends the origin null with a form, which would be refused as one of another site.
    headers = {"Cache-Control": "no-store", "Vary": "Cookie", "Referrer-Policy": "same-origin"}
    return HTMLResponse(text, status, headers)
