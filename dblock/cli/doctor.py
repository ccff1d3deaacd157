"""`dblock doctor`: find what will hurt, and say how to mend it."""

from __future__ import annotations

import sys
import textwrap
import threading
from types import TracebackType
from typing import TYPE_CHECKING

import click

from dblock.cli import exits
from dblock.cli.asked import Asked, command
from dblock.cli.output import shown

if TYPE_CHECKING:
    from dblock.doctor import Finding

COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}

PATIENCE = 0.7
"""Seconds after which somebody at a terminal wants to know what takes so long."""


@command(
    "doctor",
    epilog="Exit code 0 when nothing was found, or only notes; 3 for a warning, 4 for an error. Each finding: "
    "docs/doctor.md.",
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
    from dblock.doctor import Limits, examine

    with _Progress(asked) as progress:
        report = examine(
            asked.target(),
            asked.schema,
            fences=fences,
            limits=Limits(snapshot_age, listeners),
            told=progress.say,
        )

    def said() -> None:
        for finding in report.findings:
            _say(finding)
        many, found = len(report.checked), len(report.findings)
        what = f"{found} finding{'s' * (found > 1)}" if found else "nothing found"
        click.echo(f"{many} check{'s' * (many != 1)}, {what}.")

    asked.answer(report, said)
    return {"error": exits.ERRORS, "warning": exits.WARNINGS}.get(report.worst or "", exits.DONE)


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


class _Progress:
    """Tells what is looked at, to somebody at a terminal, if it takes long."""

    def __init__(self, asked: Asked) -> None:
        self._wanted = not asked.as_json and sys.stderr is not None and sys.stderr.isatty()
        self._check = "connecting"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def say(self, check: str) -> None:
        """Take note of what is looked at."""
        self._check = check

    def _show(self) -> None:
        shows, waits = False, PATIENCE
        while not self._over.wait(waits):
            click.echo(f"\r\x1b[KLooking: {self._check}…", err=True, nl=False)
            shows, waits = True, 0.1
        if shows:
            click.echo("\r\x1b[K", err=True, nl=False)

    def __enter__(self) -> _Progress:
        if self._wanted:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._wanted:
            self._thread.join()
