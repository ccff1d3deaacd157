"""The drivers: each effect is performed in turn, and its result or its error goes back into the flow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dblock._core.effects import Call, CallOverKeepAlive, Flow, drive, drive_async, redirect

FIRST, SECOND = Call(b"SELECT 1", ()), Call(b"SELECT 2", ())


def asks_twice(log: list[Any]) -> Flow[str]:
    for call in (FIRST, SECOND):
        try:
            log.append((yield call))
        except ValueError as error:
            log.append(error)
    return "done"


def fails_first(call: Call) -> str:
    if call is FIRST:
        raise ValueError
    return "row"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_error_of_an_effect_is_raised_in_the_flow_which_may_continue(kind: str) -> None:
    log: list[Any] = []

    async def perform(call: Call) -> str:
        return fails_first(call)

    if kind == "sync":
        assert drive(asks_twice(log), fails_first) == "done"
    else:
        assert asyncio.run(drive_async(asks_twice(log), perform)) == "done"
    assert isinstance(log[0], ValueError)
    assert log[1:] == ["row"]


def test_error_that_the_flow_does_not_catch_reaches_the_caller() -> None:
    def perform(call: Call) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drive(asks_twice([]), perform)


def test_redirected_flow_makes_the_same_calls_elsewhere_and_sees_their_errors() -> None:
    log: list[Any] = []
    flow = redirect(asks_twice(log), CallOverKeepAlive)
    assert next(flow) == CallOverKeepAlive(FIRST)
    assert flow.throw(ValueError()) == CallOverKeepAlive(SECOND)
    with pytest.raises(StopIteration) as done:
        flow.send("row")
    assert done.value.value == "done"
    assert isinstance(log[0], ValueError)
    assert log[1:] == ["row"]
