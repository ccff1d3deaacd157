"""`dblock schedules`: show the schedules, find overdue ones, pause, resume, run now, delete."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from dblock.cli import exit_codes
from dblock.cli.context import CommandContext, command, common_options
from dblock.cli.durations import written
from dblock.cli.output import duration, jsonable, printable, table
from dblock.errors import DblockError

if TYPE_CHECKING:
    from dblock.admin.inspect import ScheduleState

COLUMNS = ("SCHEDULE", "DUE", "LAST RUN", "OUTCOME", "CODE", "TOOK", "HOST", "NEXT", "MISSED", "STATE")
ONLY_IF_WIDE = ("CODE", "TOOK", "HOST")
WIDE = 130
"""Characters in a line from which all columns have room."""


class _Schedules(click.Group):
    """The commands for schedules. A name of a schedule in the place of a command gets a hint."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            hint = f"To see one schedule: dblock schedules --name {shlex.quote(args[0])}"
            raise click.UsageError(f"{error.message} {hint}", ctx) from None


@click.group(
    "schedules",
    cls=_Schedules,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    short_help="Show schedules and what is overdue.",
)
@click.option(
    "--overdue", is_flag=True, help=f"Only overdue schedules. Exit code {exit_codes.DOCTOR_WARNING} if there is one."
)
@click.option("--name", metavar="NAME", help="Only this schedule, with its newest runs and events.")
@click.option("--runs", type=click.IntRange(1, 500), default=10, show_default=True, help="Runs to show with --name.")
@common_options
@click.pass_context
def schedules(click_context: click.Context, overdue: bool, name: str | None, runs: int) -> int | None:
    """Show schedules: their last run, next slot, missed slots and what runs now."""
    if click_context.invoked_subcommand is not None:
        return None
    from dblock.admin.inspect import overview

    context: CommandContext = click_context.find_root().obj
    with overview(context.installed_target(), context.schema) as database:
        found = database.schedules(name, runs=runs)
        events = database.schedule_events(name) if name is not None else []
    if name is not None and not found and not events:
        raise _unknown(name)
    if overdue:
        found = [one for one in found if one.overdue_since is not None]

    def show_events() -> None:
        click.echo("\nevents")
        rows = [[one.at, one.event, one.actor, one.reason and _as_written(one.reason)] for one in events]
        table(["AT", "EVENT", "ACTOR", "REASON"], rows)

    def render() -> None:
        if not found:
            which = "" if name is None else f" named {printable(name)!r}"
            click.echo(f"No schedule{which} is {'overdue' if overdue else 'registered'}.", err=True)
            if events and not overdue:  # of a schedule that was deleted
                show_events()
            return
        # A narrow terminal would break each value over several lines. The runs of --name have what is left out here.
        is_narrow = sys.stdout.isatty() and shutil.get_terminal_size().columns < WIDE
        columns = [column for column in COLUMNS if not (is_narrow and column in ONLY_IF_WIDE)]
        values = [dict(zip(COLUMNS, _row(one), strict=True)) for one in found]
        table(columns, [[row[column] for column in columns] for row in values])
        if name is not None:
            click.echo("\nruns")
            rows = [_run_row(run) for run in found[0].runs]
            table(["SLOT", "SLOTS", "RUN", "OUTCOME", "CODE", "TOOK", "TOKEN", "HOST", "ERROR"], rows)
            show_events()

    data: dict[str, Any] = {"schedules": [jsonable(one) for one in found]}
    if name is not None:
        data["events"] = [jsonable(one) for one in events]
    context.output(data, render)
    return exit_codes.DOCTOR_WARNING if overdue and found else exit_codes.OK


def _row(one: ScheduleState) -> list[object]:
    last = one.last_run or {}
    definition = _as_written(f"{one.kind} {one.definition}") + (f" {one.zone}" if one.zone else "")
    outcome = None if not last else last["outcome"] or "running"
    return [
        one.name,
        definition,
        _moment(last.get("slot")),
        outcome,
        last.get("exit_code"),
        duration(last.get("seconds")),
        last.get("holder"),
        one.next_slot,
        one.missed,
        one.state,
    ]


def _run_row(run: dict[str, Any]) -> list[object]:
    values = [_moment(run["slot"]), run["slots"], run["number"] or None, run["outcome"] or "running", run["exit_code"]]
    took = duration(run["seconds"]) if run["token"] else None
    return [*values, took, run["token"], run["holder"], run["error"]]


def _as_written(definition: str) -> str:
    """Return a definition with its interval as it is written on a command line: `every 1h`, not `every 01:00:00`."""
    found = re.fullmatch(r"(every|delay) (\d+):(\d\d):(\d\d(?:\.\d+)?)", definition)
    if found is None:
        return definition
    kind, hours, minutes, seconds = found.groups()
    return f"{kind} {written(int(hours) * 3600 + int(minutes) * 60 + float(seconds))}"


def _unknown(name: str) -> DblockError:
    return DblockError(f"Schedule {printable(name)!r} is not registered. See: dblock schedules")


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _change(context: CommandContext, action: str, done: str, refused: str, name: str, why: str | None) -> None:
    from dblock.admin.inspect import overview
    from dblock.cli.force_release import actor

    with overview(context.installed_target(), context.schema) as database:
        if not database.change_schedule(action, name, actor=actor(), reason=why):
            if not database.schedules(name, runs=1):
                raise _unknown(name)
            raise DblockError(f"Schedule {printable(name)!r} {refused}; nothing was done.")
    text = f"Schedule {printable(name)!r} {done}."
    context.output({"name": name, "action": action, "why": why}, lambda: click.echo(text))


_WHY = click.option("--why", metavar="TEXT", help="The reason, for the history.")
_NAME = click.argument("name", metavar="NAME")


@command("pause")
@_NAME
@_WHY
def _pause(context: CommandContext, name: str, why: str | None) -> None:
    """Pause a schedule: no slot starts until you resume it. An active run continues."""
    _change(context, "pause", "is paused", "is paused already", name, why)


@command("resume")
@_NAME
@_WHY
def _resume(context: CommandContext, name: str, why: str | None) -> None:
    """Resume a schedule with its next slot."""
    _change(context, "resume", "is resumed with its next slot", "is not paused", name, why)


@command("run")
@_NAME
@_WHY
def _run(context: CommandContext, name: str, why: str | None) -> None:
    """Ask for one run now. The next host that calls the schedule performs it."""
    done = "runs once more, on the next host that calls it"
    _change(context, "run", done, "has such a request already", name, why)


@command("delete")
@_NAME
@_WHY
def _delete(context: CommandContext, name: str, why: str | None) -> None:
    """Delete a schedule that is not used any more, with its ledger."""
    _change(context, "delete", "is deleted", "is not registered", name, why)


for _subcommand in (_pause, _resume, _run, _delete):
    schedules.add_command(_subcommand)
