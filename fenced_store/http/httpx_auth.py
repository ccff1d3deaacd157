"""Send a lease's token with every request of httpx, and raise if the service refuses it as stale.

    httpx.put(url, content=body, auth=FencingAuth(lease))  # StaleTokenError if a newer holder has come

Needs httpx: pip install 'httpx>=0.27'.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from datetime import datetime

try:
    import httpx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("fenced_store.http.FencingAuth needs httpx: pip install 'httpx>=0.27'") from error

from fenced_store.errors import StaleTokenError
from fenced_store.tokens import HasToken, token_of, write_of


class FencingAuth(httpx.Auth):
    """Presents a token to services behind FencingMiddleware, or to any service that reads Fencing-Token."""

    def __init__(self, fence: int | HasToken, auth: httpx.Auth | None = None) -> None:
        """Present a lease or a token, and authenticate with `auth`, such as httpx.BasicAuth(…).

        A lease that knows that it is lost raises before anything is sent. httpx takes one `auth` per request, so this
        one replaces the client's own `auth`. To keep that, pass it here too.
        """
        self._fence = fence
        self._token = token_of(fence)
        self._auth = auth or httpx.Auth()

    def sync_auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send a request with the token; raise StaleTokenError if it was refused as stale."""
        self._present(request)
        flow = self._auth.sync_auth_flow(request)
        try:
            request = next(flow)
            while True:
                response = yield request
                if _is_refusal(response):
                    response.read()
                    self._raise_refusal(response)
                request = flow.send(response)
        except StopIteration:
            return
        finally:
            flow.close()

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """Send a request with the token; raise StaleTokenError if it was refused as stale."""
        self._present(request)
        flow = self._auth.async_auth_flow(request)
        try:
            request = await flow.__anext__()
            while True:
                response = yield request
                if _is_refusal(response):
                    await response.aread()
                    self._raise_refusal(response)
                request = await flow.asend(response)
        except StopAsyncIteration:
            return
        finally:
            await flow.aclose()

    def _present(self, request: httpx.Request) -> None:
        check = getattr(self._fence, "raise_if_lost", None)
        if check is not None:
            check()
        request.headers["Fencing-Token"] = str(self._token)
        request.headers["Fencing-Write"] = str(write_of(self._fence))

    @staticmethod
    def _raise_refusal(response: httpx.Response) -> None:
        """Raise StaleTokenError if the response is the problem document of a stale token."""
        try:
            problem = response.json()
            if problem["type"] != "urn:fenced-store:stale-token":
                return
            at, numbers = problem["stored_at"], problem.get("numbers")
            error = StaleTokenError(
                str(problem["resource"]),
                int(problem["offered"]),
                int(problem["stored"]),
                datetime.fromisoformat(at) if at else None,
                numbers=(int(numbers[0]), int(numbers[1])) if numbers else None,
            )
        except (ValueError, TypeError, KeyError, IndexError, OverflowError):
            return  # not a problem document of fenced_store
        raise error


def _is_refusal(response: httpx.Response) -> bool:
    kind = response.headers.get("content-type", "")
    return response.status_code == httpx.codes.CONFLICT and kind.startswith("application/problem+json")
