"""Functions that run under a lock."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import dblock

pytestmark = [pytest.mark.usefixtures("patient")]


class Item(dict[str, Any]):
    """An argument with an attribute and with items."""

    number = 7


@pytest.fixture
async def tasks(dsn: str) -> AsyncIterator[dblock.AsyncClient]:
    async with dblock.AsyncClient(dsn) as client:
        yield client


@pytest.fixture
def lazy() -> dblock.Client:
    """A client that is never used, for what is refused where the decorator is applied."""
    return dblock.Client("postgresql://nowhere.invalid/none")


def name_of(client: dblock.Client, template: str, function: Any, *args: Any, **options: Any) -> str:
    """Return the name of the lock under which the function runs."""
    return str(client.locked(template)(function)(*args, **options))


def test_placeholders_take_every_kind_of_argument(client: dblock.Client) -> None:
    def function(first: Any, /, second: Any = 2, *rest: Any, third: Any = 3, **others: Any) -> str:
        return dblock.current_lease().name

    cases: list[tuple[str, list[Any], dict[str, Any], str]] = [
        ("user:{first}", [1], {}, "user:1"),
        ("{first}:{second}:{third}", ["a"], {}, "a:2:3"),
        ("{second}", ["a"], {"second": "b"}, "b"),
        ("{third}", ["a"], {"third": "c"}, "c"),
        ("{first.number}:{first[id]}", [Item(id=9)], {}, "7:9"),
        ("{rest[0]}", ["a", "b", "c"], {}, "c"),
        ("{others[more]}", ["a"], {"more": "d"}, "d"),
        ("{first!r}:{second:03d}", ["a"], {}, "'a':002"),
        ("{first:{second}}", [7], {"second": "04"}, "0007"),
        ("{{first}}", ["a"], {}, "{first}"),
        ("fixed", ["a"], {}, "fixed"),
    ]
    for template, args, options, expected in cases:
        assert name_of(client, template, function, *args, **options) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("user:{user}", r"\{user\} .* names no parameter of .*function\(\)\. .*: user_id, args, kwargs\."),
        ("user:{user.id}", r"\{user\.id\}"),
        ("user:{}", r"\{\}"),
        ("user:{0}", r"\{0\}"),
        ("user:{args}", r"any number of arguments.*\{args\[0\]\}"),
        ("user:{kwargs}", "any number of arguments"),
        ("user:{user_id:{width}}", r"\{width\}"),
        ("user:{user_id", "cannot be read"),
        ("user:}", "cannot be read"),
        ("", "is text"),
        (7, "is text"),
    ],
)  # fmt: skip
def test_wrong_placeholder_is_refused_when_the_decorator_is_applied(
    lazy: dblock.Client, template: Any, message: str
) -> None:
    def function(user_id: int, *args: Any, **kwargs: Any) -> None: ...

    with pytest.raises(dblock.InvalidArgument, match=message):
        lazy.locked(template)(function)


def test_claims_have_placeholders_too(client: dblock.Client, lazy: dblock.Client, owner: psycopg.Connection) -> None:
    def function(ledger: str) -> int:
        return dblock.current_lease().token

    token = client.locked("a", claims=["ledger:{ledger}"])(function)("x")
    fences = owner.execute("SELECT resource, token FROM fenced_store.fences").fetchall()
    assert fences == [("ledger:x", token)]
    with pytest.raises(dblock.InvalidArgument, match=r"\{other\}"):
        lazy.locked("a", claims=["ledger:{other}"])(function)


@pytest.mark.parametrize(
    "options",
    [
        {"ttl": 0},
        {"timeout": -1},
        {"meta": object()},
        {"reentrant": "yes"},
        {"on_busy": "run"},
        {"on_busy": "skip", "timeout": 3},
        {"on_busy": "raise", "timeout": 3},
        {"claims": "x"},
    ],
)
def test_wrong_option_is_refused_at_once(lazy: dblock.Client, options: Any) -> None:
    with pytest.raises(dblock.InvalidArgument):
        lazy.locked("a", **options)


@pytest.mark.parametrize(
    ("template", "value", "message"),
    [
        ("{user_id.id}", 7, r"\{user_id\.id\} .* has no value in this call: AttributeError"),
        ("{user_id[0]}", 7, "has no value"),
        ("{user_id[0]}", [], "has no value"),
        ("{user_id}", object(), "value of type object, whose text is its address in memory"),
        ("{user_id:zz}", 7, "format 'zz' .* does not fit the value of type int .* Nothing was run"),
        ("{user_id:>8}", None, "does not fit the value of type NoneType"),
        ("{user_id}", "", "1 to 512 bytes"),
        ("{user_id}", "x" * 600, "1 to 512 bytes"),
        ("{user_id}", "\0", "NUL"),
    ],
)
def test_argument_that_gives_no_name_is_refused_and_nothing_runs(
    lazy: dblock.Client, template: str, value: Any, message: str
) -> None:
    with pytest.raises(dblock.InvalidArgument, match=message):
        lazy.locked(template)(lambda user_id: pytest.fail("the function ran"))(value)


def test_missing_argument_is_a_type_error(lazy: dblock.Client) -> None:
    with pytest.raises(TypeError, match="user_id"):
        lazy.locked("{user_id}")(lambda user_id: None)()  # type: ignore[call-arg]


def test_coroutine_functions_and_functions_need_their_own_client(lazy: dblock.Client) -> None:
    async def coroutine() -> None: ...

    def function() -> None: ...

    with pytest.raises(dblock.InvalidArgument, match=r"coroutine\(\) is a coroutine function. Use AsyncClient"):
        lazy.locked("a")(coroutine)
    with pytest.raises(dblock.InvalidArgument, match=r"function\(\) is not a coroutine function"):
        dblock.AsyncClient("postgresql://nowhere.invalid/none").locked("a")(function)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [dblock.Client, dblock.AsyncClient])
def test_classes_are_refused(kind: Any) -> None:
    locked = kind("postgresql://nowhere.invalid/none").locked("a")
    for other in (Item, 7):
        with pytest.raises(dblock.InvalidArgument, match="decorates a function"):
            locked(other)


def test_body_that_has_yet_to_run_is_refused(client: dblock.Client) -> None:
    """A function may return a coroutine or generator without being one."""

    async def coroutine() -> None:
        pytest.fail("the body ran without the lock")

    for late in (coroutine, lambda: (number for number in range(3))):
        with pytest.raises(dblock.InvalidArgument, match="after the lock is released"):
            client.locked("a")(lambda late=late: late())()
    assert client.lock("a").holder() is None


def test_busy_lock_is_waited_for_skipped_or_refused(client: dblock.Client) -> None:
    calls: list[int] = []
    free = client.lock("a:1").acquire()

    def function(n: int) -> int:
        calls.append(n)
        return n + 1

    assert client.locked("a:{n}", on_busy="skip")(function)(1) is dblock.SKIPPED
    for options in ({"on_busy": "raise"}, {"timeout": 0.1}):
        with pytest.raises(dblock.LockTimeout) as caught:
            client.locked("a:{n}", **options)(function)(1)
        assert caught.value.timeout == options.get("timeout", 0)
    assert calls == []
    releasing = threading.Timer(0.1, free.release)
    releasing.start()
    assert client.locked("a:{n}", timeout=20)(function)(1) == 2
    releasing.join()
    assert client.locked("a:{n}", on_busy="skip")(function)(2) == 3
    assert client.locked("a:{n}", on_busy="raise")(function)(3) == 4
    assert calls == [1, 2, 3]


async def test_busy_lock_is_waited_for_skipped_or_refused_by_a_task(tasks: dblock.AsyncClient) -> None:
    calls: list[int] = []

    async def function(n: int) -> int:
        calls.append(n)
        return n + 1

    held = await tasks.lock("a:1").acquire()
    assert await tasks.locked("a:{n}", on_busy="skip")(function)(1) is dblock.SKIPPED
    with pytest.raises(dblock.LockTimeout):
        await tasks.locked("a:{n}", on_busy="raise")(function)(1)
    assert calls == []
    waiting = asyncio.create_task(tasks.locked("a:{n}", timeout=20)(function)(1))
    await held.release()
    assert await waiting == 2
    assert await tasks.locked("a:{n}", on_busy="skip")(function)(2) == 3


def test_function_holds_the_lock_while_it_runs(client: dblock.Client) -> None:
    @client.locked("a", ttl=20, meta={"job": 7})
    def function() -> int:
        dblock.assert_locked("a")
        lease = dblock.current_lease()
        holder = client.lock("a").holder()
        assert holder is not None
        assert (holder.token, holder.meta, lease.ttl) == (lease.token, {"job": 7}, 20)
        assert isinstance(lease, dblock.Lease)
        return lease.token

    assert function() < function()
    assert client.lock("a").holder() is None
    with pytest.raises(dblock.DblockError, match="no current lease"):
        dblock.current_lease()


def test_error_of_the_function_releases_the_lock(client: dblock.Client) -> None:
    @client.locked("a")
    def function() -> None:
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            function()
    assert client.lock("a").holder() is None


def test_function_whose_lease_is_lost_raises(client: dblock.Client, owner: psycopg.Connection) -> None:
    @client.locked("a")
    def function() -> None:
        owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")

    with pytest.raises(dblock.LeaseLost):
        function()


async def test_coroutine_whose_lease_is_lost_is_cancelled(tasks: dblock.AsyncClient) -> None:
    @tasks.locked("a")
    async def function() -> None:
        lease = dblock.current_lease()
        assert isinstance(lease, dblock.AsyncLease)
        lease._grant.lose(dblock.Reason.FORCED)
        await asyncio.sleep(20)
        pytest.fail("the body was not cancelled")

    with pytest.raises(dblock.LeaseLost):
        await function()


def test_methods_of_every_kind_run_under_their_lock(client: dblock.Client) -> None:
    class Account:
        def __init__(self, number: int) -> None:
            self.number = number

        @client.locked("account:{self.number}")
        def close(self, reason: str = "") -> str:
            return dblock.current_lease().name + reason

        @client.locked("{cls.__name__}:{n}")
        @classmethod
        def outer(cls, n: int) -> str:
            return dblock.current_lease().name

        @classmethod
        @client.locked("{cls.__name__}:{n}")
        def inner(cls, n: int) -> str:
            return dblock.current_lease().name

        @client.locked("static:{n}")
        @staticmethod
        def outer_static(n: int) -> str:
            return dblock.current_lease().name

        @staticmethod
        @client.locked("static:{n}")
        def inner_static(n: int) -> str:
            return dblock.current_lease().name

    account = Account(7)
    assert account.close("!") == Account.close(account, reason="!") == "account:7!"
    for method in (account.outer, Account.outer, account.inner, Account.inner):
        assert method(1) == "Account:1"
    for method in (account.outer_static, Account.outer_static, account.inner_static, Account.inner_static):
        assert method(1) == "static:1"


@pytest.mark.second_stage
async def test_coroutine_methods_of_every_kind_run_under_their_lock(tasks: dblock.AsyncClient) -> None:
    class Account:
        number = 7

        @tasks.locked("account:{self.number}")
        async def close(self) -> str:
            return dblock.current_lease().name

        @tasks.locked("{cls.__name__}:{n}")
        @classmethod
        async def outer(cls, n: int) -> str:
            return dblock.current_lease().name

    assert await Account().close() == "account:7"
    assert await Account.outer(1) == "Account:1"


def test_wrapper_looks_like_the_function(client: dblock.Client) -> None:
    def function(user_id: int, *, force: bool = False) -> str:
        """Do it."""
        return ""

    wrapped = client.locked("user:{user_id}")(function)
    assert wrapped.__name__ == "function"
    assert wrapped.__doc__ == "Do it."
    assert inspect.signature(wrapped) == inspect.signature(function)
    assert wrapped.__wrapped__ is function  # type: ignore[attr-defined]


async def test_coroutine_wrapper_is_a_coroutine_function(tasks: dblock.AsyncClient) -> None:
    async def function(user_id: int) -> str:
        return ""

    wrapped = tasks.locked("user:{user_id}")(function)
    assert inspect.iscoroutinefunction(wrapped)
    assert inspect.signature(wrapped) == inspect.signature(function)


def test_reentrant_function_may_call_itself(client: dblock.Client) -> None:
    @client.locked("a", reentrant=True)
    def factorial(n: int) -> tuple[int, set[int]]:
        token = dblock.current_lease().token
        if n == 1:
            return 1, {token}
        result, tokens = factorial(n - 1)
        assert dblock.current_lease().token == token
        return n * result, tokens | {token}

    result, tokens = factorial(5)
    assert result == 120
    assert len(tokens) == 1
    assert client.lock("a").holder() is None


@pytest.mark.second_stage
def test_decorator_serves_many_threads(client: dblock.Client) -> None:
    inside: set[int] = set()

    @client.locked("part:{part}", timeout=20)
    def function(part: int) -> str:
        assert part not in inside
        inside.add(part)
        name = dblock.current_lease().name
        inside.remove(part)
        return name

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(function, [1, 2] * 10)) == ["part:1", "part:2"] * 10


async def test_child_tasks_see_the_current_lease_and_do_not_hold_its_lock(tasks: dblock.AsyncClient) -> None:
    async def child() -> int:
        with pytest.raises(dblock.NotLocked):
            dblock.assert_locked("a")
        return dblock.current_lease().token

    @tasks.locked("a")
    async def function() -> None:
        assert await asyncio.create_task(child()) == dblock.current_lease().token

    await function()
