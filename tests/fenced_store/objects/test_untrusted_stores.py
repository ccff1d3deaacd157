"""Objects: stores that cannot hold a fence, damaged objects, and what other programs see."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from typing import Any

import pytest
from obstore.exceptions import AlreadyExistsError, GenericError
from obstore.store import MemoryStore, S3Store

from fenced_store import (
    InvalidArgument,
    ObjectDamaged,
)
from fenced_store.objects import FencedObjects, conditional
from fenced_store.objects.fence_tag import FenceTag, tag_in
from tests.fenced_store.objects.conftest import names_in
from tests.support.stepwise import Stepwise


class Heedless(MemoryStore):
    """A store that accepts conditions and ignores them, as some S3-compatible servers do."""

    heeds: str = ""

    def put(self, path: str, file: Any, *, mode: Any = None, **options: Any) -> Any:
        keeps = mode == "create" and self.heeds == "create"
        return super().put(path, file, mode=mode if keeps else None, **options)


@pytest.mark.parametrize("heeds", ["", "create"])
def test_probe_detects_a_store_that_ignores_conditions(heeds: str) -> None:
    store = Heedless()
    store.heeds = heeds
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"does not honour conditions.*pointers=FencedStore"):
            FencedObjects(store).put("a", b"one", fence=7)
        with pytest.raises(InvalidArgument, match="does not honour conditions"):
            FencedObjects(store).claim("a", fence=7)
    assert names_in(store) == [], "nothing was stored, and no probe is left"


def test_probe_detects_a_store_that_keeps_no_attributes() -> None:
    class Forgets(MemoryStore):
        def put(self, *args: Any, attributes: Any = None, **options: Any) -> Any:
            return super().put(*args, **options)

    store = Forgets()
    with pytest.raises(InvalidArgument, match="does not keep the attribute 'fence'"):
        FencedObjects(store).put("a", b"one", fence=7)
    assert names_in(store) == []


def test_probe_detects_a_store_whose_versions_recur(s3: S3Store) -> None:
    """On S3 they would, if bodies were not sealed."""
    objects = FencedObjects(s3)
    assert isinstance(objects._protocol, conditional.ConditionalProtocol)
    objects._protocol._sealed = False
    with pytest.raises(InvalidArgument, match="gives the same version to an object that was stored again"):
        objects.put("a", b"one", fence=7)
    assert names_in(s3) == []


def test_probe_whose_reply_was_lost_is_retried() -> None:
    class SendsTwice(MemoryStore):
        times = 2

        def put(self, *args: Any, **options: Any) -> Any:
            stored = super().put(*args, **options)
            if self.times and "probe" in args[0]:
                self.times -= 1
                return super().put(*args, **options)
            return stored

    store = SendsTwice()
    FencedObjects(store).put("a", b"one", fence=7)
    assert names_in(store) == ["a"]
    store.times = 1000
    with pytest.raises(AlreadyExistsError):
        FencedObjects(store).put("a", b"one", fence=7)


def test_probe_detects_a_store_without_conditional_put() -> None:
    class Without(MemoryStore):
        def put(self, *args: Any, mode: Any = None, **options: Any) -> Any:
            if mode is not None:
                raise NotImplementedError
            return super().put(*args, **options)

    with pytest.raises(InvalidArgument, match=r"no conditional put\. Give pointers"):
        FencedObjects(Without()).put("a", b"one", fence=7)


def test_probe_runs_once_and_leaves_no_object(s3: S3Store) -> None:
    objects = FencedObjects(s3)
    first = Stepwise(objects, lambda objects: objects.put("in/a", b"one", fence=7))
    first.finish()
    probes = [effect.args[0] for effect in first.performed if "probe" in str(effect.args)]
    assert probes
    assert all(name.startswith("in/a.fence-probe-") for name in probes)
    second = Stepwise(objects, lambda objects: objects.put("in/a", b"two", fence=7))
    second.finish()
    assert [effect.operation for effect in second.performed] == ["get", "put"]
    assert names_in(s3) == ["in/a"]


def test_probe_that_cannot_be_deleted_does_not_fail_the_write(caplog: pytest.LogCaptureFixture) -> None:
    class Keeps(MemoryStore):
        def delete(self, *args: Any) -> None:
            raise GenericError("may not delete")

    caplog.set_level(logging.DEBUG, "fenced_store")
    FencedObjects(Keeps()).put("a", b"one", fence=7)
    assert "was not deleted: may not delete" in caplog.text


@pytest.mark.parametrize(
    "tag",
    [
        "",
        "7",
        "{}",
        "[]",
        '{"token":7}',
        '{"token":"7","write":1,"length":0,"digest":"","by":""}',
        "nonsense",
        '{"token":0,"write":1,"length":0,"digest":"","by":""}',
        '{"token":7,"write":-1,"length":0,"digest":"","by":""}',
        '{"token":7,"write":1,"length":1.0,"digest":"","by":""}',
        '{"token":7,"write":1,"length":-1,"digest":"","by":""}',
        '{"token":7,"write":1,"length":0,"digest":1,"by":""}',
        '{"token":7,"write":1,"length":0,"digest":"","by":1}',
        '{"token":9223372036854775808,"write":1,"length":0,"digest":"","by":""}',
        '{"token":7,"write":0,"length":0,"digest":"","by":"","value_token":"x","value_write":1}',
        '{"token":7,"write":0,"length":0,"digest":"","by":"","deleted":1}',
        '{"token":7,"write":0,"length":0,"digest":"","by":"","value_at":"yesterday"}',
        '{"token":7,"write":0,"length":0,"digest":"","by":"","value_by":5}',
    ],
)
def test_unreadable_fence_refuses_every_writer(tag: str) -> None:
    store = MemoryStore()
    store.put("a", b"one", attributes={"fence": tag})
    objects = FencedObjects(store)
    for act in (
        lambda: objects.put("a", b"two", fence=2**62),
        lambda: objects.claim("a", fence=2**62),
        lambda: objects.get("a"),
    ):
        with pytest.raises(ObjectDamaged, match="attribute 'fence' cannot be read"):
            act()
    assert bytes(store.get("a").bytes()) == b"one"


def test_sealed_body_without_attributes_is_damage(s3: S3Store) -> None:
    """A copy or an operator may remove the attributes. The seal shows that the object had a fence."""
    objects = FencedObjects(s3)
    objects.put("a", b"one", fence=7)
    s3.put("a", bytes(s3.get("a").bytes()))
    for act in (
        lambda: objects.put("a", b"two", fence=6),
        lambda: objects.claim("a", fence=9),
        lambda: objects.get("a"),
    ):
        with pytest.raises(ObjectDamaged, match="written under token 7, and its attribute 'fence' was removed"):
            act()
    for body in (b"x" * 500, b"", b"\n" + b" " * 125, b"x" * 10):
        s3.put("a", body)
        found = objects.get("a")
        assert found is not None
        assert (found.data, found.token) == (body, 0)
        Stepwise(objects, lambda objects: objects.put("a", b"two", fence=6)).until("put")


def test_body_that_does_not_match_its_fence_is_damage() -> None:
    store = MemoryStore()
    objects = FencedObjects(store)
    objects.put("a", b"one", fence=7)
    tag = store.get("a").attributes["fence"]
    for body in (b"two", b"", b"on"):
        store.put("a", body, attributes={"fence": tag})
        with pytest.raises(ObjectDamaged, match="not the one that was written under token 7"):
            objects.get("a")
        with pytest.raises(ObjectDamaged):
            objects.claim("a", fence=8)
    objects.put("a", b"anew", fence=7)


def test_fence_tag_is_one_line_of_printable_ascii() -> None:
    tag = FenceTag.of(2**63 - 1, 2**63 - 1, b"x" * 1000, "ü  \r\n\t" + '"' * 5000)
    whole = tag.claimed(2**63 - 1, "\\" * 5000, datetime.now(timezone.utc)).to_json()
    assert len(whole) + 1000 < 2000, "with the user's attributes it fits into S3's limit"
    text = tag.to_json()
    assert text.isascii()
    assert text.isprintable()
    assert "  " not in text
    assert len(text) < 700, "S3 allows 2 KB of attributes"
    assert tag_in("a", {"fence": text}) == tag
    now = datetime.now(timezone.utc)
    claimed = FenceTag.of(1, 5, None, "a", {"x": "y"}).claimed(2, "b", now).claimed(3, "c", None)
    assert (claimed.pair, claimed.value_pair, claimed.deleted, claimed.value_by) == ((3, 0), (1, 5), True, "a")
    assert claimed.value_at == now.isoformat()
    assert tag_in("a", {"fence": claimed.to_json()}) == claimed


def test_other_programs_can_read_an_object_on_s3(s3: S3Store) -> None:
    """Only blanks are appended to the body, and the attribute states its length."""
    FencedObjects(s3).put("a.json", b'{"a": 1}', fence=7, attributes={"Content-Type": "application/json"})
    found = s3.get("a.json")
    body = bytes(found.bytes())
    assert json.loads(body) == {"a": 1}
    assert body[: json.loads(found.attributes["fence"])["length"]] == b'{"a": 1}'
    assert found.attributes["Content-Type"] == "application/json"


def test_other_stores_hold_exactly_the_body() -> None:
    store = MemoryStore()
    FencedObjects(store).put("a", b"one", fence=7)
    assert bytes(store.get("a").bytes()) == b"one"
