"""The dashboard: pages for an operator, beside the API.

Guarantee: every page works without JavaScript, and more browsers cause no more queries. Only `breaking` changes
anything. It acts on one exact grant, in the name of the signed-in caller. All pages are in one folder and link
relatively, so the dashboard works under every prefix.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from dblock.server.dashboard import breaking, pages
from dblock.server.dashboard.pages import seen_by
from dblock.server.dashboard.rendering import FOLDER, base_of, page
from dblock.server.dashboard.signin import sign_in, sign_out, visitor


def routes() -> list[BaseRoute]:
    """Return the routes."""
    see = {
        "/": pages.locks,
        "/lock": pages.lock,
        "/graph": pages.graph,
        "/graph.svg": pages.graph,
        "/schedules": pages.schedules,
        "/losses": pages.losses,
        "/events": pages.events,
    }
    return [
        *(Route(path, seen_by("see", handler), methods=["GET"]) for path, handler in see.items()),
        Route("/break", seen_by("break", breaking.ask), methods=["GET"]),
        Route("/break", seen_by("break", breaking.act), methods=["POST"]),
        Route("/signin", _sign_in, methods=["GET", "POST"]),
        Route("/signout", _sign_out, methods=["POST"]),
        Mount("/static", _Static(directory=FOLDER / "static")),
    ]


class _Static(StaticFiles):
    """The style sheet and the script. Their addresses change with their content, so browsers may cache them."""

    def file_response(self, *arguments: object, **options: object) -> Response:
        response = super().file_response(*arguments, **options)  # type: ignore[arg-type]
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


async def _sign_in(request: Request) -> Response:
    """Ask for a token, and keep the browser signed in."""
    # Only a page of this folder, so that no link leads to another site after the sign-in.
    then = request.query_params.get("next", "")
    if not then.replace("-", "").partition("?")[0].isalnum() or "\\" in then or ":" in then.partition("?")[0]:
        then = ""
    there = RedirectResponse((base_of(request) or "./") + then, 303)
    if request.method == "POST":
        form = await breaking.form_of(request)
        if sign_in(request, there, form.get("token", "").strip()) is not None:
            return there
        return page(request, "signin.html", None, 401, wrong=True, again=False, then=then)
    if visitor(request) is not None:
        return there
    # A browser that follows a link of another site sends no SameSite=Strict cookie. It does with the next request.
    foreign = request.headers.get("sec-fetch-site") == "cross-site" and "again" not in request.query_params
    return page(request, "signin.html", None, wrong=False, again=foreign, then=then)


async def _sign_out(request: Request) -> Response:
    response = RedirectResponse(f"{base_of(request)}signin", 303)
    sign_out(request, response)
    return response
