"""Generators that run under a lock: it is held from the first step to the end, and a loss stops the body."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import aclosing, closing, contextmanager
from typing import Any

import pytest

import dblock

pytestmark = [pytest.mark.usefixtures("patient")]


@pytest.fixture
async def tasks(dsn: str) -> AsyncIterator[dblock.AsyncClient]:
    async with dblock.AsyncClient(dsn) as client:
        yield client


def lose(lease: dblock.Lease | dblock.AsyncLease) -> None:
    lease._grant.lose(dblock.Reason.FORCED)


def pending_cancellations() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling() if hasattr(task, "cancelling") else 0


def test_generator_holds_its_lock_from_its_first_step_to_its_end(client: dblock.Client) -> None:
    @client.locked("user:{user_id}")
    def rows(user_id: int) -> Generator[str, int, str]:
        sent = 0
        while sent < 2:
            sent = yield f"{dblock.current_lease().name} {sent}"
        return "done"

    assert inspect.isgeneratorfunction(rows)
    steps = rows(7)
    assert client.lock("user:7").holder() is None
    assert next(steps) == "user:7 0"
    assert client.lock("user:7").holder() is not None
    with pytest.raises(dblock.DblockError, match="no current lease"):
        dblock.current_lease()
    assert steps.send(1) == "user:7 1"
    with pytest.raises(StopIteration) as ended:
        steps.send(2)
    assert ended.value.value == "done"
    assert client.lock("user:7").holder() is None


@pytest.mark.parametrize("ending", ["closed", "dropped", "error"])
def test_generator_that_ends_early_releases_its_lock(client: dblock.Client, ending: str) -> None:
    ended: list[str] = []

    @client.locked("a")
    def rows() -> Iterator[int]:
        try:
            yield 1
        finally:
            ended.append(dblock.current_lease().name)

    steps: Any = rows()
    next(steps)
    if ending == "closed":
        steps.close()
    elif ending == "error":
        with pytest.raises(ValueError, match="mine"):
            steps.throw(ValueError("mine"))
    del steps
    assert ended == ["a"]
    assert client.lock("a").holder() is None


def test_generator_whose_lease_is_lost_between_two_steps_learns_of_it_at_its_yield(client: dblock.Client) -> None:
    leases: list[Any] = []

    @client.locked("a")
    def rows() -> Iterator[int]:
        leases.append(dblock.current_lease())
        with pytest.raises(dblock.LeaseLost):
            yield 1
        yield 2

    with closing(rows()) as steps:  # type: ignore[type-var]
        assert next(steps) == 1
        lose(leases[0])
        assert next(steps) == 2
        with pytest.raises(dblock.LeaseLost):
            next(steps)


def test_generator_of_a_busy_lock_raises_at_its_first_step(client: dblock.Client) -> None:
    @client.locked("a", on_busy="raise")
    def rows() -> Iterator[int]:
        yield 1

    with client.lock("a"):
        steps = rows()
        with pytest.raises(dblock.LockTimeout):
            next(steps)
    assert list(rows()) == [1]


def test_context_managers_and_methods_may_be_locked_generators(client: dblock.Client) -> None:
    class Account:
        number = 7

        @contextmanager
        @client.locked("account:{self.number}")
        def opened(self) -> Iterator[str]:
            yield dblock.current_lease().name

        @client.locked("{cls.__name__}")
        @classmethod
        def names(cls) -> Iterator[str]:
            yield dblock.current_lease().name

    with Account().opened() as name:
        assert name == "account:7"
        assert client.lock("account:7").holder() is not None
    assert client.lock("account:7").holder() is None
    assert list(Account.names()) == ["Account"]


@pytest.mark.parametrize("kind", [dblock.Client, dblock.AsyncClient])
def test_generator_is_refused_where_the_decorator_is_applied(kind: Any) -> None:
    def rows(user_id: int) -> Iterator[int]:
        yield 1

    async def async_rows(user_id: int) -> AsyncIterator[int]:
        yield 1

    client = kind("postgresql://nowhere.invalid/none")
    fits, other = (rows, async_rows) if kind is dblock.Client else (async_rows, rows)
    for function in (fits, functools.partial(fits)):
        with pytest.raises(dblock.InvalidArgument, match=r"\{user\}"):
            client.locked("user:{user}")(function)
        with pytest.raises(dblock.InvalidArgument, match='on_busy="raise"'):
            client.locked("a", on_busy="skip")(function)
    with pytest.raises(dblock.InvalidArgument, match=r"Use (Async)?Client\.locked"):
        client.locked("a")(other)


async def test_async_generator_holds_its_lock_from_its_first_step_to_its_end(tasks: dblock.AsyncClient) -> None:
    @tasks.locked("user:{user_id}")
    async def rows(user_id: int) -> AsyncIterator[str]:
        for number in range(2):
            await asyncio.sleep(0)
            yield f"{dblock.current_lease().name} {number}"

    assert inspect.isasyncgenfunction(rows)
    seen = []
    async for row in rows(7):
        seen.append(row)
        assert await tasks.lock("user:7").holder() is not None
        with pytest.raises(dblock.DblockError, match="no current lease"):
            dblock.current_lease()
    assert seen == ["user:7 0", "user:7 1"]
    assert await tasks.lock("user:7").holder() is None


async def test_async_generator_takes_what_its_caller_sends_and_throws(tasks: dblock.AsyncClient) -> None:
    ended: list[str] = []

    @tasks.locked("a")
    async def rows() -> AsyncGenerator[int, Any]:
        try:
            assert (yield 1) == "sent"
            with pytest.raises(ValueError, match="mine"):
                yield 2
            yield 3
        finally:
            await asyncio.sleep(0)
            ended.append(dblock.current_lease().name)

    async with aclosing(rows()) as steps:
        assert await anext(steps) == 1
        assert await steps.asend("sent") == 2
        assert await steps.athrow(ValueError("mine")) == 3
    assert ended == ["a"]
    assert await tasks.lock("a").holder() is None


@pytest.mark.parametrize("catches", [False, True])
async def test_async_generator_whose_lease_is_lost_in_a_step_is_cancelled(
    tasks: dblock.AsyncClient, catches: bool
) -> None:
    @tasks.locked("a")
    async def rows() -> AsyncIterator[int]:
        yield 0
        lose(dblock.current_lease())
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            if not catches:
                raise
            yield 1
        pytest.fail("the body was not cancelled")

    steps = rows()
    assert await anext(steps) == 0
    with pytest.raises(dblock.LeaseLost):
        await anext(steps)
    assert pending_cancellations() == 0
    await asyncio.sleep(0.01)


async def test_async_generator_whose_lease_is_lost_between_two_steps_does_not_cancel_its_caller(
    tasks: dblock.AsyncClient,
) -> None:
    leases: list[Any] = []

    @tasks.locked("a")
    async def rows() -> AsyncIterator[int]:
        leases.append(dblock.current_lease())
        yield 1
        pytest.fail("the body ran on")

    steps = rows()
    assert await anext(steps) == 1
    lose(leases[0])
    await asyncio.sleep(0.05)
    with pytest.raises(dblock.LeaseLost):
        await anext(steps)
    assert pending_cancellations() == 0


async def test_async_generator_that_is_cancelled_by_its_caller_releases_its_lock(tasks: dblock.AsyncClient) -> None:
    begun = asyncio.Event()

    @tasks.locked("a")
    async def rows() -> AsyncIterator[int]:
        begun.set()
        await asyncio.sleep(20)
        yield 1

    async def consume() -> None:
        async for _ in rows():
            pass

    task = asyncio.create_task(consume())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await tasks.lock("a").holder() is None
