"""Keep the passwords of --dsn and --listen-dsn out of `ps`.

Every user of a machine can read the arguments of every process, and those of `dblock run` and `dblock migrate` stay for
as long as their command runs. The environment of a process can be read only by its own user. So these commands replace
themselves by a process with the same ID, without these options and with their values in its environment. That process
removes them from there before it starts the command.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from dblock.cli.context import CommandContext

VARIABLES = {"--dsn": "_DBLOCK_RUN_DSN", "--listen-dsn": "_DBLOCK_RUN_LISTEN_DSN"}
"""Each option that may have a password, and the environment variable that carries its value."""


def hide_passwords(context: CommandContext, listen_dsn: str | None) -> str | None:
    """Replace this process by one that has no password in its arguments, and warn there; return the listen_dsn."""
    moved = {option: os.environ.pop(variable, None) for option, variable in VARIABLES.items()}
    context.dsn = moved["--dsn"] or context.dsn
    listen_dsn = moved["--listen-dsn"] or listen_dsn
    visible = {
        option: dsn
        for option, dsn in (("--dsn", context.dsn), ("--listen-dsn", listen_dsn))
        if dsn is not None and has_password(dsn)
    }
    if visible and not any(moved.values()) and context.own_process and sys.executable:
        arguments = list(sys.orig_argv)
        for option, dsn in visible.items():
            arguments = without(arguments, option, dsn)
        if len(arguments) < len(sys.orig_argv):
            environment = os.environ | {VARIABLES[option]: dsn for option, dsn in visible.items()}
            os.execve(sys.executable, arguments, environment)  # noqa: S606  (this very program)
    if visible and not context.quiet:
        context.notice(
            f"the password in {' and '.join(visible)} was visible to every user of this machine when dblock started. "
            f"Keep the password in ~/.pgpass{', or set DBLOCK_DSN instead of --dsn' if '--dsn' in visible else ''}."
        )
    return listen_dsn


def has_password(dsn: str) -> bool:
    """Return whether a DSN seems to contain a password."""
    return re.search(r"password\s*=|://[^/@]*:[^/]*@", dsn) is not None


def without(arguments: Sequence[str], option: str, value: str) -> list[str]:
    """Return the arguments without the first `option value` or `option=value`."""
    for number, one in enumerate(arguments):
        if one == f"{option}={value}":
            return [*arguments[:number], *arguments[number + 1 :]]
        if [one, *arguments[number + 1 : number + 2]] == [option, value]:
            return [*arguments[:number], *arguments[number + 2 :]]
    return list(arguments)
