"""Make the collection of the tests cheap.

Every process of a run imports every test module. On a clean clone, pytest has to rewrite the asserts of each module
first, which takes twice as long as all the rest, and then keeps the result beside the module. So each process begins
with a share of its own, and finds the results of the others afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["whole_stage"] = node.config.args_source is node.config.ArgsSource.TESTPATHS


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    # Nearly all that a collection creates stays until the end, so a search for garbage finds none: neither now, nor
    # among these objects later.
    gc.disable()
    try:
        _import_own_share(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _import_own_share(config: pytest.Config) -> None:
    """Import the modules that are this process's own to rewrite, if several processes share a whole stage."""
    worker = getattr(config, "workerinput", None)
    if worker is None or not worker["whole_stage"]:
        return
    modules = [path for folder in config.getini("testpaths") for path in (config.rootpath / folder).rglob("test_*.py")]
    number = int(worker["workerid"].removeprefix("gw"))
    for path in shares(modules, worker["workercount"])[number]:
        # The collection imports it again, and reports the error.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))


def shares(modules: Sequence[Path], number: int) -> list[list[Path]]:
    """Divide the modules into shares of nearly the same size, in the same way in every process."""
    divided: list[list[Path]] = [[] for _ in range(number)]
    sizes = [0] * number
    for size, path in sorted(((path.stat().st_size, path) for path in modules), reverse=True):
        smallest = sizes.index(min(sizes))
        divided[smallest].append(path)
        sizes[smallest] += size
    return divided
