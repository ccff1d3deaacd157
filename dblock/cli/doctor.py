"""`dblock doctor`: find what will hurt, and say how to mend it."""

from __future__ import annotations

import sys
import textwrap
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from dblock.cli import exit_codes
from dblock.cli.context import Asked, command
from dblock.cli.output import shown

if TYPE_CHECKING:
    from dblock.admin.doctor import Finding, Report

COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}

PATIENCE = 0.7
"""Seconds after which somebody at a terminal wants to know what takes so long."""

TICK = 0.1


@command(
    "doctor",
    epilog="Exit code 0 when nothing was found, or only notes; 3 for a warning, 4 for an error. Each finding: "
    "docs/reference/doctor.md.",
)
@click.option(
    "--snapshot-age",
    type=click.FloatRange(min=0),
    default=300,
    show_default=True,
    metavar="S",
    help="Seconds after which an open transaction is too old.",
)
@click.option(
    "--listeners",
    type=click.IntRange(min=0),
    default=300,
    show_default=True,
    metavar="N",
    help="How many sessions may listen.",
)
@click.option(
    "--fences",
    default="fenced_store",
    show_default=True,
    metavar="SCHEMA",
    help="The schema that fenced_store lives in, if it does.",
)
def doctor(asked: Asked, snapshot_age: float, listeners: int, fences: str) -> int:
    """Find what will hurt, and say how to mend it; changes nothing."""
    from dblock.admin.doctor import Limits, examine

    target, name, limits = asked.target(), asked.schema, Limits(snapshot_age, listeners)
    report = _Work(
        lambda told: examine(target, name, fences=fences, limits=limits, told=told),
        tells=not asked.as_json and sys.stderr is not None and sys.stderr.isatty(),
    ).done()

    def said() -> None:
        for finding in report.findings:
            _say(finding)
        many, found = len(report.checked), len(report.findings)
        what = f"{found} finding{'s' * (found > 1)}" if found else "nothing found"
        click.echo(f"{many} check{'s' * (many != 1)}, {what}.")

    asked.answer(report, said)
    return {"error": exit_codes.ERRORS, "warning": exit_codes.WARNINGS}.get(report.worst or "", exit_codes.DONE)


def _say(finding: Finding) -> None:
    click.echo(f"{click.style(finding.level, fg=COLOURS[finding.level], bold=True)}  {finding.id}")
    for word, text in (("", finding.what), ("why   ", finding.why)):
        for line in _wrapped(shown(text), word):
            click.echo(line)
    # Whole, so that it can be copied.
    click.echo(f"  mend  {click.style(shown(finding.command), bold=True)}\n")


def _wrapped(text: str, word: str) -> list[str]:
    """Return lines that fit the terminal; elsewhere one."""
    if not sys.stdout.isatty():
        return [f"  {word}{text}"]
    import shutil

    width = max(40, min(shutil.get_terminal_size().columns, 120))
    return textwrap.wrap(text, width, initial_indent=f"  {word}", subsequent_indent="  " + " " * len(word))


class _Work:
    """The examination, in a thread of its own, so that Ctrl-C need not wait for a database that does not answer.

    Somebody at a terminal is told what is looked at, if it takes long.
    """

    def __init__(self, examine: Callable[[Callable[[str], None]], Report], tells: bool) -> None:
        self._examine = examine
        self._tells = tells
        self._check = "the way to the database"
        self._over = threading.Event()
        self._report: Report | None = None
        self._error: BaseException | None = None

    def done(self) -> Report:
        """Do it, and return what was found."""
        threading.Thread(target=self._work, daemon=True).start()
        shows = False
        try:
            while not self._over.wait(TICK if shows else PATIENCE):
                if self._tells:
                    click.echo(f"\r\x1b[KLooking at {self._check}…", err=True, nl=False)
                shows = True
        finally:
            if shows and self._tells:
                click.echo("\r\x1b[K", err=True, nl=False)
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def _work(self) -> None:
        try:
            self._report = self._examine(self._say)
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def _say(self, check: str) -> None:
        self._check = check
