"""Objects: what is stored and read, what is refused, and what happens between a read and a conditional put."""

from __future__ import annotations

import inspect
import json
import logging
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError
from obstore.store import AzureStore, HTTPStore, LocalStore, MemoryStore, S3Store

import dblock
from fenced_store import (
    AsyncFencedStore,
    FenceAhead,
    FencedStore,
    InvalidArgument,
    ObjectBusy,
    ObjectDamaged,
    OutcomeUnknown,
    StaleTokenError,
)
from fenced_store.objects import AsyncFencedObjects, FencedObjects, conditional
from fenced_store.objects.fence_tag import FenceTag, tag_in
from tests.fenced_store.conftest import Place
from tests.support.s3 import accepted_in_order, bucket
from tests.support.stepwise import Stepwise


def names_in(store: Any) -> list[str]:
    return sorted(one["path"] for chunk in store.list() for one in chunk)


PATHS = ["a", "a/b/c.csv", "a b", "ü/日本", "a%20b", "a?b*c", "x@y-1", "back\\slash", "a:b;c=d,e", "~", "%2e%2e", "…"]


@pytest.mark.parametrize("path", PATHS)
def test_get_returns_the_value_that_was_put(objects: FencedObjects, path: str) -> None:
    for data in (b"one", b"", bytes(range(256)) * 5):
        stored = objects.put(path, data, fence=7)
        assert (stored.path, stored.token, stored.repeated) == (path, 7, False)
        found = objects.get(path)
        assert found is not None
        assert (found.path, found.data, found.token) == (path, data, 7)
        assert found.stored_by is not None
        assert "pid" in found.stored_by


def test_put_accepts_every_bytes_type(objects: FencedObjects) -> None:
    objects.put("a", bytearray(b"one"), fence=1)  # type: ignore[arg-type]
    objects.put("a", memoryview(b"two"), fence=1)  # type: ignore[arg-type]
    found = objects.get("a")
    assert found is not None
    assert found.data == b"two"


def test_user_attributes_are_kept(objects: FencedObjects) -> None:
    given = {"Content-Type": "text/csv", "owner": "me"}
    objects.put("a", b"one", fence=7, attributes=given)
    before = objects.get("a")
    objects.claim("a", fence=8)
    objects.claim("a", fence=9)
    found = objects.get("a")
    assert found is not None
    assert before is not None
    assert (found.stored_at, found.stored_by) == (before.stored_at, before.stored_by)
    assert {name: found.attributes[name] for name in given} == given
    assert "fence" not in found.attributes
    assert (found.data, found.token) == (b"one", 7), "a claim keeps the value and its writer"


def test_deleted_object_keeps_its_fence(objects: FencedObjects) -> None:
    objects.put("a", b"one", fence=7)
    assert not objects.delete("a", fence=8).repeated
    assert objects.get("a") is None
    with pytest.raises(StaleTokenError):
        objects.put("a", b"one", fence=7)
    objects.put("a", b"two", fence=8)
    assert objects.get("a") is not None


def test_refusal_names_resource_tokens_and_writer(place: Place) -> None:
    place.objects(writer="the new one").put("a", b"new", fence=8)
    with pytest.raises(StaleTokenError, match=r"refuses token 7: token 8 was stored at 20.*Acquire the lock") as e:
        place.objects().put("a", b"old", fence=7)
    assert (e.value.offered, e.value.stored) == (7, 8)
    assert e.value.resource.endswith("a")
    if place.kind != "files":  # the refusal of a key names no writer; the log does
        assert e.value.stored_by == "the new one"
    found = place.objects().get("a")
    assert found is not None
    assert found.stored_by == "the new one"


def test_repeated_write_is_stored_once(objects: FencedObjects) -> None:
    first = objects.put("a", b"one", fence=7)
    again = objects.put("a", b"one", fence=7, write=first.write)
    assert again.repeated
    with pytest.raises(StaleTokenError, match="another write under the same number"):
        objects.put("a", b"other", fence=7, write=first.write)
    with pytest.raises(StaleTokenError, match="another write under the same number"):
        objects.put("a", b"one", fence=7, write=first.write, attributes={"owner": "me"})


BAD = [
    ("", "1 to 800 bytes"),
    ("/a", "empty"),
    ("a/", "empty"),
    ("a//b", "empty"),
    ("a/../b", r"'\.\.'"),
    ("./a", "'.'"),
    ("a\nb", "control"),
    ("a\x7f", "control"),
    ("a\0", "NUL"),
    ("\ud800", "surrogate"),
    ("a" * 801, "800"),
    (7, "text; got int"),
]


@pytest.mark.parametrize(("path", "says"), BAD)
def test_invalid_path_is_refused(objects: FencedObjects, path: Any, says: str) -> None:
    for act in (
        lambda: objects.put(path, b"", fence=1),
        lambda: objects.get(path),
        lambda: objects.delete(path, fence=1),
        lambda: objects.claim(path, fence=1),
        lambda: objects.claims(path),
    ):
        with pytest.raises(InvalidArgument, match=says):
            act()


LIKE_A_BODY = "a@7-1-0123456789abcdef-0123456789abcdef"


@pytest.mark.parametrize("path", [LIKE_A_BODY, f"{LIKE_A_BODY}/b", "a#1", "a" * 161, ".fenced_store-1"])
def test_path_that_looks_like_a_body_is_refused(tmp_path: Path, dsn: str, path: str) -> None:
    with FencedStore(dsn) as store, pytest.raises(InvalidArgument, match=r"body|bytes"):
        FencedObjects(LocalStore(tmp_path), pointers=store).put(path, b"", fence=1)


def test_invalid_arguments_are_refused(objects: FencedObjects, dsn: str, tmp_path: Path) -> None:
    for data in ("text", None, 7, ["a"]):
        with pytest.raises(InvalidArgument, match="The data of an object is bytes"):
            objects.put("a", data, fence=1)  # type: ignore[arg-type]
    for fence in (0, -1, 2**63, True, "7", None, 1.5):
        with pytest.raises(InvalidArgument):
            objects.put("a", b"", fence=fence)  # type: ignore[arg-type]
    for write in (0, -1, 2**63, True, "7"):
        with pytest.raises(InvalidArgument, match="write number"):
            objects.put("a", b"", fence=1, write=write)  # type: ignore[arg-type]
    for attributes in ({"fence": "x"}, {"Fence": "x"}, {"a": 1}, {1: "a"}):
        with pytest.raises(InvalidArgument, match="ttribute"):
            objects.put("a", b"", fence=1, attributes=attributes)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="at least one object"):
        objects.claim(fence=1)
    for store in (LocalStore(tmp_path), HTTPStore("http://localhost")):
        with pytest.raises(InvalidArgument, match=r"no conditional put.*pointers=FencedStore"):
            FencedObjects(store)
    for no_store in (object(), None, "/srv"):
        with pytest.raises(InvalidArgument, match="needs a store of obstore"):
            FencedObjects(no_store)
    with pytest.raises(InvalidArgument, match="give pointers= too"):
        FencedObjects(MemoryStore(), namespace="x")
    with FencedStore(dsn) as pointers, pytest.raises(InvalidArgument, match="whole file system"):
        FencedObjects(LocalStore(), pointers=pointers)
    with pytest.raises(InvalidArgument, match="AsyncFencedObjects needs an AsyncFencedStore"):
        AsyncFencedObjects(LocalStore(tmp_path), pointers=pointers)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="FencedObjects needs a FencedStore"):
        FencedObjects(LocalStore(tmp_path), pointers=AsyncFencedStore(dsn))  # type: ignore[arg-type]
    assert objects.get("a") is None


@pytest.mark.parametrize("name", ["Owner", "my name", "ü", "", "-a", "a:b", "x" * 3 + "\n"])
def test_attributes_that_a_store_would_change_are_refused(objects: FencedObjects, name: str) -> None:
    with pytest.raises(InvalidArgument, match="a name that this store would change or refuse"):
        objects.put("a", b"", fence=1, attributes={name: "x"})
    for value in ("ü", " x", "x ", "a\nb", "\x00", "\x7f"):
        with pytest.raises(InvalidArgument, match="printable ASCII"):
            objects.put("a", b"", fence=1, attributes={"owner": value})


def test_azure_allows_fewer_attribute_names() -> None:
    objects = AsyncFencedObjects(AzureStore("container", account_name="a", account_key="AAAA"))
    for name in ("my-name", "1x"):
        with pytest.raises(InvalidArgument, match="would change or refuse"):
            objects.put("a", b"", fence=1, attributes={name: "x"}).send(None)


def test_sync_and_async_classes_have_the_same_methods() -> None:
    def words(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(kind, callable)
            if not name.startswith("_")
        }

    assert words(FencedObjects) == words(AsyncFencedObjects)


async def test_async_objects_put_get_claim_and_delete(place: Place, dsn: str) -> None:
    pointers = AsyncFencedStore(dsn) if place.kind == "files" else None
    objects = AsyncFencedObjects(place.store, pointers=pointers)
    stored = await objects.put("a", b"one", fence=7, attributes={"owner": "me"})
    assert (await objects.put("a", b"one", fence=7, write=stored.write, attributes={"owner": "me"})).repeated
    await objects.claim("a", fence=8)
    with pytest.raises(StaleTokenError):
        await objects.put("a", b"two", fence=7)
    with pytest.raises(FenceAhead):
        await objects.claim("a", fence=7)
    found = await objects.get("a")
    assert found is not None
    assert (found.data, found.token, found.attributes["owner"]) == (b"one", 7, "me")
    await objects.put("a", b"two", fence=8)
    assert await objects.high_water() == 8
    assert len(await objects.sweep()) == (1 if place.kind == "files" else 0)
    await objects.delete("a", fence=8)
    assert await objects.get("a") is None
    if pointers is not None:
        await pointers.close()


def test_high_water_is_the_highest_token_of_the_objects(place: Place) -> None:
    objects = place.objects()
    assert objects.high_water() == 0
    place.store.put("somebody/elses", b"no fence")
    for path, token in (("a", 7), ("in/b", 9), ("in/deep/c", 12), ("inn/d", 3)):
        objects.put(path, b"one", fence=token)
    objects.delete("in/deep/c", fence=12)
    assert [objects.high_water(prefix) for prefix in ("", "in", "in/deep", "inn", "not/there")] == [12, 12, 12, 3, 0]
    if place.kind != "files":  # with pointers, only the fenced store knows of claims
        objects.claim("inn/d", fence=20)
        assert objects.high_water() == 20
    with pytest.raises(InvalidArgument):
        objects.high_water("../x")


def test_grant_claims_objects(place: Place, client: dblock.Client) -> None:
    objects = place.objects()
    with client.lock("july") as lease:
        objects.put("a", b"old", fence=lease)
    with client.lock("july", claims=[objects.claims("a", "b")]) as newer:
        for path in ("a", "b"):
            with pytest.raises(StaleTokenError):
                objects.put(path, b"late", fence=lease)
        objects.put("a", b"new", fence=newer)
    found = objects.get("a")
    assert found is not None
    assert (found.data, found.token) == (b"new", newer.token)


async def test_async_grant_claims_objects(place: Place, dsn: str) -> None:
    pointers = AsyncFencedStore(dsn) if place.kind == "files" else None
    objects = AsyncFencedObjects(place.store, pointers=pointers)
    async with dblock.AsyncClient(dsn) as client:
        async with client.lock("july"):
            pass
        async with client.lock("july", claims=[objects.claims("a")]) as lease:
            with pytest.raises(StaleTokenError):
                await objects.put("a", b"late", fence=lease.token - 1)
            await objects.put("a", b"new", fence=lease)
    if pointers is not None:
        await pointers.close()


def test_object_from_before_the_fence_can_be_claimed_and_written(s3: S3Store) -> None:
    s3.put("a", b"as it was", attributes={"owner": "me"})
    objects = FencedObjects(s3)
    found = objects.get("a")
    assert found is not None
    assert (found.data, found.token, found.stored_by) == (b"as it was", 0, None)
    objects.claim("a", fence=3)
    found = objects.get("a")
    assert found is not None
    assert (found.data, found.token, found.attributes["owner"]) == (b"as it was", 0, "me")
    objects.claim("a", fence=4)
    again = objects.get("a")
    assert again is not None
    assert (again.stored_by, again.stored_at) == (None, found.stored_at), "a claim does not count as a write"
    with pytest.raises(StaleTokenError):
        objects.put("a", b"late", fence=2)
    objects.put("a", b"new", fence=4)


def test_token_of_a_lease_is_read_once(place: Place) -> None:
    """If the token of a lease changes during a write, the write keeps the token that it began with."""

    class Renewed:
        def __init__(self) -> None:
            self.tokens = iter([7, 9, 9, 9, 9])

        @property
        def token(self) -> int:
            return next(self.tokens)

    objects = place.objects()
    objects.put("a", b"old", fence=8)
    with pytest.raises(StaleTokenError):
        objects.put("a", b"late", fence=Renewed())
    with pytest.raises(FenceAhead):
        objects.claim("a", fence=Renewed())
    found = objects.get("a")
    assert found is not None
    assert found.data == b"old"


@pytest.mark.parametrize("number", [0, -1, 2**63, 2**70, True, "5", 1.5])
def test_invalid_write_number_of_a_fence_is_refused(objects: FencedObjects, number: Any) -> None:
    class Brings:
        token, write = 7, number

    with pytest.raises(InvalidArgument, match="write number"):
        objects.put("a", b"one", fence=Brings())
    assert objects.get("a") is None


@pytest.mark.parametrize("patience", [0, -1, True, "5", 86_400, None])
def test_invalid_patience_is_refused(objects: FencedObjects, patience: Any) -> None:
    with pytest.raises(InvalidArgument, match="patience"):
        objects.claim("a", fence=1, patience=patience)


def test_too_many_attribute_bytes_are_refused(objects: FencedObjects) -> None:
    objects.put("a", b"one", fence=7, attributes={"owner": "x" * 995, "Content-Type": "y" * 100})
    with pytest.raises(InvalidArgument, match="1001 bytes together"):
        objects.put("a", b"one", fence=7, attributes={"owner": "x" * 996})


# Between the read and the conditional put.


@pytest.mark.parametrize("sealed", [True, False])
def test_same_bytes_under_a_newer_token_get_another_version(s3: S3Store, sealed: bool) -> None:
    """S3's ETag identifies the bytes, not their writer. Without the seal, the stale writer is accepted."""
    FencedObjects(s3).put("a", b"the same", fence=5)
    stale, newer = FencedObjects(s3, probe=False), FencedObjects(s3, probe=False)
    for one in (stale, newer):
        assert isinstance(one._protocol, conditional.ConditionalProtocol)
        one._protocol._sealed = sealed
    newer.put("a", b"the same", fence=6)
    writer = Stepwise(stale, lambda objects: objects.put("a", b"stale", fence=7)).until("put")
    newer.put("a", b"the same", fence=8)
    if sealed:
        with pytest.raises(StaleTokenError, match="refuses token 7: token 8"):
            writer.finish()
    else:
        writer.finish()
        found = newer.get("a")
        assert found is not None
        assert (found.data, found.token) == (b"stale", 7), "without the seal the stale value wins"


def test_same_bytes_under_another_write_number_get_another_version(s3: S3Store) -> None:
    objects = FencedObjects(s3)
    objects.put("a", b"the same", fence=7, write=1)
    late = Stepwise(FencedObjects(s3, probe=False), lambda objects: objects.put("a", b"late", fence=7, write=2))
    late.until("put")
    objects.put("a", b"the same", fence=7, write=3)
    with pytest.raises(StaleTokenError, match="a later write of the same holder"):
        late.finish()


@pytest.mark.parametrize("there", [True, False], ids=["replacing", "creating"])
def test_lower_writer_that_read_the_same_version_is_refused(place: Place, there: bool) -> None:
    if there:
        place.objects().put("a", b"first", fence=1)
    lower = Stepwise(place.objects(probe=False), lambda objects: objects.put("a", b"lower", fence=7)).until("put")
    higher = Stepwise(place.objects(probe=False), lambda objects: objects.put("a", b"higher", fence=8)).until("put")
    higher.finish()
    with pytest.raises(StaleTokenError, match="refuses token 7: token 8"):
        lower.finish()
    found = place.objects().get("a")
    assert found is not None
    assert found.data == b"higher"


@pytest.mark.parametrize("there", [True, False], ids=["replacing", "creating"])
def test_higher_writer_that_read_the_same_version_stores_last(place: Place, there: bool) -> None:
    if there:
        place.objects().put("a", b"first", fence=1)
    lower = Stepwise(place.objects(probe=False), lambda objects: objects.put("a", b"lower", fence=7)).until("put")
    higher = Stepwise(place.objects(probe=False), lambda objects: objects.put("a", b"higher", fence=8)).until("put")
    lower.finish()
    higher.finish()
    found = place.objects().get("a")
    assert found is not None
    assert (found.data, found.token) == (b"higher", 8)


def test_claim_refuses_a_writer_that_has_already_read(place: Place) -> None:
    place.objects().put("a", b"first", fence=1)
    writer = Stepwise(place.objects(probe=False), lambda objects: objects.put("a", b"late", fence=7)).until("put")
    place.objects().claim("a", fence=8)
    with pytest.raises(StaleTokenError):
        writer.finish()
    found = place.objects().get("a")
    assert found is not None
    assert (found.data, found.token) == (b"first", 1)


def test_claim_keeps_a_value_written_between_its_read_and_put(s3: S3Store) -> None:
    objects = FencedObjects(s3)
    objects.put("a", b"first", fence=1)
    claimer = Stepwise(FencedObjects(s3, probe=False), lambda objects: objects.claim("a", fence=8)).until("put")
    objects.put("a", b"second", fence=7)
    claimer.finish()
    found = objects.get("a")
    assert found is not None
    assert (found.data, found.token) == (b"second", 7), "the claim has read the object again"


@pytest.mark.second_stage
def test_sixteen_writers_are_accepted_in_token_order(s3_address: str, s3: S3Store) -> None:
    """Judged by the server's own log of accepted puts."""
    pairs = [(token, number) for token in range(1, 31) for number in range(1, 5)]
    pairs.sort(key=lambda pair: pair[0] + random.gauss(0, 2))
    name = str(s3.config["bucket"])

    def write(writer: int) -> list[tuple[int, int]]:
        objects, mine = FencedObjects(bucket(s3_address, name), probe=False), []
        for token, number in pairs[writer::16]:
            try:
                objects.put("one", f"{token}.{number}".encode(), fence=token, write=number)
                mine.append((token, number))
            except StaleTokenError:
                continue
        return mine

    with ThreadPoolExecutor(16) as threads:
        told = [pair for mine in threads.map(write, range(16)) for pair in mine]
    done = accepted_in_order(s3_address, f"/{name}/one")
    assert done == sorted(set(done)), "accepted pairs strictly rise"
    assert sorted(told) == done, "exactly the writes that were reported as stored were stored"
    assert done[-1] == max(pairs)
    assert len(done) >= 5, "too few were accepted for this to prove much"


RACER = """
import json, sys
from fenced_store import StaleTokenError
from fenced_store.objects import FencedObjects
from tests.support.s3 import bucket
from tests.support.stepwise import Stepwise
objects = FencedObjects(bucket(sys.argv[1], sys.argv[2]), probe=False)
token = int(sys.argv[3])
for path in sys.stdin:
    writer = Stepwise(objects, lambda objects: objects.put(path.strip(), str(token).encode(), fence=token)).until("put")
    print("looked", flush=True)
    sys.stdin.readline()
    try:
        writer.finish()
        print("stored", flush=True)
    except StaleTokenError as error:
        print(error, flush=True)
"""


@pytest.mark.second_stage
def test_two_processes_that_race_for_one_version_end_with_the_higher_token(s3_address: str, s3: S3Store) -> None:
    """Both have read the same ETag and write at the same time. The lower one was first, or is refused."""
    name = str(s3.config["bucket"])
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, s3_address, name, str(token)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        for token in (7, 8)
    ]

    def say(racer: Any, word: str) -> None:
        racer.stdin.write(f"{word}\n")
        racer.stdin.flush()

    def hear(racer: Any) -> str:
        return str(racer.stdout.readline()).strip()

    objects, told = FencedObjects(s3), []
    for round_ in range(30):
        path = f"raced/{round_}"
        if round_ % 2:
            objects.put(path, b"first", fence=1)
        for racer in racers:
            say(racer, path)
        assert [hear(racer) for racer in racers] == ["looked", "looked"]
        for racer in racers if round_ % 3 else reversed(racers):
            say(racer, "go on")
        lower, higher = (hear(racer) for racer in racers)
        found = objects.get(path)
        assert found is not None
        assert (found.data, found.token, higher) == (b"8", 8, "stored")
        assert lower == "stored" or "refuses token 7: token 8 was stored" in lower
        order = [token for token, _ in accepted_in_order(s3_address, f"/{name}/{path}")]
        assert order[-2:] == [7, 8] if lower == "stored" else order[-1:] == [8]
        told.append(lower)
    assert "stored" in told
    assert len(set(told)) > 1, "both orders occurred"
    for racer in racers:
        racer.communicate()


# Lost replies.


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


# Stores that cannot hold a fence.


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
