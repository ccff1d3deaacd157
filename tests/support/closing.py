"""Close a client at the step that matters: between its decision to call the database and the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.facade import Clients


@contextmanager
def closing_before(function: str, clients: Clients, client: Any) -> Iterator[None]:
    """Close the client when it is about to call this function of the database, and let the call go on then."""
    close = getattr(client, "_inner", client).close
    with clients.before_calls(lambda called: close() if called == function else None, client):
        yield
