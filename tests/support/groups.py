"""Which tests run beside which: a whole run takes three processes, one for each group.

What waits for time to pass runs in one, beside what computes and what starts programs in two others, which stand back.
What is most exact about time comes last in the first, when the others are done.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Generator
from pathlib import Path, PurePath
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

COMPUTES = ("conformance", "core", "http", "objects", "postgres", "runtime", "security", "sql")
"""The folders of tests that are least about time."""

TIMELESS = ("test_checkers", "test_hand_over", "test_model", "test_report", "test_simulation")
"""The modules of tests/robustness in which no real time passes."""

STARTS = ("test_bench", "test_config", "test_demo", "test_force_release", "test_inspect", "test_run", "test_watch")
"""The modules of tests/cli that start programs and wait for them; the others compute."""

EXACT = ("test_keepalive_stress", "test_queue_order", "test_paused_holder", "test_presence", "test_speed")
"""The modules that are most exact about time: run last, when the other processes are done."""

BESIDE = ("computes", "starts")
"""The groups that are run beside what waits for time to pass. Without what is exact, all three take about as long."""

LONGEST_WAIT = 60
"""Seconds that what is exact about time waits for the others at most."""

_group: pytest.StashKey[str] = pytest.StashKey()
_waited: pytest.StashKey[bool] = pytest.StashKey()
_last: pytest.StashKey[set[pytest.Item]] = pytest.StashKey()


def group(path: PurePath) -> str:
    """Return the group of a module's tests."""
    folder, module = path.parent.name, path.stem
    if folder == "embedded" or (folder == "cli" and module in STARTS):
        return "starts"
    if is_exact(path) or module == "test_quality":
        return "waits"
    if folder in (*COMPUTES, "cli") or (folder == "robustness" and module in TIMELESS):
        return "computes"
    return "waits"


def is_exact(path: PurePath) -> bool:
    """Tell whether a module is among those that are most exact about time."""
    return path.stem in EXACT and path.parent.name in ("robustness", "cli")


class _OneProcessForEach(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return group(PurePath(nodeid.partition("::")[0]))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return _OneProcessForEach(config, log)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run the whole suite in a process for each group, and whatever was named in one."""
    return 1 + len(BESIDE) if config.args_source is config.ArgsSource.TESTPATHS and not config.option.keyword else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # What the checkers say is asked for at the very end: they begin first, and stand back even further.
    items.sort(key=lambda item: (item.path.stem == "test_quality", is_exact(item.path)))
    # The last of a process is kept back until all the others are through; so the one before it counts as the end.
    config.stash[_last] = {
        item for name in BESIDE for item in [one for one in items if group(one.path) == name][-2:][:1]
    }


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Let what is exact about time wait for the end of the others, if they are under way in other processes."""
    config, ours = item.config, group(item.path)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    if _group not in config.stash:
        config.stash[_group] = ours
        if ours in BESIDE:
            os.nice(5)
    elif ours != config.stash[_group] and _is_whole(config):
        raise RuntimeError(f"{item.nodeid} of the group {ours!r} is run among those of {config.stash[_group]!r}")
    if is_exact(item.path) and _waited not in config.stash and _is_whole(config):
        config.stash[_waited] = True
        gives_up = time.monotonic() + LONGEST_WAIT
        others = [_ended(config, other) for other in sorted({group(last.path) for last in config.stash[_last]})]
        while not all(path.exists() for path in others) and time.monotonic() < gives_up:
            time.sleep(0.2)
        for path in others:
            path.unlink(missing_ok=True)
    done = yield
    if item in config.stash[_last]:
        _ended(config, ours).touch()
    return done


def _is_whole(config: pytest.Config) -> bool:
    """Tell whether there is a process for each group."""
    return bool(config.workerinput["workercount"] > len(BESIDE))  # type: ignore[attr-defined]


def _ended(config: pytest.Config, name: str) -> Path:
    """Return the file that says that a group of this run has ended."""
    run = config.workerinput["testrunuid"]  # type: ignore[attr-defined]
    return Path(tempfile.gettempdir()) / f"dblock-tests-{run}-{name}"
