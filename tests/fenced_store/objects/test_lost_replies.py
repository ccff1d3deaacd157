"""Objects: writes and claims whose replies are lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError
from obstore.store import MemoryStore

from fenced_store import (
    ObjectBusy,
    OutcomeUnknown,
    StaleTokenError,
)
from fenced_store.objects import FencedObjects, conditional
from tests.support.s3 import bucket
from tests.support.stepwise import Stepwise


class Unreliable(MemoryStore):
    """A store that loses replies, before or after it has performed the request."""

    faults: list[str]

    def put(self, *args: Any, **options: Any) -> Any:
        fault = self.faults.pop(0) if self.faults else None
        if fault == "before":
            raise GenericError("the line is dead\nand more")
        stored = super().put(*args, **options)
        if fault == "after":
            raise GenericError("the line is dead\nand more")
        return stored


@pytest.fixture
def unreliable(monkeypatch: pytest.MonkeyPatch) -> Unreliable:
    monkeypatch.setattr(conditional, "PAUSE", 0.001)
    made = Unreliable()
    made.faults = []
    FencedObjects(made).put("a", b"first", fence=1)
    return made


@pytest.mark.parametrize("faults", [["before"], ["after"], ["before", "after"], ["before"] * 3])
def test_write_whose_reply_was_lost_is_stored_once(unreliable: Unreliable, faults: list[str]) -> None:
    unreliable.faults = list(faults)
    objects = FencedObjects(unreliable, probe=False)
    assert not objects.put("a", b"one", fence=7).repeated
    assert unreliable.faults == []
    found = objects.get("a")
    assert found is not None
    assert found.data == b"one"


def test_write_whose_reply_was_lost_succeeds_after_a_claim(unreliable: Unreliable) -> None:
    """The stored value is that of this write, so it succeeds, and the claimant has seen it."""
    objects = FencedObjects(unreliable, probe=False)
    unreliable.faults = ["after"]
    writer = Stepwise(objects, lambda objects: objects.put("a", b"one", fence=7)).until("put")
    writer.step()
    FencedObjects(unreliable, probe=False).claim("a", fence=8)
    writer.finish()
    stored = json.loads(unreliable.get("a").attributes["fence"])
    assert objects.put("a", b"one", fence=7, write=stored["value_write"]).repeated
    with pytest.raises(StaleTokenError):
        objects.put("a", b"two", fence=7, write=stored["value_write"])
    FencedObjects(unreliable, probe=False).claim("a", fence=9)
    assert objects.put("a", b"one", fence=7, write=stored["value_write"]).repeated


@pytest.mark.parametrize("last", ["before", "after"])
def test_write_without_any_reply_is_unknown_and_can_be_retried(unreliable: Unreliable, last: str) -> None:
    unreliable.faults = ["before"] * 3 + [last]
    objects = FencedObjects(unreliable, probe=False)
    with pytest.raises(OutcomeUnknown, match=r"is unknown: the line is dead\. Send the same write again") as caught:
        objects.put("a", b"one", fence=7)
    unreliable.faults = []
    assert objects.put("a", b"one", fence=7, write=caught.value.write).repeated == (last == "after")


def test_refused_retry_of_an_unanswered_write_is_unknown(
    unreliable: Unreliable, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = FencedObjects(unreliable, probe=False)
    unreliable.faults = ["after"]
    writer = Stepwise(objects, lambda objects: objects.put("a", b"one", fence=7)).until("put")
    writer.step()
    monkeypatch.setattr(Unreliable, "get", _denied, raising=False)
    with pytest.raises(OutcomeUnknown, match="may not read") as caught:
        writer.finish()
    monkeypatch.undo()
    assert objects.put("a", b"one", fence=7, write=caught.value.write).repeated


def _denied(*args: Any, **options: Any) -> Any:
    raise PermissionDeniedError("may not read")


def test_claim_without_a_reply_can_be_retried(unreliable: Unreliable) -> None:
    unreliable.faults = ["before"] * 4
    objects = FencedObjects(unreliable, probe=False)
    with pytest.raises(GenericError):
        objects.claim("a", fence=7)
    objects.claim("a", fence=7)


def test_missing_bucket_raises_at_once(s3_address: str) -> None:
    with pytest.raises(FileNotFoundError):
        FencedObjects(bucket(s3_address, "no-such-bucket"), probe=False).put("a", b"one", fence=7)
    with pytest.raises(FileNotFoundError):
        FencedObjects(bucket(s3_address, "no-such-bucket")).put("a", b"one", fence=7)


def test_writer_that_is_always_overtaken_gets_object_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(MemoryStore):
        def put(self, *args: Any, **options: Any) -> Any:
            super().put("a", b"another")
            return super().put(*args, **options)

    monkeypatch.setattr(conditional, "MAX_CONFLICTS", 3)
    store = Busy()
    with pytest.raises(ObjectBusy, match="each of 3 attempts"):
        FencedObjects(store, probe=False).put("a", b"one", fence=7)
