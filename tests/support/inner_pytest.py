"""Run pytest on a few files of a user, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

INI = "[pytest]\nfilterwarnings = error\nasyncio_default_fixture_loop_scope = function\n"

PLUGIN = "dblock.testing.plugin"


class Result:
    """How a run of pytest ended."""

    def __init__(self, code: int, output: str) -> None:
        self.code = code
        self.output = output

    def outcome(self, test: str) -> str:
        """Return PASSED, FAILED or ERROR for the test with this name; ERROR also if only its teardown failed."""
        found = [
            line.split()[0] for line in self.output.splitlines() if line.endswith(f"::{test}") or f"::{test} " in line
        ]
        outcomes = [word for word in found if word in ("PASSED", "FAILED", "ERROR")]
        return outcomes[-1] if outcomes else "absent"

    def said_of(self, test: str) -> str:
        """Return the part of the output that tells what went wrong in a test."""
        sections = self.output.split("\n____")
        return next((section for section in sections if f" {test} __" in section.split("\n")[0]), "")


def environment() -> dict[str, str]:
    """Return an environment without what the outer pytest has put there."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "DBLOCK"))}


def command(*arguments: str) -> list[str]:
    """Return the command of a run of pytest that has the plugin."""
    # An environment that was made before the plugin has no entry point for it.
    installed = any(entry.value == PLUGIN for entry in entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", PLUGIN]
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--tb=short", *plugin, *arguments]


def run_pytest(folder: Path, *arguments: str) -> Result:
    """Run the tests in a folder, and return how they ended."""
    if not (folder / "pytest.ini").exists():
        (folder / "pytest.ini").write_text(INI)
    done = subprocess.run(
        command(*arguments), cwd=folder, env=environment(), capture_output=True, text=True, timeout=110
    )
    return Result(done.returncode, done.stdout + done.stderr)
