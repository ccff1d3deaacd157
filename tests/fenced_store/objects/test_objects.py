"""Objects: what is stored and read, and what is refused."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from obstore.store import AzureStore, HTTPStore, LocalStore, MemoryStore, S3Store

import dblock
from fenced_store import (
    AsyncFencedStore,
    FenceAhead,
    FencedStore,
    InvalidArgument,
    StaleTokenError,
)
from fenced_store.objects import AsyncFencedObjects, FencedObjects
from tests.fenced_store.conftest import Place
from tests.support.stages import first

PATHS = ["a", "a/b/c.csv", "a b", "ü/日本", "a%20b", "a?b*c", "x@y-1", "back\\slash", "a:b;c=d,e", "~", "%2e%2e", "…"]


@pytest.mark.parametrize("path", first(6, PATHS))
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
    place.store.put("of/another", b"no fence")
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
