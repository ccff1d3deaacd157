"""Objects in files: at any step a writer may die or a sweep may run, and readers see the old value or the new."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from obstore.store import LocalStore, MemoryStore, S3Store

import fenced_store
from fenced_store import FencedStore, InvalidArgument, NotInstalled, ObjectDamaged, StaleTokenError
from fenced_store.objects import FencedObjects, local_files
from fenced_store.objects.flow import Effect, Runner
from tests.support.s3 import new_bucket
from tests.support.stages import first
from tests.support.stepwise import Stepwise


@pytest.fixture
def pointers(dsn: str) -> Iterator[FencedStore]:
    with FencedStore(dsn) as store:
        yield store


@pytest.fixture
def files(tmp_path: Path, pointers: FencedStore) -> FencedObjects:
    made = FencedObjects(LocalStore(tmp_path), pointers=pointers)
    made.sweep()  # the namespace has its id now
    return made


def value(objects: FencedObjects, path: str = "a") -> bytes | None:
    found = objects.get(path)
    return None if found is None else found.data


def bodies(folder: Path) -> list[str]:
    """Return the names of all files except the marker of the folder."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if not name.startswith(".fenced_store-"))


def test_body_is_on_disk_before_the_pointer_points_to_it(files: FencedObjects) -> None:
    writer = Stepwise(files, lambda objects: objects.put("in/a", b"one", fence=7))
    writer.finish()
    assert [getattr(effect.operation, "__name__", effect.operation) for effect in writer.performed] == [
        "put",
        "to_disk",
        "exists",
        "put",
    ]
    assert [effect.target for effect in writer.performed] == ["objects", "call", "call", "pointers"]


def test_write_syncs_the_file_and_its_folders(
    files: FencedObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "_FULL_SYNC", None)
    synced: list[str] = []
    real = os.fsync

    def fsync(number: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{number}") if sys.platform == "linux" else str(number))
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    files.put("in/deep/a", b"one", fence=7)
    assert len(synced) == 5
    if sys.platform == "linux":
        folder = str(tmp_path)
        assert synced[0].startswith(f"{folder}/in/deep/a@7-")
        assert synced[1:] == [f"{folder}/in/deep", f"{folder}/in", folder, str(tmp_path.parent)]


STEPS = 4


@pytest.mark.parametrize("done", range(STEPS + 1))
@pytest.mark.parametrize("there", [True, False], ids=["replacing", "creating"])
def test_writer_stopped_after_any_step_leaves_the_old_value_or_the_new(
    files: FencedObjects, pointers: FencedStore, tmp_path: Path, done: int, there: bool
) -> None:
    if there:
        files.put("a", b"old", fence=1)
    old = b"old" if there else None
    writer = Stepwise(files, lambda objects: objects.put("a", b"new", fence=7))
    for _ in range(done):
        writer.step()
    assert writer.done == (done == STEPS)
    assert value(files) == (b"new" if done == STEPS else old)
    left = len(bodies(tmp_path))
    assert left == there + (done >= 1)
    swept = files.sweep()
    assert len(swept) == (done == STEPS and there), "a body that may still be used stays"
    assert value(files) == (b"new" if done == STEPS else old)
    claimed = files.sweep(fence=8)
    assert len(claimed) == (1 <= done < STEPS), "a body of an excluded token is removed"
    assert value(files) == (b"new" if done == STEPS else old)
    assert len(bodies(tmp_path)) == (1 if value(files) is not None else 0)
    if done < STEPS:
        files.claim("a", fence=8)  # the sweep has claimed the object, if it found a body
        with pytest.raises(StaleTokenError):
            writer.finish()
        assert value(files) == old
        assert len(bodies(tmp_path)) == there, "a refused writer leaves no body"


class Dies(Runner):
    """Kills its process with SIGKILL before or after an effect."""

    def __init__(self, inner: Runner, step: int, when: str) -> None:
        super().__init__(inner._objects, inner._pointers)
        self._step, self._when = step, when

    def perform(self, effect: Effect) -> Any:
        self._step -= 1
        if self._step == 0 and self._when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = super().perform(effect)
        if self._step == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


@pytest.mark.second_stage
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", first(1, range(STEPS, 0, -1)))
def test_writer_killed_at_any_step_leaves_the_old_value_or_the_new(
    files: FencedObjects, tmp_path: Path, dsn: str, step: int, when: str
) -> None:
    files.put("a", b"old", fence=1)
    script = f"""
from obstore.store import LocalStore
from fenced_store import FencedStore
from fenced_store.objects import FencedObjects
from tests.fenced_store.objects.test_local_files import Dies
objects = FencedObjects(LocalStore({str(tmp_path)!r}), pointers=FencedStore({dsn!r}))
objects.sweep()
objects._runner = Dies(objects._runner, {step}, {when!r})
objects.put("a", b"new" * 100_000, fence=7)
"""
    root = Path(__file__).parents[3]
    killed = subprocess.run([sys.executable, "-c", script], cwd=root, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    is_stored = (step, when) == (STEPS, "after")
    assert value(files) == (b"new" * 100_000 if is_stored else b"old")
    files.put("a", b"next", fence=8)
    files.sweep()
    assert value(files) == b"next"
    assert len(bodies(tmp_path)) == 1, "after the next version, a sweep removes every leftover body"


def like(folder: Path, name: str, token: int, write: int) -> str:
    """Return the name of a body of the same owner under another pair."""
    path, said = name.split("@")
    rest = said.split("-")[2:]
    return f"{path}@{token}-{write}-{'-'.join(rest)}"


def test_sweep_removes_incomplete_files(files: FencedObjects, tmp_path: Path) -> None:
    files.put("in/a", b"one", fence=7, write=1)
    one = bodies(tmp_path)[0]
    files.put("in/a", b"two", fence=7, write=2)
    old, new = like(tmp_path, one, 6, 5) + "#1", like(tmp_path, one, 9, 5) + "#12"
    (tmp_path / old).write_bytes(b"half")
    (tmp_path / new).write_bytes(b"half of what may come")
    assert files.sweep() == sorted([old, one])
    assert (tmp_path / new).exists()
    assert files.sweep("in", fence=10) == [new]
    assert value(files, "in/a") == b"two"


def test_sweep_removes_no_foreign_file(files: FencedObjects, tmp_path: Path) -> None:
    files.put("a", b"one", fence=7)
    one = bodies(tmp_path)[0]
    others = one.rsplit("-", 2)[0] + "-0123456789abcdef-0123456789abcdef"
    strange = [
        "readme", "a@1-1", "a@1-1-0123", "a@0-1-0123456789abcdef-0123456789abcdef", others, f"{others}#1", "b#1",
        "deep/er/c", one.replace("a@", "b@"), f"deep/{one}",
    ]  # fmt: skip
    for name in strange:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / os.fsdecode(b"no\xfftext")).write_bytes(b"mine")
    files.put("a", b"two", fence=8)
    assert files.sweep(fence=2**62) == [one]
    assert sorted(set(bodies(tmp_path)) & set(strange)) == sorted(strange)
    assert value(files) == b"two"


def test_sweep_of_a_shared_folder_keeps_bodies_of_other_namespaces(tmp_path: Path, pointers: FencedStore) -> None:
    one = FencedObjects(LocalStore(tmp_path), pointers=pointers, namespace="one")
    two = FencedObjects(LocalStore(tmp_path), pointers=pointers, namespace="two")
    one.put("f", b"one", fence=7)
    two.put("f", b"two", fence=8)
    two.put("g", b"two", fence=8)
    for sweeper in (two, one):
        assert sweeper.sweep() == []
        assert sweeper.sweep(fence=9) == []
    assert (value(one, "f"), value(two, "f"), value(two, "g")) == (b"one", b"two", b"two")


def test_sweep_through_nested_folders_and_links_keeps_bodies_of_other_owners(
    tmp_path: Path, pointers: FencedStore
) -> None:
    inner = FencedObjects(LocalStore(tmp_path / "in", mkdir=True), pointers=pointers, namespace="inner")
    outer = FencedObjects(LocalStore(tmp_path), pointers=pointers, namespace="outer")
    inner.put("a", b"inner", fence=7)
    outer.put("real/a", b"outer", fence=7)
    outer.put("in/a", b"outer's own", fence=8)
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    outer.put("alias/a", b"by its other name", fence=9)
    outer.sweep()
    outer.sweep(fence=10)
    inner.sweep(fence=10)
    assert value(inner) == b"inner"
    assert [value(outer, path) for path in ("real/a", "in/a", "alias/a")] == [
        b"outer", b"outer's own", b"by its other name",
    ]  # fmt: skip


def test_namespace_belongs_to_one_folder(tmp_path: Path, pointers: FencedStore) -> None:
    first = FencedObjects(LocalStore(tmp_path / "1", mkdir=True), pointers=pointers)
    first.put("a", b"one", fence=7)
    second = FencedObjects(LocalStore(tmp_path / "2", mkdir=True), pointers=pointers)
    for act in (
        lambda: second.put("a", b"two", fence=8),
        lambda: second.delete("a", fence=8),
        lambda: second.sweep(fence=8),
    ):
        with pytest.raises(InvalidArgument, match="belong to another folder"):
            act()
    assert value(first) == b"one"
    with pytest.raises(InvalidArgument, match="without a slash"):
        FencedObjects(LocalStore(tmp_path), pointers=pointers, namespace="a/b")


def test_writer_notices_that_its_folder_disappeared(files: FencedObjects, tmp_path: Path) -> None:
    """This happens when a mount is lost and the empty mount point is written to."""
    files.put("a", b"one", fence=7)
    kept = tmp_path.with_name(tmp_path.name + "-elsewhere")
    tmp_path.rename(kept)
    tmp_path.mkdir()
    with pytest.raises(InvalidArgument, match="check that it is mounted"):
        files.put("a", b"two", fence=7)
    with pytest.raises(InvalidArgument, match="check that it is mounted"):
        files.get("a")
    shutil.rmtree(tmp_path)
    kept.rename(tmp_path)
    assert value(files) == b"one"


def test_folder_of_another_database_is_refused(tmp_path: Path, pointers: FencedStore, bare_dsn: str) -> None:
    first = FencedObjects(LocalStore(tmp_path), pointers=pointers)
    first.put("a", b"one", fence=7)
    fenced_store.install(bare_dsn)
    with FencedStore(bare_dsn) as elsewhere:
        second = FencedObjects(LocalStore(tmp_path), pointers=elsewhere)
        second.put("a", b"two", fence=8)
        assert second.sweep(fence=9) == []
        assert (value(first), value(second)) == (b"one", b"two")


def test_first_use_stopped_at_any_step_leaves_one_id(tmp_path: Path, pointers: FencedStore) -> None:
    """Concurrent first uses are safe too: one id remains."""
    steps = 8
    begun = [
        Stepwise(
            FencedObjects(LocalStore(tmp_path), pointers=pointers),
            lambda objects: objects.put("a", b"cut off", fence=7),
        )
        for _ in range(steps)
    ]
    for number, one in enumerate(begun):
        for _ in range(number):
            if not one.done:
                one.step()
    objects = FencedObjects(LocalStore(tmp_path), pointers=pointers)
    objects.put("a", b"one", fence=8)
    late = [one for one in begun if not one.done]
    assert len(late) >= 4
    for one in late:
        with pytest.raises(StaleTokenError):
            one.finish()
    assert value(objects) == b"one"
    objects.sweep()
    assert len(bodies(tmp_path)) == 1


def test_relative_folder_is_refused(tmp_path: Path, pointers: FencedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = LocalStore("here", mkdir=True)
    if not Path(str(store.prefix)).is_absolute():
        with pytest.raises(InvalidArgument, match="relative to the working directory"):
            FencedObjects(store, pointers=pointers)


def test_sweep_of_one_folder_leaves_other_folders(files: FencedObjects, tmp_path: Path) -> None:
    for path in ("a", "in/a", "inn/a", "in/deep/a"):
        files.put(path, b"one", fence=7)
        files.put(path, b"two", fence=7)
    assert {name.split("@")[0] for name in files.sweep("in")} == {"in/a", "in/deep/a"}
    assert {name.split("@")[0] for name in files.sweep()} == {"a", "inn/a"}
    assert files.sweep("not/there") == []


def test_sweep_with_a_stale_token_removes_only_superseded_bodies(
    files: FencedObjects, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files.put("a", b"one", fence=7)
    files.put("a", b"two", fence=8)
    in_flight = Stepwise(files, lambda objects: objects.put("a", b"three", fence=9)).until("put")
    in_flight.step()
    assert len(bodies(tmp_path)) == 3
    assert len(files.sweep(fence=7)) == 1
    assert "only bodies below its pointer" in caplog.text
    in_flight.finish()
    assert value(files) == b"three"


def test_sweep_keeps_bodies_of_its_own_token(files: FencedObjects, tmp_path: Path) -> None:
    files.put("a", b"old", fence=1)
    writer = Stepwise(files, lambda objects: objects.put("a", b"new", fence=7)).until("put")
    writer.step()
    assert files.sweep(fence=7) == []
    writer.finish()
    assert value(files) == b"new"


def test_sweep_claims_before_it_reads_the_pointer(files: FencedObjects, tmp_path: Path) -> None:
    """Otherwise the sweep would remove a body that became current between its read and its claim."""
    files.put("a", b"old", fence=1)
    sweeper = Stepwise(files, lambda objects: objects.sweep(fence=8))
    while sweeper.next is not None and sweeper.next.operation != "claim":
        sweeper.step()
    files.put("a", b"new", fence=7)
    sweeper.finish()
    assert value(files) == b"new"


def test_damaged_object_does_not_stop_the_sweep_of_others(
    files: FencedObjects, pointers: FencedStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in ("a", "b", "c"):
        files.put(path, b"one", fence=7)
        files.put(path, b"two", fence=7)
    pointers.put("objects/b", "something else", fence=8)
    assert [name[0] for name in files.sweep()] == ["a", "c"]
    assert "sweep skipped a damaged object" in caplog.text


def test_repeat_of_a_superseded_write_leaves_no_body(files: FencedObjects, tmp_path: Path) -> None:
    files.put("a", b"one", fence=7, write=1)
    files.put("a", b"two", fence=7, write=2)
    files.sweep()
    assert files.put("a", b"one", fence=7, write=1).repeated
    assert len(bodies(tmp_path)) == 1
    assert value(files) == b"two"


def test_repeated_write_does_not_touch_the_current_body(files: FencedObjects, tmp_path: Path) -> None:
    files.put("a", b"one", fence=7, write=1)
    before = (tmp_path / bodies(tmp_path)[0]).stat()
    assert files.put("a", b"one", fence=7, write=1).repeated
    after = (tmp_path / bodies(tmp_path)[0]).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    (tmp_path / bodies(tmp_path)[0]).write_bytes(b"")  # a power cut may leave a file like this if it was not synced
    files.put("a", b"one", fence=7, write=1)
    assert value(files) == b"one"


def test_write_without_usable_pointers_stores_no_body(tmp_path: Path, bare_dsn: str) -> None:
    with FencedStore(bare_dsn) as store, pytest.raises(NotInstalled):
        FencedObjects(LocalStore(tmp_path), pointers=store).put("a", b"one", fence=7)
    assert bodies(tmp_path) == []
    fenced_store.install(bare_dsn)
    with FencedStore(bare_dsn) as store:
        objects = FencedObjects(LocalStore(tmp_path), pointers=store, namespace="n" * 300)
        with pytest.raises(InvalidArgument, match="1 to 1024 bytes"):
            objects.put("in/" * 250 + "a", b"one", fence=7)
    assert bodies(tmp_path) == []


def test_claim_of_several_objects_is_atomic(files: FencedObjects) -> None:
    files.put("b", b"one", fence=9)
    with pytest.raises(StaleTokenError):
        files.claim("a", "b", "c", fence=8)
    files.put("a", b"one", fence=7)
    files.put("c", b"one", fence=7)


def test_deleted_object_leaves_no_body(files: FencedObjects, tmp_path: Path) -> None:
    files.put("a", b"one", fence=7)
    files.delete("a", fence=7)
    assert value(files) is None
    assert len(files.sweep()) == 1
    assert bodies(tmp_path) == []
    with pytest.raises(StaleTokenError):
        files.put("a", b"late", fence=6)
    assert bodies(tmp_path) == []


def test_refused_write_leaves_no_body(files: FencedObjects, tmp_path: Path) -> None:
    files.put("a", b"one", fence=7)
    with pytest.raises(StaleTokenError):
        files.put("a", b"late", fence=6)
    with pytest.raises(StaleTokenError):
        files.put("a", b"one", fence=6)
    assert len(bodies(tmp_path)) == 1


@pytest.mark.parametrize("history", [0, 10])
def test_repeated_write_after_a_claim_removes_no_body(tmp_path: Path, dsn: str, history: int) -> None:
    """Its reply was lost, and the fence has risen since. Refused or recognised, its body stays the current one."""
    with FencedStore(dsn, history=history) as pointers:
        files = FencedObjects(LocalStore(tmp_path), pointers=pointers)
        files.put("a", b"one", fence=7, write=1)
        files.claim("a", fence=8)
        if history:
            assert files.put("a", b"one", fence=7, write=1).repeated
        else:
            with pytest.raises(StaleTokenError):
                files.put("a", b"one", fence=7, write=1)
        assert value(files) == b"one"


def test_same_body_with_other_attributes_is_another_write(files: FencedObjects, tmp_path: Path) -> None:
    files.put("a", b"one", fence=7, write=1, attributes={"owner": "me"})
    with pytest.raises(StaleTokenError):
        files.put("a", b"one", fence=7, write=1, attributes={"owner": "you"})
    found = files.get("a")
    assert found is not None
    assert (found.data, found.attributes) == (b"one", {"owner": "me"})
    assert len(bodies(tmp_path)) == 1


@pytest.mark.parametrize("moment", ["put", "call"])
@pytest.mark.parametrize("how", ["next version", "claim"])
def test_writer_whose_body_was_swept_gets_stale_token_error(
    files: FencedObjects, tmp_path: Path, moment: str, how: str
) -> None:
    """Whether its body was swept before the sync or before the pointer moved, the writer gets StaleTokenError."""
    files.put("a", b"old", fence=1)
    writer = Stepwise(files, lambda objects: objects.put("a", b"late", fence=7)).until("put")
    writer.step()
    if moment == "put":
        writer.step()
    if how == "claim":
        assert len(files.sweep(fence=8)) == 1
    else:
        files.put("a", b"new", fence=8)
        assert len(files.sweep()) == 2
    with pytest.raises(StaleTokenError):
        writer.finish()
    assert value(files) == (b"old" if how == "claim" else b"new")
    assert len(bodies(tmp_path)) == 1


def test_file_that_cannot_be_written_raises_the_os_error(
    files: FencedObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(number: int) -> None:
        raise OSError(28, "No space left on device")

    files.put("a", b"old", fence=1)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        files.put("a", b"new", fence=7)
    assert value(files) == b"old"


def test_reader_whose_body_is_swept_follows_the_pointer_again(files: FencedObjects, tmp_path: Path) -> None:
    files.put("a", b"old", fence=1)
    reader = Stepwise(files, lambda objects: objects.get("a"))
    reader.step()  # the reader has read the old pointer
    files.put("a", b"new", fence=2)
    assert len(files.sweep()) == 1
    assert reader.finish().body == b"new"


def test_missing_body_is_damage_and_not_absence(files: FencedObjects, tmp_path: Path) -> None:
    files.put("a", b"one", fence=7)
    (tmp_path / bodies(tmp_path)[0]).unlink()
    with pytest.raises(ObjectDamaged, match="is missing"):
        files.get("a")
    files.put("a", b"two", fence=7)
    (tmp_path / bodies(tmp_path)[0]).write_bytes(b"tow")
    with pytest.raises(ObjectDamaged, match="not the one that was written"):
        files.get("a")


def test_key_without_a_pointer_is_damage(files: FencedObjects, pointers: FencedStore) -> None:
    half = {"object": "b@1-1", "write": 1, "length": 0, "digest": ""}
    others: list[Any] = [{"a": 1}, [], "text", None, b"bytes", half]
    for other in others:
        pointers.put("objects/a", other, fence=1)
        with pytest.raises(ObjectDamaged, match="does not hold a pointer"):
            files.get("a")


def test_namespaces_are_separate(tmp_path: Path, pointers: FencedStore) -> None:
    first = FencedObjects(LocalStore(tmp_path / "1", mkdir=True), pointers=pointers, namespace="first")
    second = FencedObjects(LocalStore(tmp_path / "2", mkdir=True), pointers=pointers, namespace="second")
    first.put("a", b"one", fence=8)
    second.put("a", b"two", fence=7)
    assert (value(first), value(second)) == (b"one", b"two")
    assert pointers.get("first/a") is not None


@pytest.mark.second_stage
def test_pointers_work_with_a_store_without_conditions(s3_address: str, pointers: FencedStore) -> None:
    store = S3Store(
        new_bucket(s3_address), endpoint=s3_address, access_key_id="nobody", secret_access_key="nothing",
        region="us-east-1", virtual_hosted_style_request=False, client_options={"allow_http": True},
        conditional_put="disabled",
    )  # fmt: skip
    objects = FencedObjects(store, pointers=pointers)
    objects.put("a", b"one", fence=7, write=1)
    assert objects.put("a", b"one", fence=7, write=1).repeated
    objects.put("a", b"two", fence=8)
    with pytest.raises(StaleTokenError):
        objects.put("a", b"late", fence=7)
    assert len(objects.sweep()) == 1
    assert value(objects) == b"two"


def test_body_that_cannot_be_repaired_fails_the_write(
    files: FencedObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.put("a", b"one", fence=7, write=1)
    (tmp_path / bodies(tmp_path)[0]).write_bytes(b"")

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    again = Stepwise(files, lambda objects: objects.put("a", b"one", fence=7, write=1)).until("get")
    monkeypatch.setattr(LocalStore, "put", full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        again.finish()


def test_failed_discard_does_not_hide_the_refusal(files: FencedObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Any) -> None:
        raise PermissionError(13, "no")

    files.put("a", b"one", fence=7, write=1)
    files.put("a", b"two", fence=8, write=1)
    monkeypatch.setattr(os, "unlink", denied)
    with pytest.raises(StaleTokenError):
        files.put("a", b"late", fence=6)
    assert files.put("a", b"one", fence=7, write=1).repeated


def test_busy_object_does_not_stop_the_sweep_of_others(
    files: FencedObjects, tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fenced_store.objects.fenced_objects.PATIENCE", 0.2)
    for path in ("a", "b"):
        files.put(path, b"one", fence=7)
        files.put(path, b"two", fence=7)
    with psycopg.connect(dsn) as holding:
        holding.execute("SELECT fenced_store.raise_fence('objects/a', 7)")
        swept = files.sweep(fence=8)
    assert [name[0] for name in swept] == ["a", "b"]


def test_pointers_work_with_any_store(pointers: FencedStore) -> None:
    store = MemoryStore()
    objects = FencedObjects(store, pointers=pointers)
    objects.put("a", b"one", fence=7)
    objects.put("a", b"two", fence=8)
    assert len(objects.sweep()) == 1
    assert value(objects) == b"two"


@pytest.mark.second_stage
def test_sweep_during_writes_and_reads_loses_no_value(tmp_path: Path, dsn: str) -> None:
    """Every reader sees a complete value, and never an older one than before."""
    ends = time.monotonic() + 3
    paths = ["a", "in/b"]
    counted = {"read": 0, "swept": 0, "written": 0}
    faults: list[str] = []

    def opened() -> tuple[FencedStore, FencedObjects]:
        store = FencedStore(dsn)
        return store, FencedObjects(LocalStore(tmp_path), pointers=store)

    tokens = iter(range(2, 10**6))
    one_by_one = threading.Lock()

    def work(kind: str) -> None:
        store, objects = opened()
        seen = dict.fromkeys(paths, 0)
        try:
            while time.monotonic() < ends:
                path = random.choice(paths)
                if kind == "write":
                    with one_by_one:
                        token = next(tokens)
                    try:
                        objects.put(path, f"{token} ".encode() * random.choice([1, 1000, 20_000]), fence=token)
                        counted["written"] += 1
                    except StaleTokenError:
                        pass
                elif kind == "sweep":
                    counted["swept"] += len(objects.sweep())
                else:
                    found = objects.get(path)
                    assert found is not None
                    numbers = set(found.data.split())
                    assert numbers == {str(found.token).encode()}, "the value is complete"
                    assert found.token >= seen[path], "the value is not older than before"
                    seen[path] = found.token
                    counted["read"] += 1
        except Exception as error:
            faults.append(f"{kind}: {error!r}")
        finally:
            store.close()

    store, objects = opened()
    for path in paths:
        objects.put(path, b"1", fence=1)
    threads = [threading.Thread(target=work, args=[kind]) for kind in ["write"] * 3 + ["sweep"] * 2 + ["read"] * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    objects.sweep()
    left = bodies(tmp_path)
    for path in paths:
        assert value(objects, path) is not None
        objects.put(path, b"last", fence=10**6)
    objects.sweep()
    assert len(bodies(tmp_path)) == len(paths), f"no orphan is left of {left}"
    assert min(counted.values()) > 20, counted
    store.close()
