"""Files: a writer may die at any step, a sweep may come at any moment, and readers see the old value or the new."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from obstore.store import LocalStore, MemoryStore

from fenced_store import FencedStore, ObjectDamaged, StaleTokenError
from fenced_store.objects import FencedObjects
from fenced_store.steps import Ask, Runner
from tests.support.steps import Stepwise


@pytest.fixture
def pointers(dsn: str) -> Iterator[FencedStore]:
    with FencedStore(dsn) as store:
        yield store


@pytest.fixture
def files(tmp_path: Path, pointers: FencedStore) -> FencedObjects:
    return FencedObjects(LocalStore(tmp_path), pointers=pointers)


def value(objects: FencedObjects, path: str = "a") -> bytes | None:
    found = objects.get(path)
    return None if found is None else found.data


def bodies(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_body_is_on_the_disk_before_it_is_pointed_to(files: FencedObjects) -> None:
    writer = Stepwise(files, lambda objects: objects.put("in/a", b"one", fence=7))
    writer.finish()
    assert [getattr(ask.what, "__name__", ask.what) for ask in writer.asked] == ["put", "to_disk", "put"]
    assert [ask.of for ask in writer.asked] == ["objects", "call", "pointers"]


def test_a_file_and_its_folders_are_waited_for(
    files: FencedObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(number: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{number}") if sys.platform == "linux" else str(number))
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    files.put("in/deep/a", b"one", fence=7)
    assert len(synced) == 4
    if sys.platform == "linux":
        folder = str(tmp_path)
        assert synced[0].startswith(f"{folder}/in/deep/a@7-")
        assert synced[1:] == [f"{folder}/in/deep", f"{folder}/in", folder]


STEPS = 3


@pytest.mark.parametrize("done", range(STEPS + 1))
@pytest.mark.parametrize("there", [True, False], ids=["replacing", "creating"])
def test_a_writer_that_is_gone_after_any_step(
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
    assert len(swept) == (done == STEPS and there), "what may yet be pointed to stays"
    assert value(files) == (b"new" if done == STEPS else old)
    claimed = files.sweep(fence=8)
    assert len(claimed) == (1 <= done < STEPS), "what a newer token has shut out goes"
    assert value(files) == (b"new" if done == STEPS else old)
    assert len(bodies(tmp_path)) == (1 if value(files) is not None else 0)
    if done < STEPS:
        files.claim("a", fence=8)  # the sweep has, where it found something
        with pytest.raises(StaleTokenError):
            writer.finish()
        assert value(files) == old
        assert len(bodies(tmp_path)) == there, "and who is refused leaves nothing behind"


class Dies(Runner):
    """Kills its process with kill -9 before or after a step."""

    def __init__(self, inner: Runner, step: int, when: str) -> None:
        super().__init__(inner._objects, inner._pointers)
        self._step, self._when = step, when

    def do(self, ask: Ask) -> Any:
        self._step -= 1
        if self._step == 0 and self._when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = super().do(ask)
        if self._step == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_writer_that_is_killed_at_any_step(
    files: FencedObjects, tmp_path: Path, dsn: str, step: int, when: str
) -> None:
    files.put("a", b"old", fence=1)
    script = f"""
from obstore.store import LocalStore
from fenced_store import FencedStore
from fenced_store.objects import FencedObjects
from tests.resources.test_files import Dies
objects = FencedObjects(LocalStore({str(tmp_path)!r}), pointers=FencedStore({dsn!r}))
objects._runner = Dies(objects._runner, {step}, {when!r})
objects.put("a", b"new" * 100_000, fence=7)
"""
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", script], cwd=root, timeout=30)
    assert killed.returncode == -signal.SIGKILL
    is_stored = (step, when) == (STEPS, "after")
    assert value(files) == (b"new" * 100_000 if is_stored else b"old")
    files.put("a", b"next", fence=8)
    files.sweep()
    assert value(files) == b"next"
    assert len(bodies(tmp_path)) == 1, "the next version lets everything go that was left"


def test_what_was_not_written_to_its_end_is_swept(files: FencedObjects, tmp_path: Path) -> None:
    files.put("in/a", b"one", fence=7, write=1)
    files.put("in/a", b"two", fence=7, write=2)
    (tmp_path / "in/a@6-5-0123456789abcdef#1").write_bytes(b"half")
    (tmp_path / "in/a@9-5-0123456789abcdef#12").write_bytes(b"half of what may come")
    swept = files.sweep()
    assert len(swept) == 2
    assert "in/a@6-5-0123456789abcdef#1" in swept
    assert (tmp_path / "in/a@9-5-0123456789abcdef#12").exists()
    assert files.sweep("in", fence=10) == ["in/a@9-5-0123456789abcdef#12"]
    assert value(files, "in/a") == b"two"


def test_the_sweep_takes_nothing_that_is_not_a_body(files: FencedObjects, tmp_path: Path) -> None:
    strange = ["readme", "a@1-1", "a@1-1-0123", "a@0-1-0123456789abcdef", "a@x-1-0123456789abcdef", "b#1", "deep/er/c"]
    for name in strange:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"mine")
    files.put("a", b"one", fence=7)
    files.put("a", b"two", fence=8)
    assert len(files.sweep(fence=2**62)) == 1
    assert sorted(set(bodies(tmp_path)) & set(strange)) == sorted(strange)
    assert value(files) == b"two"


def test_a_sweep_of_one_folder_leaves_the_others(files: FencedObjects, tmp_path: Path) -> None:
    for path in ("a", "in/a", "inn/a", "in/deep/a"):
        files.put(path, b"one", fence=7)
        files.put(path, b"two", fence=7)
    assert {name.split("@")[0] for name in files.sweep("in")} == {"in/a", "in/deep/a"}
    assert {name.split("@")[0] for name in files.sweep()} == {"a", "inn/a"}
    assert files.sweep("not/there") == []


def test_a_sweep_with_a_stale_token_takes_nothing(files: FencedObjects, tmp_path: Path) -> None:
    files.put("a", b"one", fence=7)
    files.put("a", b"two", fence=8)
    with pytest.raises(StaleTokenError):
        files.sweep(fence=7)
    assert len(bodies(tmp_path)) == 2


def test_a_deleted_object_leaves_no_body(files: FencedObjects, tmp_path: Path) -> None:
    files.put("a", b"one", fence=7)
    files.delete("a", fence=7)
    assert value(files) is None
    assert len(files.sweep()) == 1
    assert bodies(tmp_path) == []
    with pytest.raises(StaleTokenError):
        files.put("a", b"late", fence=6)
    assert bodies(tmp_path) == []


def test_what_was_refused_is_not_kept(files: FencedObjects, tmp_path: Path) -> None:
    files.put("a", b"one", fence=7)
    with pytest.raises(StaleTokenError):
        files.put("a", b"late", fence=6)
    with pytest.raises(StaleTokenError):
        files.put("a", b"one", fence=6)
    assert len(bodies(tmp_path)) == 1


@pytest.mark.parametrize("history", [0, 10])
def test_the_same_write_sent_again_past_a_claim_takes_no_body_away(tmp_path: Path, dsn: str, history: int) -> None:
    """Its answer was lost, and the fence has risen since: refused or known, what it stored is what is pointed to."""
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


def test_the_same_body_with_other_attributes_is_another_write(files: FencedObjects, tmp_path: Path) -> None:
    files.put("a", b"one", fence=7, write=1, attributes={"owner": "me"})
    with pytest.raises(StaleTokenError):
        files.put("a", b"one", fence=7, write=1, attributes={"owner": "you"})
    found = files.get("a")
    assert found is not None
    assert (found.data, found.attributes) == (b"one", {"owner": "me"})
    assert len(bodies(tmp_path)) == 1


@pytest.mark.parametrize("moment", ["put", "call"])
@pytest.mark.parametrize("how", ["next version", "claim"])
def test_a_sweep_that_takes_a_late_writers_body_lets_it_be_told(
    files: FencedObjects, tmp_path: Path, moment: str, how: str
) -> None:
    """Before it was on the disk, or before it was pointed to: what the writer is told is that it is stale."""
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


def test_a_file_that_cannot_be_written_is_said_as_it_is(
    files: FencedObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(number: int) -> None:
        raise OSError(28, "No space left on device")

    files.put("a", b"old", fence=1)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        files.put("a", b"new", fence=7)
    assert value(files) == b"old"


def test_a_reader_whose_body_is_swept_follows_the_pointer_again(files: FencedObjects, tmp_path: Path) -> None:
    files.put("a", b"old", fence=1)
    reader = Stepwise(files, lambda objects: objects.get("a"))
    reader.step()  # it knows where the old body is
    files.put("a", b"new", fence=2)
    assert len(files.sweep()) == 1
    assert reader.finish().body == b"new"


def test_a_body_that_is_gone_is_not_taken_for_nothing(files: FencedObjects, tmp_path: Path) -> None:
    files.put("a", b"one", fence=7)
    (tmp_path / bodies(tmp_path)[0]).unlink()
    with pytest.raises(ObjectDamaged, match="is not there"):
        files.get("a")
    files.put("a", b"two", fence=7)
    (tmp_path / bodies(tmp_path)[0]).write_bytes(b"tow")
    with pytest.raises(ObjectDamaged, match="not the one that was written"):
        files.get("a")


def test_a_key_that_holds_something_else_is_said(files: FencedObjects, pointers: FencedStore) -> None:
    half = {"object": "b@1-1", "write": 1, "length": 0, "digest": ""}
    others: list[Any] = [{"a": 1}, [], "text", None, b"bytes", half]
    for other in others:
        pointers.put("objects/a", other, fence=1)
        with pytest.raises(ObjectDamaged, match="something else than a pointer"):
            files.get("a")


def test_namespaces_are_apart(tmp_path: Path, pointers: FencedStore) -> None:
    first = FencedObjects(LocalStore(tmp_path / "1", mkdir=True), pointers=pointers, namespace="first")
    second = FencedObjects(LocalStore(tmp_path / "2", mkdir=True), pointers=pointers, namespace="second")
    first.put("a", b"one", fence=8)
    second.put("a", b"two", fence=7)
    assert (value(first), value(second)) == (b"one", b"two")
    assert pointers.get("first/a") is not None


def test_pointers_serve_any_store(pointers: FencedStore) -> None:
    store = MemoryStore()
    objects = FencedObjects(store, pointers=pointers)
    objects.put("a", b"one", fence=7)
    objects.put("a", b"two", fence=8)
    assert len(objects.sweep()) == 1
    assert value(objects) == b"two"


def test_sweeping_while_writers_and_readers_are_at_work(tmp_path: Path, dsn: str) -> None:
    """Nobody misses anything: each reader sees a value, whole, and not an older one than before."""
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
                    assert numbers == {str(found.token).encode()}, "whole"
                    assert found.token >= seen[path], "not older than before"
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
    assert len(bodies(tmp_path)) == len(paths), f"no orphan is left, of {left}"
    assert min(counted.values()) > 20, counted
    store.close()
