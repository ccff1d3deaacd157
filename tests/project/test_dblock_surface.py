"""The public names of the package, and which of its parts may import which."""

from __future__ import annotations

import ast
import functools
import inspect
import pickle
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

import dblock
from dblock.errors import CycleWait

PACKAGE = Path(dblock.__file__).parent

LAYERS = [
    ["errors"],
    ["_core"],
    ["embedded"],
    ["_runtime"],
    ["admin"],
    ["lease", "lock", "shared", "decorators", "lock_set", "several", "client_base", "client", "async_client"],
    ["recipes", "integrations", "observability", "testing"],
    ["server", "cli", "__main__"],
]
"""From the bottom up: a package imports from the rows above its own in this list, and from the left within its row."""

SAME_METHODS = [
    ("Client", "AsyncClient"),
    ("Lock", "AsyncLock"),
    ("Lease", "AsyncLease"),
    ("LockSet", "AsyncLockSet"),
    ("SharedLock", "AsyncSharedLock"),
    ("Semaphore", "AsyncSemaphore"),
    ("ReadLease", "AsyncReadLease"),
    ("WriteLease", "AsyncWriteLease"),
    ("PermitLease", "AsyncPermitLease"),
    ("Election", "AsyncElection"),
    ("Term", "AsyncTerm"),
    ("Barrier", "AsyncBarrier"),
    ("Latch", "AsyncLatch"),
]

DECIDES_WITHOUT = {"asyncio", "psycopg", "select", "socket", "sqlalchemy", "subprocess"}
"""Modules that `_core` may not import: it decides, and `_runtime` performs."""


def test_the_public_names_are_these_and_no_more() -> None:
    assert sorted(dblock.__all__) == [
        "AccessDenied", "AsyncBarrier", "AsyncClient", "AsyncEfficiencyLease", "AsyncElection", "AsyncLatch",
        "AsyncLease", "AsyncLock", "AsyncLockSet", "AsyncPermitLease", "AsyncReadLease", "AsyncSemaphore",
        "AsyncSharedLock", "AsyncTerm", "AsyncWriteLease", "Barrier", "Client", "ClientClosed", "ConfigurationError",
        "CountsDiffer", "DatabaseError", "DblockError", "DeadlockDetected", "EfficiencyLease", "Election",
        "EmbeddedError", "Holder", "InvalidArgument", "Latch", "Leader", "Lease", "LeaseLost", "Lock", "LockSet",
        "LockTimeout", "LoginRefused", "NoFencingToken", "NotLocked", "NotWritable", "PermitLease", "PermitsDiffer",
        "ReadLease", "Reason", "SKIPPED", "SchemaError", "SchemaMissing", "SchemaOutdated", "SchemaTooNew", "Semaphore",
        "SharedLock", "Term", "TermsForgotten", "TransferRefused", "Unavailable", "UnsuitableServer", "UpgradeRefused",
        "Vacancy", "WaitTimeout", "Waiter", "WriteLease", "WrongKind", "assert_locked", "current_lease", "current_run",
        "monotonic",
    ]  # fmt: skip
    for name in dblock.__all__:
        assert getattr(dblock, name).__doc__, name


@pytest.mark.parametrize("pair", SAME_METHODS)
def test_sync_and_async_classes_have_the_same_methods(pair: tuple[str, str]) -> None:
    sync, asynchronous = (getattr(dblock, name) for name in pair)

    def words(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(kind, callable)
            if not name.startswith("_")
        }

    assert words(sync) == words(asynchronous)
    assert (
        inspect.signature(sync.__init__).parameters.keys() == inspect.signature(asynchronous.__init__).parameters.keys()
    )


def test_every_error_has_one_base_and_survives_pickling() -> None:
    made = [
        dblock.LockTimeout("a", 5.0),
        dblock.LeaseLost("a", "expired", datetime.now(timezone.utc), 41),
        dblock.LeaseLost("a", "forced", datetime.now(timezone.utc), -41),
        dblock.NoFencingToken("a"),
        dblock.WrongKind("lock 'a' is a semaphore"),
        dblock.PermitsDiffer("a", 2, 3),
        dblock.UpgradeRefused("a"),
        dblock.NotLocked("a"),
        dblock.DeadlockDetected("a", [CycleWait("me", "a", "you", 41, None, None)]),
        dblock.ClientClosed(),
        dblock.NotWritable(),
        dblock.Unavailable("gone"),
        dblock.LoginRefused("no"),
        dblock.AccessDenied("no"),
        dblock.InvalidArgument("off"),
        dblock.ConfigurationError("no database"),
        dblock.SchemaMissing("dblock"),
        dblock.SchemaOutdated("dblock", "0001", "0002"),
        dblock.SchemaTooNew("dblock", "0003", "0002"),
        dblock.UnsuitableServer([("row-lock", "it did not block", "Two clients could hold it.")]),
        dblock.TransferRefused("e", "web-2", "absent"),
        dblock.TermsForgotten("e", 41),
        dblock.WaitTimeout("barrier", "a", 5.0),
        dblock.WaitTimeout("latch", "a", 5.0),
        dblock.CountsDiffer("barrier", "a", 2, 3),
        dblock.SchemaError("other"),
        dblock.DatabaseError("other"),
        dblock.EmbeddedError("other"),
    ]
    for error in made:
        assert isinstance(error, dblock.DblockError)
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
    kinds = {getattr(dblock, n) for n in dblock.__all__ if inspect.isclass(getattr(dblock, n))}
    errors = {kind for kind in kinds if issubclass(kind, Exception)}
    assert errors - {type(error) for error in made} == {dblock.DblockError}


def test_the_error_tree_in_the_docstring_is_the_real_one() -> None:
    from dblock import errors

    drawn = errors.__doc__ or ""
    for name in dblock.__all__:
        if isinstance(getattr(dblock, name), type) and issubclass(getattr(dblock, name), Exception):
            assert name in drawn


def test_imports_point_one_way() -> None:
    order = [package for row in LAYERS for package in row]
    packages = {_package(module) for module in _modules()}
    assert packages <= set(order), packages - set(order)
    upward = {
        f"{module} imports {imported}"
        for module, path in _modules().items()
        for imported in _imports(path)
        if order.index(_package(imported)) > order.index(_package(module))
    }
    assert upward == set()


def test_the_core_imports_nothing_that_performs() -> None:
    found = {
        f"{module} imports {imported}"
        for module, path in _modules().items()
        if _package(module) == "_core"
        for imported in _all_imports(path)
        if imported.split(".")[0] in DECIDES_WITHOUT
    }
    assert found == set()


def test_no_module_imports_itself_through_others() -> None:
    arrows = {module: _imports(path) - {module} for module, path in _modules().items()}
    while leaves := {module for module, imported in arrows.items() if not imported & arrows.keys()}:
        arrows = {module: imported for module, imported in arrows.items() if module not in leaves}
    assert arrows == {}


def test_only_its_own_module_changes_a_lease_state() -> None:
    """Other modules report events to it and read its properties. They assign none of its attributes and use no private
    one.
    """
    found = {
        f"{module}:{node.lineno}: {ast.unparse(node)}"
        for module, path in _modules().items()
        if module != "_core.lease_state"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value).split(".")[-1] in ("state", "_state")
        and (not isinstance(node.ctx, ast.Load) or node.attr.startswith("_"))
    }
    assert found == set()


def test_no_module_is_much_over_four_hundred_lines() -> None:
    assert {
        path.name: lines for path in PACKAGE.rglob("*.py") if (lines := len(path.read_text().splitlines())) > 420
    } == {}


@pytest.mark.second_stage
@pytest.mark.alone
def test_the_import_takes_less_than_150_ms() -> None:
    """In the time of a core, to which a busy machine adds little."""
    script = "import time; began = time.process_time(); import dblock; print(time.process_time() - began)"
    times = [float(subprocess.check_output([sys.executable, "-c", script])) for _ in range(7)]
    # The quickest: whatever else the machine does can only add to it.
    assert min(times) < 0.150, times


def test_the_import_starts_nothing_and_brings_in_no_driver() -> None:
    script = (
        "import sys, threading, dblock; print(threading.active_count(),"
        " [name for name in ('psycopg', 'sqlalchemy', 'alembic', 'asyncio') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "1 []"


@functools.cache
def _modules() -> dict[str, Path]:
    """Return the modules of the package by name, without `dblock.__init__`, which only re-exports."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    del found[""]
    return found


def _package(module: str) -> str:
    return module.split(".")[0]


@functools.cache
def _imports(path: Path) -> set[str]:
    """Return the modules of the package that a module imports at run time, anywhere in its code."""
    known, found = _modules(), set()
    for node in ast.walk(_without_type_checking(ast.parse(path.read_text()))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dblock":
            module = node.module.partition(".")[2]
            for alias in node.names:
                name = f"{module}.{alias.name}".removeprefix(".")
                found.add(name if name in known else module)
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("dblock.")}
    return found - {""}


@functools.cache
def _all_imports(path: Path) -> set[str]:
    """Return the names of all modules that a module imports at run time, anywhere in its code."""
    found: set[str] = set()
    for node in ast.walk(_without_type_checking(ast.parse(path.read_text()))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def _without_type_checking(tree: ast.Module) -> ast.Module:
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    return tree
