"""`dblock barriers`: show barriers and latches with what is missing, and delete them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dblock.cli.context import CommandContext, command, common_options
from dblock.cli.output import jsonable, printable, table
from dblock.errors import DblockError

if TYPE_CHECKING:
    from dblock.admin.inspect import BarrierState


@click.group(
    "barriers",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    short_help="Show barriers and latches.",
)
@common_options
@click.pass_context
def barriers(click_context: click.Context) -> None:
    """Show barriers and latches: what is missing, and who waits."""
    if click_context.invoked_subcommand is not None:
        return
    from dblock.admin.inspect import overview

    context: CommandContext = click_context.find_root().obj
    with overview(context.installed_target(), context.schema) as database:
        found = database.barriers()

    def render() -> None:
        if found:
            table(["NAME", "KIND", "OF", "MISSING", "TRIPS", "WAITING", "LAST USED"], [_row(one) for one in found])
        else:
            click.echo("There is no barrier and no latch.", err=True)

    context.output({"barriers": [jsonable(one) for one in found]}, render)


def _row(one: BarrierState) -> list[object]:
    waiting = ", ".join(waiter["holder"] for waiter in one.waiters) or None
    missing = one.remaining if one.kind == "barrier" or one.remaining else "open"
    return [one.name, one.kind, one.size, missing, one.generation, waiting, one.used_at]


@command("delete")
@click.argument("kind", type=click.Choice(["barrier", "latch"]))
@click.argument("name", metavar="NAME")
def _delete(context: CommandContext, kind: str, name: str) -> None:
    """Delete a barrier or a latch, to give it another number. Clients that still wait create it again."""
    from dblock.admin.inspect import overview

    with overview(context.installed_target(), context.schema) as database:
        waiting = sum(len(one.waiters) for one in database.barriers() if (one.kind, one.name) == (kind, name))
        if not database.delete_barrier(kind, name):
            raise DblockError(f"There is no {kind} {printable(name)!r}. See: dblock barriers")
    text = f"{kind.capitalize()} {printable(name)!r} is deleted."
    if waiting:
        text += f" Clients that still wait create it again: {waiting} of them waited."
    context.output({"kind": kind, "name": name, "action": "delete"}, lambda: click.echo(text))


barriers.add_command(_delete)
