"""The public names of fenced_store, and the imports that its packages may have."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

import fenced_store
from fenced_store import errors, tokens

PACKAGE = Path(fenced_store.__file__).parent

LAYERS = [
    ["refusals", "errors", "tokens", "conformance"],
    ["_postgres"],
    ["schema"],
    ["_calls", "audit", "store", "tables", "fencing"],
    ["objects", "http", "integrations"],
]
"""From the bottom up: a package imports from the rows above its own in this list, and from the left within its row."""


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_public_names_are_these_and_no_more() -> None:
    assert sorted(fenced_store.__all__) == [
        "AccessDenied", "AsyncFencedStore", "ClaimTimeout", "FenceAhead", "FenceBroken", "FencedMixin", "FencedStore",
        "FencedStoreError", "InvalidArgument", "LoginRefused", "MissingToken", "NotInstalled", "ObjectBusy",
        "ObjectDamaged", "OutcomeUnknown", "Protection", "Rejection", "StaleTokenError", "StoreClosed", "Stored",
        "TransactionConflict", "Unavailable", "Value", "VersionConflict", "WriteTimeout", "ddl",
        "fence", "grant", "high_water", "install", "protect", "protected", "rejections", "row",
        "translate_errors", "uninstall", "unprotect",
    ]  # fmt: skip
    for name in fenced_store.__all__:
        assert getattr(fenced_store, name).__doc__, name


def test_fenced_store_imports_nothing_of_dblock() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not {name for name in imports(path) if name.split(".")[0] == "dblock"}, path.name


def test_fenced_store_works_without_dblock() -> None:
    script = "import sys; sys.modules['dblock'] = None; import fenced_store; print(fenced_store.row('t', 1))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "t:1"


@pytest.mark.parametrize(
    ("used", "heavy"),
    [
        ("fenced_store", ["sqlalchemy", "alembic", "asyncio", "psycopg", "obstore", "httpx"]),
        ("fenced_store.StaleTokenError, fenced_store.row", ["sqlalchemy", "alembic", "asyncio", "psycopg"]),
        ("fenced_store.fence, fenced_store.Stored", ["sqlalchemy", "alembic"]),
        ("fenced_store.FencedStore, fenced_store.protect", ["sqlalchemy.orm", "alembic"]),
    ],
)
def test_using_a_name_imports_only_what_the_name_needs(used: str, heavy: list[str]) -> None:
    script = f"import sys, fenced_store; {used}; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def test_every_public_name_is_listed_and_can_be_imported_by_star() -> None:
    script = (
        "from fenced_store import *; import fenced_store as f; print(set(f.__all__) <= set(dir(f)) & set(globals()))"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "True"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fenced_store.nothing


@pytest.mark.second_stage
def test_module_without_its_library_says_what_to_install() -> None:
    """The command names the library itself, so that it is right in a checkout too, and asks for the extra's version."""
    extras = (PACKAGE.parent / "pyproject.toml").read_text()
    for module, name, library in (
        ("objects", "FencedObjects", "obstore"),
        ("http.httpx_auth", "FencingAuth", "httpx"),
        ("http", "FencingAuth", "httpx"),
    ):
        script = f"import sys; sys.modules[{library!r}] = None; from fenced_store.{module} import {name}"
        told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        (needed,) = set(re.findall(rf'"({library}>=[0-9.]+)"', extras))
        assert f"needs {library}: pip install '{needed}'" in told.stderr


def test_middleware_needs_no_httpx() -> None:
    script = "import sys; sys.modules['httpx'] = None; from fenced_store.http import FencingMiddleware as m; print(m)"
    assert "FencingMiddleware" in subprocess.check_output([sys.executable, "-c", script], text=True)


def test_imports_point_one_way() -> None:
    order = [package for row in LAYERS for package in row]
    for path in PACKAGE.rglob("*.py"):
        here = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if here == "__init__":
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "fenced_store" and len(parts) > 1 and parts[1] in order:
                assert order.index(parts[1]) <= order.index(here), f"{here} imports {parts[1]}"


def test_sync_and_async_stores_have_the_same_methods() -> None:
    def words(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(kind, callable)
            if not name.startswith("_")
        }

    assert words(fenced_store.FencedStore) == words(fenced_store.AsyncFencedStore)


def test_every_error_survives_pickling() -> None:
    now = datetime.now(timezone.utc)
    made = [
        errors.StaleTokenError("r", 7, 8, now, "somebody"),
        errors.StaleTokenError("r", 7, 8, None),
        errors.StaleTokenError("r", 8, 8, now, numbers=(1, 2)),
        errors.StaleTokenError("r", 8, 8, now, numbers=(2, 2)),
        errors.ClaimTimeout("t"),
        errors.WriteTimeout("k", 5.0),
        errors.TransactionConflict("r", "40001"),
        errors.TransactionConflict("r", "40P01"),
        errors.Unavailable("gone"),
        errors.LoginRefused("no"),
        errors.StoreClosed("FencedStore", "fenced_store"),
        errors.MissingToken("r"),
        errors.VersionConflict("k", 1, 2),
        errors.VersionConflict("k", 0, 2),
        errors.VersionConflict("k", 1, 0),
        errors.OutcomeUnknown("k", 5, "gone."),
        errors.FenceAhead("r", 7, 8),
        errors.AccessDenied("no"),
        errors.FenceBroken("b"),
        errors.ObjectBusy("p", 3),
        errors.ObjectDamaged("p", "gone."),
        errors.NotInstalled("c"),
        errors.InvalidArgument("d"),
    ]
    for error in made:
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
    kinds = {getattr(fenced_store, name) for name in fenced_store.__all__}
    ours = {kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert ours - {type(error) for error in made} == {errors.FencedStoreError}
    for kind in ours:
        assert kind.__name__ in (errors.__doc__ or "")


def test_write_numbers_rise_whatever_the_clock_does() -> None:
    import time

    first = tokens.next_write()
    before, times = time.time_ns, iter([first - 10**9, first - 10**9, 2**62])
    try:
        time.time_ns = lambda: next(times)
        assert [tokens.next_write(), tokens.next_write(), tokens.next_write()] == [first + 1, first + 2, 2**62]
    finally:
        time.time_ns = before
        tokens._last = first


@pytest.mark.parametrize("fraction", ["", ".1", ".12", ".123", ".1234", ".123456"])
def test_moment_with_any_fraction_is_read_on_every_python(fraction: str) -> None:
    """Postgres leaves out zeros at the end, and Python 3.10 reads only three or six digits."""
    read = errors._moment(f"2026-01-02T03:04:05{fraction}+00:00")
    assert read == datetime(2026, 1, 2, 3, 4, 5, int(f"{fraction[1:]:0<6}"), timezone.utc)
