"""`dblock doctor`: find what will cause trouble, and say how to fix it."""

from __future__ import annotations

import sys
import textwrap
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from dblock.cli import exit_codes
from dblock.cli.context import CommandContext, command
from dblock.cli.output import printable

if TYPE_CHECKING:
    from dblock.admin.doctor import Finding, Report

COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}

SHOW_PROGRESS_AFTER = 0.7
"""Seconds after which the running check is shown at a terminal."""

TICK = 0.1


@command(
    "doctor",
    epilog="Exit code: 0 for no findings or only notes, 3 for a warning, 4 for an error. All findings are explained in "
    "docs/reference/doctor.md.",
)
@click.option(
    "--snapshot-age",
    type=click.FloatRange(min=0),
    default=300,
    show_default=True,
    metavar="S",
    help="Age in seconds from which an open transaction is reported.",
)
@click.option(
    "--listeners",
    type=click.IntRange(min=0),
    default=300,
    show_default=True,
    metavar="N",
    help="Number of listening sessions above which a warning is reported.",
)
@click.option(
    "--fences",
    default="fenced_store",
    show_default=True,
    metavar="SCHEMA",
    help="Name of fenced_store's schema, if it is installed.",
)
@click.option(
    "--accept",
    multiple=True,
    metavar="CHECK",
    help="Show the findings of this check, but do not count them in the exit code; repeat for several. "
    "Default: $DBLOCK_ACCEPT, .env, [tool.dblock], separated by commas.",
)
def doctor(context: CommandContext, snapshot_age: float, listeners: int, fences: str, accept: tuple[str, ...]) -> int:
    """Find what will cause trouble, and how to fix it; changes nothing."""
    from dblock.admin.doctor import Limits, examine

    target, name, limits = context.target(), context.schema, Limits(snapshot_age, listeners)
    accepted = _accepted(context, accept)
    report = _BackgroundExamination(
        lambda on_check: examine(target, name, fences=fences, limits=limits, accept=accepted, on_check=on_check),
        shows_progress=not context.as_json and sys.stderr is not None and sys.stderr.isatty(),
    ).wait()

    def render() -> None:
        for finding in report.findings:
            _print_finding(finding)
        checks, found = len(report.checked), len(report.findings)
        findings = f"{found} finding{'s' * (found > 1)}" if found else "no findings"
        if known := sum(finding.accepted for finding in report.findings):
            findings += f" ({known} accepted)"
        click.echo(f"{checks} check{'s' * (checks != 1)}, {findings}.")

    context.output(report, render)
    codes = {"error": exit_codes.DOCTOR_ERROR, "warning": exit_codes.DOCTOR_WARNING}
    return codes.get(report.worst or "", exit_codes.OK)


def _accepted(context: CommandContext, given: tuple[str, ...]) -> list[str]:
    """Return the IDs of the accepted checks: those of the options and those of the setting."""
    configured = context.sources.setting("accept").value or ""
    return [*given, *(one.strip() for one in configured.split(",") if one.strip())]


def _print_finding(finding: Finding) -> None:
    accepted = "  (accepted)" if finding.accepted else ""
    click.echo(f"{click.style(finding.level, fg=COLOURS[finding.level], bold=True)}  {finding.id}{accepted}")
    for label, text in (("", finding.what), ("why  ", finding.why)):
        for line in _wrapped(printable(text), label):
            click.echo(line)
    # On one line, so that it can be copied.
    click.echo(f"  fix  {click.style(printable(finding.command), bold=True)}\n")


def _wrapped(text: str, label: str) -> list[str]:
    """Return the labelled text as lines that fit the terminal, or as one line elsewhere."""
    if not sys.stdout.isatty():
        return [f"  {label}{text}"]
    import shutil

    width = max(40, min(shutil.get_terminal_size().columns, 120))
    return textwrap.wrap(text, width, initial_indent=f"  {label}", subsequent_indent="  " + " " * len(label))


class _BackgroundExamination:
    """Runs the examination in a thread, so that Ctrl-C need not wait for a database that does not reply.

    At a terminal it shows the running check, if the examination takes long.
    """

    def __init__(self, examine: Callable[[Callable[[str], None]], Report], shows_progress: bool) -> None:
        self._examine = examine
        self._shows_progress = shows_progress
        self._check = "the connection"
        self._over = threading.Event()
        self._report: Report | None = None
        self._error: BaseException | None = None

    def wait(self) -> Report:
        """Run the examination to its end and return its report."""
        threading.Thread(target=self._run, daemon=True).start()
        shown = False
        try:
            while not self._over.wait(TICK if shown else SHOW_PROGRESS_AFTER):
                if self._shows_progress:
                    click.echo(f"\r\x1b[KChecking {self._check}…", err=True, nl=False)
                shown = True
        finally:
            if shown and self._shows_progress:
                click.echo("\r\x1b[K", err=True, nl=False)
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def _run(self) -> None:
        try:
            self._report = self._examine(self._set_check)
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def _set_check(self, check: str) -> None:
        self._check = check
