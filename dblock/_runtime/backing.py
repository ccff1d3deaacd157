"""What locks and leases need of the client that they belong to."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, TypeVar

from dblock._core.acquire import Service
from dblock._core.effects import Place, Steps
from dblock._core.lease_state import Hold

if TYPE_CHECKING:
    from dblock._runtime.callbacks import AsyncWatch, Watch
    from dblock._runtime.keepalive import AsyncKeepAlive, KeepAlive

T = TypeVar("T")


class ThreadBacking(typing.Protocol):
    """What a lease needs of its client, for threads."""

    _service: Service
    _schema: str
    _installation: str
    _keeper: KeepAlive
    _watch: Watch

    def _place(self, name: str, attempt: str) -> Place: ...

    def _run(self, steps: Steps[T]) -> T: ...

    def _run_last(self, steps: Steps[T]) -> T: ...

    def _keep(self, hold: Hold, keep_alive: bool) -> None: ...


class TaskBacking(typing.Protocol):
    """What a lease needs of its client, for asyncio."""

    _service: Service
    _schema: str
    _installation: str
    _keeper: AsyncKeepAlive
    _watch: AsyncWatch

    def _place(self, name: str, attempt: str) -> Place: ...

    async def _run(self, steps: Steps[T]) -> T: ...

    async def _run_last(self, steps: Steps[T]) -> T: ...

    def _keep(self, hold: Hold, keep_alive: bool) -> None: ...
