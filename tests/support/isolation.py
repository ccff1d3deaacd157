"""Check after every test that nothing of it is left for the next one, and name the test that left it.

The check covers threads, child processes, sockets, temporary files, environment variables, the working folder, signal
handlers, and the sessions in the database of the test (tests/support/databases.py). It waits for what ends by itself. A
fixture of a wider scope may keep what it makes: this check begins after it.
"""

from __future__ import annotations

import gc
import glob
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.eventually import eventually
from tests.support.stages import stage_of

ENDS_WITHIN = 60.0

State = dict[str, dict[Any, str]]
"""What may be left, by kind: each thing with its description."""

_kept: set[Any] = set()


def pytest_configure(config: pytest.Config) -> None:
    """Give each process that runs tests a folder of its own for temporary files. Only its tests write there."""
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        return
    # The folders of tmp_path stay where pytest keeps them for a while.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="dblock-")
    os.chmod(folder, 0o711)  # the account of root's servers has files in it
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@contextmanager
def kept() -> Iterator[None]:
    """Let what the body starts stay for the tests that follow."""
    before = _state()
    yield
    _kept.update(*(things.keys() - before[kind].keys() for kind, things in _state().items()))


@pytest.fixture(autouse=True)
def _isolation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail if the test leaves something, unless it ends within a while."""
    # A killed program leaves its files, and an attempt to connect that was given up its socket.
    passed_over = set() if stage_of(request.node) == "1" else {"files", "sockets"}
    before = _state()
    yield
    if left := _left(before, passed_over):
        with suppress(AssertionError):
            # The garbage of a cycle may keep something open.
            eventually(lambda: gc.collect() >= 0 and not _left(before, passed_over), within=ENDS_WITHIN)
        left = _left(before, passed_over)
    if left:
        _restore(before)
        pytest.fail(
            f"The test left {'; '.join(left)}. End it in the test or in a fixture; write files to tmp_path. What later"
            " tests share is started inside isolation.kept(): docs/contributing/tests.md.",
            pytrace=False,
        )


def _state() -> State:
    """Return what there is now, without what may stay."""
    state: State = {
        "threads": {thread: thread.name for thread in threading.enumerate()},
        "processes": {pid: command for pid in _children() - _kept if _HELPER not in (command := _command(pid))},
        "sockets": {socket: socket for socket in _sockets()},
        "files": {name: name for name in os.listdir(tempfile.gettempdir())},
        "variables": {(name, value): name for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "folder": {os.getcwd(): os.getcwd()},
        "handlers": {(number, signal.getsignal(number)): number.name for number in _HANDLED},
    }
    return {kind: {thing: things[thing] for thing in things.keys() - _kept} for kind, things in state.items()}


_HELPER = "from multiprocessing."
"""Begins the program of a process that multiprocessing starts once, and keeps."""

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1)


def _left(before: State, passed_over: Set[str]) -> list[str]:
    found = []
    for kind, things in _state().items():
        if kind in passed_over:
            continue
        more = [described for thing, described in things.items() if thing not in before[kind]]
        fewer = [described for thing, described in before[kind].items() if thing not in things]
        if kind in ("variables", "folder", "handlers"):
            more += fewer
        if more:
            found.append(f"{kind} {', '.join(sorted({*more}))}")
    return found


def _restore(before: State) -> None:
    """Undo what can be undone, so that only this test is named."""
    values = dict(before["variables"].keys())
    for name, value in [*os.environ.items()]:
        if name not in values and (name, value) not in _kept and name != "PYTEST_CURRENT_TEST":
            del os.environ[name]
    os.environ.update(values)
    os.chdir(str(next(iter(before["folder"]))))


def _children() -> set[int]:
    return {int(pid) for listed in glob.glob("/proc/self/task/*/children") for pid in _read(listed).split()}


def _command(pid: int) -> str:
    return f"{pid} ({_read(f'/proc/{pid}/cmdline').replace(chr(0), ' ')[:80].strip() or 'ended'})"


def _sockets() -> set[str]:
    found = set()
    for descriptor in glob.glob("/proc/self/fd/*"):
        with suppress(OSError):
            found.add(os.readlink(descriptor))
    return {where for where in found if where.startswith("socket:")}


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
