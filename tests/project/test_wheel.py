"""The wheel contains every file that it needs, and works without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from this checkout, and unpack it into an empty folder."""
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    site = folder / "site"
    zipfile.ZipFile(wheel).extractall(site)
    return site


def run(unpacked: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=unpacked.parent, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_holds_the_package_its_sql_and_its_migrations(unpacked: Path) -> None:
    names = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    expected = {"dblock/py.typed", "dblock/migrations/env.py"}
    for package in ("dblock", "fenced_store"):
        expected |= {str(path.relative_to(ROOT)) for path in (ROOT / package / "sql").rglob("*.sql")}
    expected |= {"fenced_store/py.typed"}
    for folder in ("templates", "static"):
        expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "dblock/server/dashboard" / folder).iterdir()}
    expected |= {f"dblock/migrations/versions/{path.name}" for path in (ROOT / "alembic" / "versions").glob("*.py")}
    assert expected <= names
    assert not {name for name in names if name.startswith(("tests/", "bench/", "alembic/"))}


@pytest.mark.second_stage
def test_wheel_installs_its_schema_and_locks(unpacked: Path, bare_dsn: str) -> None:
    assert str(unpacked) in run(unpacked, "-c", "import dblock; print(dblock.__file__)")
    assert "Installed" in run(unpacked, "-m", "dblock.cli", "install", "--dsn", bare_dsn)
    assert "CREATE TABLE" in run(unpacked, "-m", "dblock.cli", "install", "--sql")
    script = "import dblock, sys; print(dblock.Client(sys.argv[1]).lock('a').acquire().token)"
    token = int(run(unpacked, "-c", script, bare_dsn))
    assert 0 <= time.time() - token / 1e6 < 60
    assert "fenced_store is in" in run(unpacked, "-m", "dblock.cli", "fence", "setup", "--dsn", bare_dsn)
    assert "Removed" in run(unpacked, "-m", "dblock.cli", "uninstall", "--yes", "--dsn", bare_dsn)
