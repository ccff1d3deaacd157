"""The pages: each is complete without JavaScript, and needs the role `see`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from dblock._core.options import check_name
from dblock.admin.graph.svg import svg
from dblock.admin.graph.waits import build_graph, select
from dblock.errors import InvalidArgument
from dblock.server.access import Caller
from dblock.server.dashboard.live import LiveTables, lock_stamp
from dblock.server.dashboard.lock_view import BY_NAME, LockView, view_of
from dblock.server.dashboard.reads import LOST, Reads
from dblock.server.dashboard.rendering import base_of, lock_href, page
from dblock.server.dashboard.rows import FILTERS, SORTS, Query, lock_state, waiter_of
from dblock.server.dashboard.signin import visitor
from dblock.server.dashboard.stream import page_stamp, stream
from dblock.server.feed import Snapshot
from dblock.server.problems import Problem, problem_of
from dblock.server.service import Service, service_of

Handler = Callable[["Dashboard", Request, Caller], Awaitable[Response]]


class Dashboard:
    """The pages of one server."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.reads = Reads(service.database)
        self.tables = LiveTables(f"{service.settings.prefix}/" if service.settings.prefix else "./")

    async def snapshot(self) -> Snapshot:
        """Return the current snapshot. Raises its error if there never was one."""
        found = await self.service.feed.current()
        if found.taken_at is None and found.error is not None:
            raise found.error
        return found


def dashboard_of(request: Request) -> Dashboard:
    """Return the dashboard of a request's server."""
    kept = request.app.state
    if not hasattr(kept, "dashboard"):
        kept.dashboard = Dashboard(service_of(request))
    found: Dashboard = kept.dashboard
    return found


def seen_by(role: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of a page for callers with this role. Others are sent to sign in, or refused with a page."""

    async def answer(request: Request) -> Response:
        caller = visitor(request)
        if caller is None:
            if request.method not in ("GET", "HEAD"):
                return page(request, "error.html", None, 401, title="Sign in first", text="You are not signed in.")
            here = request.url.path.rpartition("/")[2] + (f"?{request.url.query}" if request.url.query else "")
            return RedirectResponse(f"{base_of(request)}signin?{urlencode({'next': here})}", 303)
        if not caller.may(role):
            text = f"This needs the role {role}, and {caller.name} has the role {caller.role}."
            return page(request, "error.html", caller, 403, title="Not allowed", text=text)
        try:
            found = await handler(dashboard_of(request), request, caller)
        except Exception as error:
            return _failed(request, caller, error)
        service_of(request).worked()
        return found

    return answer


def _failed(request: Request, caller: Caller, error: Exception) -> Response:
    """Return the page of an error. The service logs the error as it does for the API."""
    service_of(request).refusal(error)
    problem = problem_of(error)
    text = f"{problem.document['detail']} {problem.document['next']}"
    response = page(
        request, "error.html", caller, problem.status, title=problem.document["title"], text=text,
        away=problem.kind == "database-away",
    )  # fmt: skip
    response.headers.update(problem.headers)
    return response


async def locks(dashboard: Dashboard, request: Request, caller: Caller) -> Response:
    """Show the table of the locks that are held or awaited."""
    query = Query.parse(request.query_params)
    snapshot = await dashboard.snapshot()
    table = dashboard.tables.table(snapshot)
    rows = table.select(query)
    pages = max(-(-len(rows) // query.per), 1)
    first = (min(query.page, pages) - 1) * query.per
    parameters = query.href(page=min(query.page, pages))
    return page(
        request,
        "locks.html",
        caller,
        rows=rows[first : first + query.per],
        found=len(rows),
        pages=pages,
        query=query,
        table=table,
        filters=FILTERS,
        sorts=SORTS,
        snapshot=snapshot,
        age=snapshot.age or 0.0,
        stream=f"events{parameters}{'' if parameters == '?' else '&'}view=table",
    )


async def lock(dashboard: Dashboard, request: Request, caller: Caller) -> Response:
    """Show one lock."""
    snapshot = await dashboard.snapshot()
    view = await lock_view(dashboard, request)
    values = await _after(dashboard, request, view)
    return page(
        request,
        "lock.html",
        caller,
        404 if view.unknown else 200,
        view=view,
        snapshot=snapshot,
        age=0.0,
        stream="events?" + urlencode({"view": "lock", "name": view.name}),
        stamp=lock_stamp(snapshot, view.name),
        **values,
    )


async def _after(dashboard: Dashboard, request: Request, view: LockView) -> dict[str, Any]:
    """Return whether the break that this browser has just sent helped."""
    token, before = request.query_params.get("broken", ""), request.query_params.get("waited", "")
    if not token.removeprefix("-").isdecimal() or len(token) > 20:
        return {"broken": None}
    grant = next((one for one in view.grants if one["token"] == int(token)), None)
    return {
        "broken": int(token),
        "broken_grant": grant,
        "waited": int(before) if before.isdecimal() and len(before) < 9 else 0,
        "how": next((one for one in view.history if one["token"] == int(token) and one["actor"]), None),
    }


async def lock_view(dashboard: Dashboard, request: Request) -> LockView:
    """Return everything that is known about the lock that a request names."""
    name = request.query_params.get("name", "")
    try:
        check_name(name)
    except InvalidArgument:
        raise Problem(404, "unknown-lock", "There is no such lock", "The name is invalid.", "Go back.") from None
    snapshot = await dashboard.snapshot()
    return await view_of(dashboard.reads, dashboard.tables.table(snapshot), name, lock_stamp(snapshot, name))


async def graph(dashboard: Dashboard, request: Request, caller: Caller) -> Response:
    """Show who waits for whom."""
    snapshot = await dashboard.snapshot()
    pattern = request.query_params.get("q", "").strip()[:512] or "*"
    states = [lock_state(one) for one in snapshot.locks]
    waiters = [waiter_of(one["name"], waiter) for one in snapshot.locks for waiter in one["queue"] or ()]
    whole = build_graph(states, waiters, await dashboard.reads.waits())
    found = select(whole, pattern, every=request.query_params.get("all") == "1")
    if request.url.path.endswith(".svg"):
        headers = {
            "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
            "Cache-Control": "no-store",
        }
        return Response(svg(found), 200, headers, media_type="image/svg+xml")
    picture = svg(found, link=lambda name: (base_of(request) or "./") + lock_href(name)) if found.locks else ""
    return page(
        request,
        "graph.html",
        caller,
        graph=found,
        by_name=BY_NAME,
        picture=Markup(picture),  # noqa: S704  the drawing escapes every name
        pattern="" if pattern == "*" else pattern,
        every=request.query_params.get("all") == "1",
        snapshot=snapshot,
        stream="events?view=page",
        stamp=page_stamp(),
    )


async def schedules(dashboard: Dashboard, request: Request, caller: Caller) -> Response:
    """Show the schedules and the elections."""
    snapshot = await dashboard.snapshot()
    return page(
        request,
        "schedules.html",
        caller,
        schedules=await dashboard.reads.schedules(),
        elections=await dashboard.reads.elections(),
        snapshot=snapshot,
        stream="events?view=page",
        stamp=page_stamp(),
    )


async def losses(dashboard: Dashboard, request: Request, caller: Caller) -> Response:
    """Show refused writes and lost leases."""
    snapshot = await dashboard.snapshot()
    history = await dashboard.reads.history(None, 500)
    return page(
        request,
        "losses.html",
        caller,
        rejections=await dashboard.reads.rejections(),
        lost=[event for event in history if event["event"] in LOST][:200],
        snapshot=snapshot,
        stream="events?view=page",
        stamp=page_stamp(),
    )


async def events(dashboard: Dashboard, request: Request, caller: Caller) -> Response:
    """Stream what changes."""
    return stream(request, dashboard.service, dashboard.tables)
