"""`dblock leader`: show the leader of an election, or transfer its term."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from dblock.cli import exit_codes
from dblock.cli.context import CommandContext, command
from dblock.cli.durations import waiting_time
from dblock.cli.output import jsonable, printable, to_json
from dblock.errors import DblockError, TransferRefused

if TYPE_CHECKING:
    from dblock.recipes.elections import Election, Leader

POLL_INTERVAL = 0.1


@command("leader")
@click.argument("name")
@click.option("--transfer-to", metavar="CANDIDATE", help="Ask the leader to hand over to this candidate, and wait.")
@click.option(
    "--timeout",
    type=waiting_time,
    default=60.0,
    show_default="1m",
    metavar="TIME",
    help="How long to wait for the hand-over of --transfer-to.",
)
def leader(context: CommandContext, name: str, transfer_to: str | None, timeout: float) -> int:
    """Show the leader of an election: its holder name, its token, since when it leads, and its value.

    The exit code is 0 if there is a leader, and 3 if there is none.
    """
    from dblock.client import Client
    from dblock.recipes.elections.records import PREFIX

    with Client(context.installed_target().conninfo(), schema=context.schema, presence=None) as client:
        election = client.election(name)
        if transfer_to is not None:
            try:
                _transfer(election, transfer_to, timeout)
            except TransferRefused as error:
                if error.why == "absent":
                    waiting = [one.holder for one in client.lock(PREFIX + name).queue()]
                    context.notice(f"candidates that wait: {', '.join(waiting)}" if waiting else "no candidate waits")
                raise
        found = election.leader()
    _show(context, name, found)
    return exit_codes.OK if found is not None else exit_codes.NO_LEADER


def _transfer(election: Election, candidate: str, timeout: float) -> None:
    before = election.leader()
    election.transfer(to=candidate)
    give_up_at = time.monotonic() + timeout
    while True:
        now = election.leader()
        if now is not None and now.holder == candidate and (before is None or now.token > before.token):
            return
        if now is not None and before is not None and now.token > before.token:
            raise TransferRefused(election.name, candidate, "absent")
        if time.monotonic() >= give_up_at:
            raise DblockError(
                f"The leader of election {election.name!r} was asked to hand over to {candidate!r} and has not done so "
                f"within {timeout:g} s. The request stands: look again with dblock leader."
            )
        time.sleep(POLL_INTERVAL)


def _show(context: CommandContext, name: str, found: Leader | None) -> None:
    def render() -> None:
        if found is None:
            click.echo(f"election {printable(name)!r} has no leader", err=True)
            return
        click.echo(f"leader  {printable(found.holder)}")
        click.echo(f"token   {found.token}")
        click.echo(f"since   {printable(found.since)}")
        if found.value is not None:
            click.echo(f"value   {printable(to_json(found.value))}")

    data = {"election": name, "leader": None} if found is None else jsonable(found)
    context.output(data, render)
