"""Close a client at the step that matters: between its decision to call the database and the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dblock._core.effects import Call
from dblock._runtime.runner import AsyncRunner, Runner


@contextmanager
def closing_before(function: str, client: Any) -> Iterator[None]:
    """Close the client when it is about to call this function of the database, and let the call go on then."""
    sync, asynchronous = Runner._call, AsyncRunner._call
    inner = getattr(client, "_inner", client)

    def is_due(runner: Any, call: Call) -> bool:
        return runner is inner._runtime.runner and f".{function}(" in call.sql.decode()

    def call_sync(self: Any, call: Call, *rest: Any) -> Any:
        if is_due(self, call):
            inner.close()
        return sync(self, call, *rest)

    async def call_async(self: Any, call: Call, *rest: Any) -> Any:
        if is_due(self, call):
            await inner.close()
        return await asynchronous(self, call, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "_call", call_sync)
        patch.setattr(AsyncRunner, "_call", call_async)
        yield
