"""What locks and leases need of the client that they belong to."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, TypeVar

from dblock._core.acquire import LockFlows
from dblock._core.effects import Flow
from dblock._core.lease_state import LeaseState

if TYPE_CHECKING:
    from dblock._runtime.callbacks import AsyncCallbackTimer, CallbackTimer
    from dblock._runtime.keepalive import AsyncKeepAlive, KeepAlive

T = TypeVar("T")


class ThreadBacking(typing.Protocol):
    """What a lease needs of its client, for threads."""

    _flows: LockFlows
    _schema: str
    _installation: str
    _keepalive: KeepAlive
    _callbacks: CallbackTimer

    def _run(self, steps: Flow[T]) -> T: ...

    def _run_last(self, steps: Flow[T]) -> T: ...

    def _keep(self, state: LeaseState) -> None: ...


class TaskBacking(typing.Protocol):
    """What a lease needs of its client, for asyncio."""

    _flows: LockFlows
    _schema: str
    _installation: str
    _keepalive: AsyncKeepAlive
    _callbacks: AsyncCallbackTimer

    async def _run(self, steps: Flow[T]) -> T: ...

    async def _run_last(self, steps: Flow[T]) -> T: ...

    def _keep(self, state: LeaseState) -> None: ...
