"""Run the linter, the formatter and the type checker as part of the gate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(3600)  # without its cache, mypy takes minutes on a busy machine
@pytest.mark.parametrize("tool", ["ruff check .", "ruff format --check .", "mypy"])
def test_whole_tree_is_clean(tool: str) -> None:
    done = subprocess.run([sys.executable, "-m", *tool.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
