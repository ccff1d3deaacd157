"""`dblock guard`: refuse DDL outside a migration that holds the lock."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from dblock.cli.context import CommandContext, command, common_options
from dblock.cli.migrate.command import DEFAULT_NAME
from dblock.cli.output import table

if TYPE_CHECKING:
    from dblock.admin.guard import Guard


@click.group("guard", context_settings={"help_option_names": ["-h", "--help"]})
@common_options
def guard() -> None:
    """Refuse DDL outside a migration that holds the lock."""


@command("install")
@click.argument("schemas", metavar="SCHEMA…", nargs=-1, required=True)
@click.option(
    "--name",
    "names",
    multiple=True,
    default=[DEFAULT_NAME],
    show_default=True,
    metavar="N",
    help="A migration that may change these schemas: the name of its lock. Repeat it for several.",
)
@click.option("--trust-owner", is_flag=True, help="Guard although another role owns dblock's schema.")
@click.option("--sql", is_flag=True, help="Print the statements instead of running them.")
def _install(
    context: CommandContext, schemas: tuple[str, ...], names: tuple[str, ...], trust_owner: bool, sql: bool
) -> None:
    """Guard schemas of your application: only these migrations may change them.

    The first guard of a database needs a superuser, or a role that may create event triggers. The names replace those
    that a schema had.
    """
    from dblock.admin import guard as guards

    if sql:
        statements = guards.statements(schemas, names, context.schema)
        context.output({"sql": statements}, lambda: click.echo(statements))
        return
    made = guards.install(context.installed_target(), schemas, names, context.schema, trust_owner=trust_owner)
    context.output([asdict(one) for one in made if one.schema in schemas], lambda: _print(made))


@command("list")
def _list(context: CommandContext) -> None:
    """List the guarded schemas and the migrations that may change them."""
    from dblock.admin import guard as guards

    found = guards.list_all(context.installed_target(), context.schema)

    def render() -> None:
        if found:
            _print(found)
        else:
            click.echo("No schema is guarded. To guard one: dblock guard install SCHEMA")

    context.output([asdict(one) for one in found], render)


@command("remove")
@click.argument("schemas", metavar="[SCHEMA…]", nargs=-1)
def _remove(context: CommandContext, schemas: tuple[str, ...]) -> None:
    """Remove the guards of these schemas, or all."""
    from dblock.admin import guard as guards

    kept = guards.remove(context.installed_target(), schemas, context.schema)

    def render() -> None:
        which = f"schema {', '.join(map(repr, schemas))}" if schemas else "all schemas"
        click.echo(f"Removed the guard of {which}.")
        if kept:
            drops = " ".join(f"DROP EVENT TRIGGER {name};" for name in kept)
            click.echo(f"Its event triggers belong to another role. They refuse nothing. As that role run: {drops}")

    context.output({"schemas": list(schemas), "left": kept}, render)


def _print(guards: list[Guard]) -> None:
    active = {True: "yes", False: "NO: its event triggers are missing or disabled"}
    rows = [[one.schema, ", ".join(one.names), active[one.active]] for one in guards]
    table(["SCHEMA", "MIGRATIONS", "ACTIVE"], rows)


for _command in (_install, _list, _remove):
    guard.add_command(_command)
