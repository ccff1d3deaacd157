from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import dblock
from dblock._core.options import TTL_MAX, lock_options

NOWHERE = "postgresql://app:hunter2@127.0.0.1:1/nothing"


def lock(name: Any = "a", **options: Any) -> Any:
    return dblock.Client(NOWHERE).lock(name, **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "1 to 512 bytes of UTF-8; '' has 0"),
        ("x" * 513, "has 513"),
        ("ü" * 257, "has 514"),
        ("a\0b", "contains a NUL"),
        ("\ud800", "half of a surrogate pair"),
        (None, "is text; got NoneType"),
        (b"a", "is text; got bytes"),
        (7, "is text; got int"),
    ],
)
def test_name_outside_its_limits_is_refused_before_anything_is_sent(name: Any, message: str) -> None:
    with pytest.raises(dblock.InvalidArgument, match=message) as caught:
        lock(name)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "ttl", [0, 0.099, -1, TTL_MAX + 0.1, float("inf"), timedelta(days=2), pytest.param(10**400, id="huge")]
)
def test_ttl_outside_its_limits_is_refused(ttl: Any) -> None:
    with pytest.raises(dblock.InvalidArgument, match="ttl of lock 'a' is .* between 0.1 s and 24 h"):
        lock(ttl=ttl)


@pytest.mark.parametrize("ttl", ["30", None, True, float("nan"), [30]])
def test_ttl_that_is_no_duration_is_refused(ttl: Any) -> None:
    with pytest.raises(dblock.InvalidArgument, match="ttl of lock 'a' is seconds or a timedelta"):
        lock(ttl=ttl)


@pytest.mark.parametrize("ttl", [0.1, 1, 86_400, timedelta(milliseconds=100), timedelta(hours=24)])
def test_ttl_limits_are_inclusive(ttl: Any) -> None:
    assert lock(ttl=ttl)


@pytest.mark.parametrize("timeout", [-0.1, timedelta(seconds=-1), float("-inf"), "1", float("nan")])
def test_invalid_timeout_is_refused(timeout: Any) -> None:
    with pytest.raises(dblock.InvalidArgument, match="timeout of lock 'a'"):
        lock(timeout=timeout)
    with pytest.raises(dblock.InvalidArgument, match="timeout of lock 'a'"):
        lock().acquire(timeout=timeout)


def test_infinite_timeout_waits_without_end() -> None:
    assert lock_options("a", 30, float("inf"), None).timeout is None
    assert lock_options("a", 30, None, None).timeout is None
    assert lock_options("a", 30, timedelta(seconds=2), None).timeout == 2


_deep: list[Any] = []
for _ in range(100_000):
    _deep = [_deep]
_loop: list[Any] = []
_loop.append(_loop)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"x": "y" * 8200}, "at most 8192 bytes of JSON; this one has 8209"),
        ({"x": object()}, "is not JSON"),
        ({"x": float("nan")}, "is not JSON"),
        ({"x": {1, 2}}, "is not JSON"),
        ({"x": "\0"}, "contains a NUL"),
        ({"x\0": 1}, "contains a NUL"),
        ({"x": "\\\0"}, "contains a NUL"),
        ({"x": "\udc00"}, "half of a surrogate pair"),
        pytest.param(_deep, "is not JSON", id="deep"),
        pytest.param(_loop, "is not JSON", id="loop"),
    ],
)
def test_meta_outside_its_limits_is_refused(meta: Any, message: str) -> None:
    with pytest.raises(dblock.InvalidArgument, match=f"^The meta of lock 'a' .*{message}"):
        lock(meta=meta)


def test_long_name_is_shortened_in_errors() -> None:
    with pytest.raises(dblock.InvalidArgument) as caught:
        lock("long" * 1000)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_size": 0}, "pool_size"),
        ({"pool_size": "4"}, "pool_size"),
        ({"schema": ""}, "schema's name"),
        ({"schema": "x" * 64}, "schema's name"),
        ({"schema": "pg_mine"}, "keeps names with pg_"),
        ({"schema": "public"}, "needs a schema of its own"),
        ({"schema": "\ud800"}, "schema's name"),
        ({"holder": "x" * 513}, "at most 512 bytes"),
        ({"holder": "\ud800"}, "at most 512 bytes"),
        ({"patience": float("inf")}, "patience"),
        ({"patience": -1}, "patience"),
        ({"holder": "a\0b"}, "without NUL"),
        ({"patience": "soon"}, "patience is seconds"),
    ],
)
def test_client_refuses_options_outside_their_limits(options: dict[str, Any], message: str) -> None:
    with pytest.raises(dblock.InvalidArgument, match=message):
        dblock.Client(NOWHERE, **options)
