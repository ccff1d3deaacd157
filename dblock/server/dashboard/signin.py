"""Sign in with a bearer token in a browser.

The cookie does not contain the token. It contains its end and a code that is derived from the token's digest. So every
server with the same tokens accepts the cookie, no server stores it, and a server without the token refuses it. The
cookie counts for the dashboard only, never for the API. Scripts cannot read it, and other sites cannot send it.
"""

from __future__ import annotations

import hashlib
import hmac
import time

from starlette.requests import Request
from starlette.responses import Response

from dblock.server.access import Caller, Credential, caller_of, credential_of
from dblock.server.service import service_of
from dblock.server.settings import Settings

COOKIE = "dblock_session"

LASTS = 12 * 3600
"""Seconds that a browser stays signed in."""


def visitor(request: Request) -> Caller | None:
    """Return the caller by its cookie, or else as the API does. None if the caller is unknown."""
    settings = service_of(request).settings
    return _by_cookie(request.cookies.get(COOKIE, ""), settings) or caller_of(request.scope, settings)


def sign_in(request: Request, response: Response, token: str) -> Caller | None:
    """Set the cookie for a token. None if no caller has this token."""
    settings = service_of(request).settings
    found = credential_of(token, settings)
    if found is None:
        return None
    until = int(time.time()) + LASTS
    # The server does not see whether a proxy speaks TLS, but a browser sends the origin with a form.
    secure = request.url.scheme == "https" or request.headers.get("origin", "").startswith("https://")
    response.set_cookie(
        COOKIE, f"{until}.{_code(found, until)}", LASTS, path=_path(settings), secure=secure, httponly=True,
        samesite="strict",
    )  # fmt: skip
    return found.caller


def sign_out(request: Request, response: Response) -> None:
    """Delete the cookie."""
    response.delete_cookie(COOKIE, path=_path(service_of(request).settings), httponly=True, samesite="strict")


def _path(settings: Settings) -> str:
    return settings.prefix or "/"


def _by_cookie(cookie: str, settings: Settings) -> Caller | None:
    until, _, code = cookie.partition(".")
    if not (until.isascii() and until.isdecimal() and len(until) < 12 and code.isascii()) or int(until) < time.time():
        return None
    found = None
    for one in settings.credentials:
        if hmac.compare_digest(_code(one, int(until)), code):
            found = one.caller
    return found


def _code(credential: Credential, until: int) -> str:
    return hmac.new(credential.digest, b"dblock dashboard %d" % until, hashlib.sha256).hexdigest()
