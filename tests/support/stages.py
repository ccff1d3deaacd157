"""Decide which tests run, how many at the same time, and which of them start first.

The suite has two stages and a third kind of test:

- The first stage is plain `pytest`. It tests once each claim that shows within about two seconds, and takes a few
  minutes. Several processes share it, because most tests wait for something: each process takes one module at a time.
- The second stage is `pytest --stage 2`. Its tests have the mark `second_stage`. They repeat a claim with more kinds,
  seeds or rounds, wait long, or are exact about time. Each of them runs alone, except those with the mark
  `beside_others`, which judge no duration: three processes share these. In a module with this mark, a test with the
  mark `alone` still runs alone. The shared tests run first, because a test that runs alone makes the others wait.
- Tests with the mark `long` take minutes. Only `pytest --long` runs them, after both stages.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

FIRST = (
    "test_cluster",
    "test_run",
    "test_doctor",
    "test_conformance",
    "test_embedded",
    "test_presence",
    "test_examples",
    "test_watch",
    "test_database",
    "test_leases",
    "test_config",
    "test_user_transaction",
    "test_outcomes",
)
"""The modules that take longest, the longest first: no process should begin one of them at the end."""


_TURNS = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stage", choices=["1", "2", "all"], help="the stage to run: 1 (the default), 2 or all")
    parser.addoption("--long", action="store_true", help="run both stages, and the tests that take minutes")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "second_stage: repeats, waits long or is exact about time; runs with --stage 2")
    config.addinivalue_line("markers", "beside_others: judges no duration; runs beside other tests of the second stage")
    config.addinivalue_line("markers", "alone: judges a duration, in a module that otherwise runs beside others")
    config.addinivalue_line("markers", "needs_presence: is skipped where clients have no presence (behind a NAT)")
    config.addinivalue_line("markers", "long: takes minutes; runs only with --long")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use several processes for a whole stage, and one for everything else."""
    if config.args_source is not config.ArgsSource.TESTPATHS or config.option.keyword:
        return 0
    return {"1": 2 * (os.cpu_count() or 1), "2": 3}.get(_stage(config), 0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """In the second stage, let a test that measures time run while no other test runs."""
    worker = getattr(item.config, "workerinput", None)
    if worker is None or _stage(item.config) != "2":
        return (yield)
    with turn(Path(worker["turns"]), shares_the_machine(item)):
        return (yield)


def shares_the_machine(item: pytest.Item) -> bool:
    """Return whether a test of the second stage runs beside others."""
    return bool(item.get_closest_marker("beside_others")) and not item.get_closest_marker("alone")


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

    return SharedTestsFirst(config, log) if _stage(config) == "2" else None


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
    stage, long = _stage(config), bool(config.getoption("--long"))
    runs = [item for item in items if _is_wanted(item, stage, long)]
    config.hook.pytest_deselected(items=[item for item in items if not _is_wanted(item, stage, long)])
    order = {name: number for number, name in enumerate(FIRST)}
    items[:] = sorted(runs, key=lambda item: order.get(item.path.stem, len(order)))
    worker = getattr(config, "workerinput", None)
    if worker is not None and stage == "2":
        items.sort(key=lambda item: not shares_the_machine(item))
        alone = [item.nodeid for item in items if not shares_the_machine(item)]
        (Path(worker["turns"]) / "alone").write_text("\n".join(alone))


def _stage(config: pytest.Config) -> str:
    if config.getoption("--long"):
        return "all"
    # A test that was named runs, whatever its stage.
    named = any("::" in argument for argument in config.args)
    return str(config.getoption("--stage") or ("all" if named else "1"))


def _is_wanted(item: pytest.Item, stage: str, long: bool) -> bool:
    if item.get_closest_marker("long"):
        return long
    return stage in ("all", "2" if item.get_closest_marker("second_stage") else "1")


def first(number: int, values: Iterable[Any]) -> list[Any]:
    """Return the values for a parametrization, of which all but the first few are for the second stage.

    The first ones run beside other tests, in the first stage, and so the later ones may too.
    """
    values = list(values)
    marks = [pytest.mark.second_stage, *([pytest.mark.beside_others] if number else [])]
    return [*values[:number], *(pytest.param(value, marks=marks) for value in values[number:])]


sync_first = pytest.mark.parametrize("clients", first(1, ["sync", "async"]), indirect=True)
"""Marks a case that takes seconds: it runs with `Client` in the first stage, with `AsyncClient` in the second."""


def lengths(medium: int) -> pytest.MarkDecorator:
    """Run a state machine in the first stage, in the second, and for over ten thousand calls.

    The values are how many runs are made, and of how many calls. Some runs end early.
    """
    return pytest.mark.parametrize(
        ("examples", "steps"),
        [
            pytest.param(5, 20, id="short"),
            # To reduce a run that fails takes far longer than to find it.
            pytest.param(medium, 40, id="medium", marks=[pytest.mark.second_stage, pytest.mark.timeout(600)]),
            pytest.param(400, 60, id="long", marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
        ],
    )
