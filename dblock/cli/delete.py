"""`dblock delete`: delete a lock that is not in use."""

from __future__ import annotations

import click

from dblock.cli.context import CommandContext, command, lock_name
from dblock.cli.output import printable
from dblock.errors import DblockError


@command("delete")
@lock_name
def delete(context: CommandContext, name: str) -> None:
    """Delete a lock that is neither held nor waited for.

    Afterwards the name can have another kind. Tokens still rise: the next grant has a higher token than all before.
    """
    from dblock.admin.inspect import overview

    with overview(context.installed_target(), context.schema) as database:
        if not database.delete_lock(name):
            found = database.locks(name=name, include_free=True)
            why = "in use: it is held or waited for, or a transaction has locked it" if found else "not there"
            raise DblockError(f"Lock {printable(name)!r} is {why}; nothing was deleted.")
    context.output({"name": name, "deleted": True}, lambda: click.echo(f"Deleted lock {printable(name)!r}."))
