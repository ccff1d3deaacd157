"""The linter, the formatter and the type checker, run beside the tests that wait for something else."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, ClassVar

import pytest

from tests.support.groups import group

ROOT = Path(__file__).parents[2]
MODULE = ROOT / "tests" / "project" / "test_quality.py"
TOOLS = [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]]


class Checks:
    """All of them, begun as soon as it is known that their results will be asked for."""

    key: ClassVar[pytest.StashKey[Checks]] = pytest.StashKey()

    def __init__(self) -> None:
        self._begun: dict[str, tuple[subprocess.Popen[str], IO[Any]]] = {}
        for tool in TOOLS:
            said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed below, when all is over
            # Last in line for the processor: many a test is about time.
            command = ["nice", "-n", "19", sys.executable, "-m", *tool]
            began = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, text=True)
            self._begun[" ".join(tool)] = began, said

    def result(self, tool: list[str]) -> tuple[int, str]:
        """Wait for one, and return its exit code and all that it said."""
        process, said = self._begun[" ".join(tool)]
        code = process.wait()
        said.seek(0)
        return code, said.read()

    def close(self) -> None:
        for process, said in self._begun.values():
            process.kill()
            process.wait()
            said.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin with the first test of the process that will ask for their results."""
    stash = item.config.stash
    if Checks.key not in stash and group(item.path) == group(MODULE) and item.session.items[-1].path == MODULE:
        stash[Checks.key] = Checks()


def pytest_unconfigure(config: pytest.Config) -> None:
    if Checks.key in config.stash:
        config.stash[Checks.key].close()
