"""What locks and leases need of the client that they belong to."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, TypeVar

from dblock.calls import Place, Steps
from dblock.hold import Hold
from dblock.steps import Service

if TYPE_CHECKING:
    from dblock.keepalive import AsyncKeepAlive, KeepAlive
    from dblock.watch import AsyncWatch, Watch

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
