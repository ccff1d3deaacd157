"""Run the linter, the formatter and the type checker as part of the gate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stages import first

pytestmark = pytest.mark.beside_others

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", first(2, ["ruff check .", "ruff format --check .", "mypy"]))
def test_whole_tree_is_clean(tool: str) -> None:
    # With low priority, because the tests that run at the same time depend on exact timing. Without a cache, mypy takes
    # more than a minute of a core, and therefore runs in the second stage.
    command = ["nice", "-n", "10", sys.executable, "-m", *tool.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
