"""Decide which tests run, how many at the same time, and which of them start first.

The suite has two stages and a third kind of test:

- The first stage is plain `pytest`. It tests every claim at least once and takes a few minutes. Several processes share
  it, because most tests wait for something: each process takes one module at a time.
- The second stage is `pytest --stage 2`. Its tests have the mark `second_stage`. They repeat a claim with more kinds,
  seeds or rounds, wait long, or are exact about time. They run in one process, alone.
- Tests with the mark `long` take minutes. Only `pytest --long` runs them, after both stages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

FIRST = (
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stage", choices=["1", "2", "all"], help="the stage to run: 1 (the default), 2 or all")
    parser.addoption("--long", action="store_true", help="run both stages, and the tests that take minutes")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "second_stage: repeats, waits long or is exact about time; runs with --stage 2")
    config.addinivalue_line("markers", "needs_presence: is skipped where clients have no presence (behind a NAT)")
    config.addinivalue_line("markers", "long: takes minutes; runs only with --long")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use several processes for the whole first stage, and one for everything else."""
    if config.args_source is not config.ArgsSource.TESTPATHS or config.option.keyword or _stage(config) != "1":
        return 0
    return 2 * (os.cpu_count() or 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    stage, long = _stage(config), bool(config.getoption("--long"))
    runs = [item for item in items if _is_wanted(item, stage, long)]
    config.hook.pytest_deselected(items=[item for item in items if not _is_wanted(item, stage, long)])
    order = {name: number for number, name in enumerate(FIRST)}
    items[:] = sorted(runs, key=lambda item: order.get(item.path.stem, len(order)))


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
    """Return the values for a parametrization, of which all but the first few are for the second stage."""
    values = list(values)
    return [*values[:number], *(pytest.param(value, marks=pytest.mark.second_stage) for value in values[number:])]


sync_first = pytest.mark.parametrize("clients", first(1, ["sync", "async"]), indirect=True)
"""Marks a case that takes seconds: it runs with `Client` in the first stage, with `AsyncClient` in the second."""
