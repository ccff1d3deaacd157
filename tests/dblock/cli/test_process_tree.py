"""`dblock run` finds the processes below it, without a look at all the others of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dblock.cli.run import process_tree
from tests.support.eventually import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc as Linux has it")


@pytest.fixture
def family(tmp_path: Path) -> Iterator[list[int]]:
    """A child, its child, and a grandchild in a session of its own."""
    line = f"sleep 60 & echo $! > {tmp_path}/one; setsid sleep 60 & echo $! > {tmp_path}/two; wait"
    with subprocess.Popen(["sh", "-c", line]) as child:
        files = [tmp_path / "one", tmp_path / "two"]
        eventually(lambda: all(file.exists() and file.read_text().strip() for file in files))
        pids = [child.pid, *(int(file.read_text()) for file in files)]
        # In its own session by now, and not before.
        eventually(lambda: os.getpgid(pids[2]) == pids[2])
        yield pids
        for pid in pids:
            os.kill(pid, 9)


def test_quick_look_and_scan_find_the_same_processes(family: list[int]) -> None:
    found = process_tree.descendants()
    assert {*family} <= {*found}
    assert found[family[2]] == family[2], "a session of its own is a group of its own"
    assert {pid: found[pid] for pid in family} == {pid: process_tree.scan_descendants()[pid] for pid in family}


def test_excluded_process_is_left_out_with_its_children(family: list[int]) -> None:
    for look in (process_tree.descendants, process_tree.scan_descendants):
        assert not {*family} & {*look([family[0]])}
        assert {family[0], family[2]} == {*family} & {*look([family[1]])}


def test_ended_process_is_not_found(family: list[int]) -> None:
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    for look in (process_tree.descendants, process_tree.scan_descendants):
        assert ended.pid not in look()
    ended.wait()


def test_quick_look_reads_no_other_process(family: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    parent_and_group = process_tree._parent_and_group

    def recorded(pid: int) -> tuple[int, int] | None:
        read.append(pid)
        return parent_and_group(pid)

    monkeypatch.setattr(process_tree, "_parent_and_group", recorded)
    found = process_tree.descendants()
    assert {*found} <= {*read}
    assert os.getppid() not in read
    assert 1 not in read
