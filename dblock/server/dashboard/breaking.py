"""The page that takes a lock from its holder: what is safe, a reason, and one exact grant."""

from __future__ import annotations

from contextlib import suppress
from urllib.parse import parse_qs, urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from dblock.errors import DblockError
from dblock.server.access import Caller
from dblock.server.bodies import read_body
from dblock.server.dashboard.pages import Dashboard, lock_view
from dblock.server.dashboard.rendering import base_of, page
from dblock.server.dashboard.verdict import freeing, telling
from dblock.server.problems import invalid
from dblock.server.service import service_of

LONGEST_REASON = 2048
LONGEST_FORM = 16_384


async def ask(
    dashboard: Dashboard, request: Request, caller: Caller, error: str = "", reason: str = "", status: int = 200
) -> Response:
    """Show what a break would do to one grant, and ask for the reason."""
    view = await lock_view(dashboard, request)
    number = _token(request.query_params.get("token", ""))
    grant = next((one for one in view.grants if number in (None, one["token"])), None)
    if grant is None:
        text = "It was released, it expired, or another client holds it by now. Nothing was done."
        return page(request, "gone.html", caller, 409, view=view, token=number, text=text)
    return page(
        request,
        "break.html",
        caller,
        status,
        view=view,
        grant=grant,
        telling=telling(
            grant["forced_at"] is not None, next((event for one, event in view.told if one is grant), None)
        ),
        freeing=freeing(grant, view.fences),
        error=error,
        reason=reason,
    )


async def act(dashboard: Dashboard, request: Request, caller: Caller) -> Response:
    """Take the lock from the grant with the token that the form has, and from no other."""
    form = await form_of(request)
    view = await lock_view(dashboard, request)
    number, reason = _token(form.get("token", "")), form.get("reason", "").strip()
    if number is None or form.get("how") not in ("tell", "free"):
        raise invalid("The form is incomplete.")
    if not reason or len(reason.encode()) > LONGEST_REASON or "\0" in reason:
        error = f"Give a reason of 1 to {LONGEST_REASON} bytes. It goes into the history."
        return await ask(dashboard, request, caller, error, reason.replace("\0", ""), 400)
    share = next((one["name"] for one in view.grants if one["token"] == number), view.name)
    now = form["how"] == "free"
    database = dashboard.service.database
    if not await database.force_release(share, number, f"{caller.name} at the dashboard", reason, now):
        text = "It was released, it expired, or another client holds it by now. Nothing was done."
        return page(request, "gone.html", caller, 409, view=view, token=number, text=text)
    if now:
        with suppress(DblockError):  # the first waiter also finds out by itself
            await database.read("wake_queue", view.name)
    dashboard.reads.forget()
    then = urlencode({"name": view.name, "broken": number, "waited": len(view.queue)})
    return RedirectResponse(f"{base_of(request)}lock?{then}", 303)


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form."""
    body = await read_body(request, LONGEST_FORM, service_of(request).settings.limits.body_within)
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=20)
    except ValueError:
        raise invalid("The form is not readable.") from None
    return {key: values[0] for key, values in fields.items()}


def _token(text: str) -> int | None:
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 18:
        return None
    return int(text)
