"""Plain `pytest` runs the first stage, and every test belongs to a stage."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import stages
from tests.support.eventually import eventually

ROOT = Path(__file__).parents[2]


def config(*arguments: str, **options: Any) -> Any:
    """Return a stand-in for pytest's configuration."""
    return SimpleNamespace(args=arguments, getoption=lambda name: options.get(name.removeprefix("--")))


def item(*marks: str) -> Any:
    """Return a stand-in for a test with these marks."""
    return SimpleNamespace(get_closest_marker=lambda name: name if name in marks else None)


@pytest.mark.parametrize(
    ("given", "stage"),
    [
        (config(), "1"),
        (config("tests/dblock"), "1"),
        (config("tests/dblock/test_a.py::test_b"), "all"),
        (config("tests/dblock/test_a.py::test_b", stage="2"), "2"),
        (config(stage="2"), "2"),
        (config(stage="all"), "all"),
        (config(nightly=True), "all"),
    ],
)
def test_stage_follows_from_the_options_and_the_named_tests(given: Any, stage: str) -> None:
    assert stages.stage_of_run(given) == stage


@pytest.mark.parametrize(
    ("marks", "runs_in"),
    [
        ([], {("1", False), ("all", False), ("all", True)}),
        (["second_stage"], {("2", False), ("all", False), ("all", True)}),
        (["nightly"], {("all", True)}),
        (["nightly", "second_stage"], {("all", True)}),
    ],
)
def test_marks_decide_where_a_test_runs(marks: list[str], runs_in: set[tuple[str, bool]]) -> None:
    every = [("1", False), ("2", False), ("all", False), ("all", True)]
    assert {one for one in every if stages._is_wanted(item(*marks), *one)} == runs_in


def test_order_of_a_number_is_random_and_always_the_same() -> None:
    tests: list[Any] = [
        SimpleNamespace(path=Path(f"test_{module}.py"), nodeid=f"test_{module}.py::test_{test}")
        for module in "abcdef"
        for test in range(3)
    ]
    given, modules = [one.nodeid for one in tests], [one.path for one in tests]
    first, again, second = (stages._ordered(tests, seed) for seed in (1, 1, 2))
    assert first == again
    assert sorted(one.nodeid for one in first) == given
    assert [one.nodeid for one in first] != given
    assert [one.nodeid for one in first] != [one.nodeid for one in second]
    assert [one.path for one in first] != modules
    assert all(len({one.path for one in first[place : place + 3]}) == 1 for place in range(0, 18, 3))


def test_first_stage_begins_with_mypy_and_then_with_large_modules() -> None:
    tests: list[Any] = [
        SimpleNamespace(path=Path(module), fixturenames=["server"] * used, nodeid=f"{module}{number}")
        for module, number, used in (("a", 1, 1), ("b", 1, 1), ("b", 2, 1), (stages.LONGEST, 1, 0), ("d", 1, 0))
    ]
    assert [one.nodeid for one in stages._ordered(tests, None)] == [f"{stages.LONGEST}1", "b1", "b2", "a1", "d1"]
    assert (Path(__file__).parent / stages.LONGEST).exists()


def test_second_stage_begins_large_and_own_servers_in_turn() -> None:
    tests: list[Any] = [
        SimpleNamespace(path=Path(module), fixturenames=["server"] * used, nodeid=f"{module}{number}")
        for module, number, used in (("a", 1, 0), ("b", 1, 1), ("b", 2, 1), ("c", 1, 1), ("d", 1, 0))
    ]
    assert [one.nodeid for one in stages._ordered(tests, None, "2")] == ["b1", "b2", "d1", "c1", "a1"]


@pytest.mark.parametrize(("marks", "shares"), [([], True), (["alone"], False)])
def test_marks_decide_whether_a_test_shares_the_machine(marks: list[str], shares: bool) -> None:
    assert stages.shares_the_machine(item(*marks)) is shares


def test_test_that_measures_time_runs_alone(tmp_path: Path) -> None:
    order: list[str] = []
    alone, ended = threading.Event(), threading.Event()

    def measure() -> None:
        alone.set()
        with stages.turn(tmp_path, shared=False):
            order.append("measures")

    def follow() -> None:
        with stages.turn(tmp_path, shared=True):
            order.append("follows")
        ended.set()

    with stages.turn(tmp_path, shared=True):
        with stages.turn(tmp_path, shared=True):
            order.append("shares")
        threads = [threading.Thread(target=measure), threading.Thread(target=follow)]
        threads[0].start()
        alone.wait()
        eventually(lambda: _waits_in(tmp_path / "queue"), "a test waits for the machine")
        threads[1].start()
        assert not ended.wait(0.1), "it overtook a test that waits for the machine"
        assert order == ["shares"]
    for thread in threads:
        thread.join()
    assert order == ["shares", "measures", "follows"]


@pytest.mark.second_stage
def test_process_that_a_test_has_forked_keeps_no_other_test_waiting(tmp_path: Path) -> None:
    with stages.turn(tmp_path, shared=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about the threads of this process
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        with open(tmp_path / "machine") as machine:
            fcntl.flock(machine, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


MODULE = """
import os, pytest

def note(line):
    with open(os.environ["PYTEST_XDIST_WORKER"], "a") as file:
        file.write(line + "\\n")

@pytest.mark.second_stage
@pytest.mark.alone
def test_alone():
    note("alone")

@pytest.mark.second_stage
@pytest.mark.parametrize("number", range(3))
def test_shared(number):
    note("shared")
"""


@pytest.mark.second_stage
def test_each_process_runs_shared_tests_before_those_that_run_alone(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.support.stages"]')
    (tmp_path / "pytest.ini").write_text("[pytest]")
    for name in "abcdef":
        (tmp_path / f"test_{name}.py").write_text(MODULE)
    options = ["-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--stage", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "24 passed" in done.stdout, done.stdout + done.stderr
    for process in ("gw0", "gw1"):
        order = (tmp_path / process).read_text().split()
        assert order == sorted(order, reverse=True)


def _waits_in(path: Path) -> bool:
    """Return whether a test has the head of the queue and waits for the machine."""
    with open(path, "w") as queue:
        try:
            fcntl.flock(queue, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
