"""What the package shows to the world, and how its parts may lean on each other."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

import dblock

PACKAGE = Path(dblock.__file__).parent

LAYERS = [
    ["errors", "forks", "clock", "events"],
    ["terms", "presence", "silence"],
    ["calls", "rights"],
    ["steps", "faults", "target", "embedded"],
    ["schema"],
    ["wire", "tables", "tokens", "reaper", "overview"],
    ["doctor"],
    ["pool"],
    ["runner"],
    ["hold", "users_transaction"],
    ["rounds"],
    ["keepalive", "watch", "backing", "line"],
    ["listening"],
    ["listener", "task_listener"],
    ["closing"],
    ["lost"],
    ["lease"],
    ["lock"],
    ["client_base"],
    ["client"],
    ["demo", "bench"],
    ["cli"],
    ["__main__"],
]
"""From the ground up: a module imports only from rows above its own, as this list reads."""


def test_the_public_names_are_these_and_no_more() -> None:
    assert sorted(dblock.__all__) == [
        "AccessDenied", "AsyncClient", "AsyncEfficiencyLease", "AsyncLease", "AsyncLock", "Client", "ClientClosed",
        "DatabaseError", "DblockError", "EfficiencyLease", "EmbeddedError", "Holder", "InvalidArgument", "Lease",
        "LeaseLost", "Lock", "LockTimeout", "NoFencingToken", "NotWritable", "Reason", "SchemaError", "SchemaMissing",
        "SchemaOutdated", "SchemaTooNew", "Unavailable", "Waiter",
    ]  # fmt: skip
    for name in dblock.__all__:
        assert getattr(dblock, name).__doc__, name


@pytest.mark.parametrize("pair", [("Client", "AsyncClient"), ("Lock", "AsyncLock"), ("Lease", "AsyncLease")])
def test_both_kinds_have_the_same_words(pair: tuple[str, str]) -> None:
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
        dblock.ClientClosed(),
        dblock.NotWritable(),
        dblock.Unavailable("gone"),
        dblock.AccessDenied("no"),
        dblock.InvalidArgument("off"),
        dblock.SchemaMissing("dblock"),
        dblock.SchemaOutdated("dblock", "0001", "0002"),
        dblock.SchemaTooNew("dblock", "0003", "0002"),
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
    level = {module: number for number, row in enumerate(LAYERS) for module in row}
    modules = {_module(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}
    assert modules == set(level)
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        here = _module(path)
        if here == "__init__":
            continue
        for node in ast.walk(_without_type_checking(ast.parse(path.read_text()))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dblock":
                parts = node.module.split(".")[1:]
                for there in [parts[0]] if parts else [alias.name for alias in node.names]:
                    if there in level and there != here and level[there] >= level[here]:
                        wrong.append(f"{here} imports {there}")
    # The target starts the embedded server and the embedded server knows no target: same row, one way.
    assert sorted(set(wrong)) == ["target imports embedded"]


def test_no_module_is_much_over_four_hundred_lines() -> None:
    assert {
        path.name: lines for path in PACKAGE.rglob("*.py") if (lines := len(path.read_text().splitlines())) > 420
    } == {}


def test_the_import_takes_less_than_150_ms() -> None:
    script = "import time; began = time.perf_counter(); import dblock; print(time.perf_counter() - began)"
    times = [float(subprocess.check_output([sys.executable, "-c", script])) for _ in range(7)]
    # The quickest: whatever else the machine does can only add to it.
    assert min(times) < 0.150, times


def test_the_import_starts_nothing_and_brings_in_no_driver() -> None:
    script = (
        "import sys, threading, dblock; print(threading.active_count(),"
        " [name for name in ('psycopg', 'sqlalchemy', 'alembic', 'asyncio') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "1 []"


def _module(path: Path) -> str:
    """Return the module's name, or the name of the package that it is a part of."""
    return path.stem if path.parent == PACKAGE else path.relative_to(PACKAGE).parts[0]


def _without_type_checking(tree: ast.Module) -> ast.Module:
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    return tree
