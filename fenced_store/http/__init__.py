"""HTTP services that refuse a stale fencing token, and clients that send one.

`FencingMiddleware` needs nothing beyond fenced_store. `FencingAuth` needs httpx: pip install 'httpx>=0.27'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fenced_store.http.middleware import FencingMiddleware

if TYPE_CHECKING:
    from fenced_store.http.httpx_auth import FencingAuth

__all__ = ["FencingAuth", "FencingMiddleware"]


def __getattr__(name: str) -> object:
    """Import FencingAuth on first use, so that a service without httpx can import the middleware."""
    if name != "FencingAuth":
        raise AttributeError(f"module 'fenced_store.http' has no attribute {name!r}")
    from fenced_store.http.httpx_auth import FencingAuth

    return FencingAuth
