"""Decide which tests run, and how many at the same time. docs/contributing/tests.md says which test belongs where.

- The first stage is plain `pytest`. Its tests show their claims without the clock of the machine, so that no machine is
  too slow for them. Several processes share it: each takes one module at a time, the largest modules first.
- The second stage is `pytest --stage 2`: tests with the mark `second_stage`, for what needs real time, kills or faults,
  and for more variants of a claim. Several processes share it. A test with the mark `alone` measures a duration, and
  runs while no other test runs; such tests come last, so that the others do not wait for them.
- `pytest --nightly` runs everything: also the tests with the mark `nightly`, which repeat a claim or take minutes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

LONGEST = "test_quality.py"
"""The module that takes the longest: without a cache, mypy needs more than half a minute of a processor."""

_TURNS = pytest.StashKey[str]()
_NONE_WANTED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stage", choices=["1", "2", "all"], help="the stage to run: 1 (the default), 2 or all")
    parser.addoption("--nightly", action="store_true", help="run both stages, and the tests that take minutes")
    parser.addoption("--order", type=int, metavar="SEED", help="run modules and tests in a random order")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "second_stage: needs real time, kills or faults; runs with --stage 2")
    config.addinivalue_line("markers", "alone: measures a duration; no other test of the second stage runs beside it")
    config.addinivalue_line("markers", "nightly: repeats a claim or takes minutes; runs only with --nightly")


def stage_of(item: pytest.Item) -> str:
    """Return where a test runs: in stage 1 or 2, or in the nightly run only."""
    if item.get_closest_marker("nightly"):
        return "nightly"
    if item.get_closest_marker("second_stage") and not uses_injected_clock(item):
        return "2"
    return "1"


def uses_injected_clock(item: pytest.Item) -> bool:
    """Return whether a module runs tests of other modules without real time, and so needs none of their marks."""
    return bool(getattr(getattr(item, "module", None), "INJECTED_CLOCK", False))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use several processes for a whole stage, and one for everything else."""
    whole = (
        config.args_source is config.ArgsSource.TESTPATHS
        and not config.option.keyword
        and stage_of_run(config) != "all"
    )
    return 2 * (os.cpu_count() or 1) if whole else 0


def turn_of(item: pytest.Item) -> AbstractContextManager[None]:
    """In the second stage, let a test that measures a duration run while no other test runs."""
    worker = getattr(item.config, "workerinput", None)
    return nullcontext() if worker is None else turn(Path(worker["turns"]), shares_the_machine(item))


def shares_the_machine(item: pytest.Item) -> bool:
    """Return whether a test of the second stage runs beside others."""
    return item.get_closest_marker("alone") is None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give every process the same folder for its turns."""
    config = node.config
    if _TURNS not in config.stash:
        config.stash[_TURNS] = tempfile.mkdtemp(prefix="dblock-turns-")
    node.workerinput["turns"] = config.stash[_TURNS]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In the second stage, hand out the shared tests of a module apart from those that run alone."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class SharedTestsFirst(LoadFileScheduling):  # type: ignore[misc]
        @cached_property
        def _alone(self) -> set[str]:
            # Every process has written the same list before the first test is handed out.
            return {*(Path(config.stash[_TURNS]) / "alone").read_text().splitlines()}

        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return f"{module} alone" if nodeid in self._alone else module

    return SharedTestsFirst(config, log) if stage_of_run(config) == "2" else None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.stash.get(_NONE_WANTED, False):
        terminalreporter.line("No test of this stage was named: add --stage 2, or --nightly for a nightly test.")


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(_TURNS, None):
        shutil.rmtree(folder)


@contextmanager
def turn(folder: Path, shared: bool) -> Iterator[None]:
    """Run the block while no test has the machine for itself; without `shared`, while no other test runs."""
    with open(folder / "queue", "w") as queue, open(folder / "machine", "w") as machine:
        # A test that waits for the machine keeps its place in the queue, so that later ones do not overtake it.
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(machine, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        fcntl.flock(queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # Unlock explicitly: a process that the test has forked, and that still runs, has the file open too.
            fcntl.flock(machine, fcntl.LOCK_UN)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    stage, nightly = stage_of_run(config), bool(config.getoption("--nightly"))
    runs = [item for item in items if _is_wanted(item, stage, nightly)]
    config.hook.pytest_deselected(items=[item for item in items if not _is_wanted(item, stage, nightly)])
    config.stash[_NONE_WANTED] = bool(items and not runs)
    items[:] = _ordered(runs, config.getoption("--order"), stage)
    worker = getattr(config, "workerinput", None)
    if worker is not None and stage == "2":
        items.sort(key=lambda item: not shares_the_machine(item))
        alone = [item.nodeid for item in items if not shares_the_machine(item)]
        (Path(worker["turns"]) / "alone").write_text("\n".join(alone))


def _ordered(items: list[pytest.Item], seed: int | None, stage: str = "1") -> list[pytest.Item]:
    """Begin with the modules that have the most tests on a database, so that no process begins a large one at the end.

    LONGEST comes before all of them: it is one program, and beside nothing else it would keep one processor idle.

    In the second stage, the modules without such tests start servers and programs of their own. They come in between,
    because several of them at a time are more than a machine can do without being late.

    With a seed, the order of the modules is random, and so is the order of the tests in a module.
    """
    if seed is None:
        sizes = Counter(item.path for item in items if "server" in getattr(item, "fixturenames", ()))
        items = sorted(items, key=lambda item: (item.path.name != LONGEST, -sizes[item.path]))
        return _woven(items) if stage == "2" else items

    # The same order in every process, and one that does not change with what other modules hold.
    def place(text: str) -> str:
        return hashlib.sha256(f"{seed}:{text}".encode()).hexdigest()

    return sorted(items, key=lambda item: (place(str(item.path)), place(item.nodeid)))


def _woven(items: list[pytest.Item]) -> list[pytest.Item]:
    """Take modules from the beginning and from the end in turn."""
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    left, order = deque(modules.values()), []
    while left:
        order += left.popleft()
        order += left.pop() if left else []
    return order


def stage_of_run(config: pytest.Config) -> str:
    """Return the stage that runs: 1, 2 or all."""
    if config.getoption("--nightly"):
        return "all"
    # A test that was named runs, of either stage. A nightly one still needs --nightly.
    named = any("::" in argument for argument in config.args)
    return str(config.getoption("--stage") or ("all" if named else "1"))


def _is_wanted(item: pytest.Item, stage: str, nightly: bool) -> bool:
    where = stage_of(item)
    return nightly if where == "nightly" else stage in ("all", where)


def first(number: int, values: Iterable[Any]) -> list[Any]:
    """Return the values for a parametrization, of which all but the first few are for the second stage."""
    values = list(values)
    return [*values[:number], *(pytest.param(value, marks=pytest.mark.second_stage) for value in values[number:])]


sync_first = pytest.mark.parametrize("clients", first(1, ["sync", "async"]), indirect=True)
"""Marks a case that takes seconds: it runs with `Client` in the first stage, with `AsyncClient` in the second."""


def lengths(medium_runs: int) -> pytest.MarkDecorator:
    """Run a state machine in the first stage, in the second, and for over ten thousand calls.

    The values are how many runs are made, and of how many calls. Some runs end early.
    """
    return pytest.mark.parametrize(
        ("examples", "steps"),
        [
            pytest.param(5, 20, id="short"),
            # To reduce a run that fails takes far longer than to find it.
            pytest.param(medium_runs, 40, id="medium", marks=pytest.mark.second_stage),
            pytest.param(400, 60, id="long", marks=[pytest.mark.nightly, pytest.mark.timeout(1800)]),
        ],
    )
