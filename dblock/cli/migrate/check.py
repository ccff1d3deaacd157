"""`dblock migrate --check`: a command that tells whether there is anything to do."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable

import click

from dblock._core import clock
from dblock.cli.run.supervisor import StartFailed

TICK = 0.05
"""Seconds between two looks at the deadline."""


class CheckNotStarted(StartFailed):
    """The check could not be started."""

    def __init__(self, program: str, number: int, why: str) -> None:
        super().__init__(number, why)
        self.program = program


class Check:
    """A command whose exit code 0 means that the migration is done. It runs without a shell."""

    def __init__(self, line: str) -> None:
        try:
            self._command = shlex.split(line)
        except ValueError as error:
            raise click.UsageError(f"--check cannot be read as a command: {error}.") from None
        if not self._command:
            raise click.UsageError(
                "--check is empty. Give a command whose exit code 0 means that there is nothing to do."
            )

    def passes(self, environment: dict[str, str], may_run: Callable[[], bool]) -> bool:
        """Run the check to its end and return whether it says `done`. It is killed when it may not run any longer.

        Its standard output is discarded, because that of `dblock migrate` belongs to the migrator.
        """
        try:
            process = subprocess.Popen(
                self._command,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                close_fds=False,
            )
        except OSError as error:
            raise CheckNotStarted(self._command[0], error.errno or 0, str(error)) from None
        try:
            while may_run():
                try:
                    return process.wait(TICK) == 0
                except subprocess.TimeoutExpired:
                    continue
            return False
        finally:
            process.kill()
            process.wait()


def until(timeout: float | None) -> Callable[[], bool]:
    """Return a condition that holds until the timeout has passed."""
    deadline = None if timeout is None else clock.now() + timeout
    return lambda: deadline is None or clock.now() < deadline
