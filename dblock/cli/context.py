"""What a command was asked for, beyond what is its own: which database, and how to answer.

Every command takes the same four options, before or after its own name: --dsn, --schema, --json, --debug.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dblock.cli.config import setting
from dblock.cli.output import as_json, print_json, shown

if TYPE_CHECKING:
    from dblock._runtime.target import Target
    from dblock.embedded import Server

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class Asked:
    """The options that every command takes."""

    dsn: str | None = None
    schema_given: str | None = None
    as_json: bool = False
    debug: bool = False

    @property
    def schema(self) -> str:
        """The schema that dblock lives in."""
        return setting("schema", self.schema_given).value or ""

    def unstarted(self) -> Target:
        """Return the database that is meant; an embedded one may not run yet."""
        from dblock._runtime.target import resolve

        return resolve(setting("dsn", self.dsn).value)

    def target(self) -> Target:
        """Return the database that is meant, an embedded one started if need be."""
        target = self.unstarted()
        if target.embedded:
            start_embedded()
        return target

    def installed(self) -> Target:
        """Return the same, and install the schema in an embedded one, as a client does: nobody else would."""
        target = self.target()
        if target.embedded:
            from dblock._runtime.runner import Runner
            from dblock.admin.schema import install

            runner = Runner(target, self.schema, 1, 5.0)
            try:
                runner.open(install)
            finally:
                runner.close()
        return target

    @property
    def source(self) -> str:
        """Where it was said which database is meant."""
        found = setting("dsn", self.dsn)
        return found.source if found.value is not None else "embedded"

    def remark(self, said: str) -> None:
        """Say something beside the answer, on standard error."""
        text = as_json({"remark": said}) if self.as_json else shown(f"dblock: {' '.join(said.splitlines())}")
        with contextlib.suppress(OSError):  # nobody is there to be told
            click.echo(text, err=True)

    def answer(self, facts: Any, said: Callable[[], object]) -> None:
        """Answer with the facts as JSON, or in words."""
        if self.as_json:
            print_json(facts)
        else:
            said()


def start_embedded() -> Server:
    """Return the embedded server, started if need be."""
    from dblock import embedded

    running = embedded.status()
    if running:
        return running
    click.echo("Starting the embedded Postgres…", err=True)
    return embedded.start()


def _keep(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        # Given before the command's name or after it; what comes last counts.
        if value is not None and value is not False:
            setattr(context.find_root().obj, name, value)

    return keep


def _complete_locks(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Offer the names of locks; nothing where that takes long or cannot be had."""
    from dblock.admin.inspect import overview
    from dblock.errors import DblockError

    asked = context.find_root().obj or Asked()
    asked.dsn, asked.schema_given = context.params.get("dsn"), context.params.get("schema")
    try:
        target = asked.unstarted()
        if target.embedded and not _runs():
            return []
        with overview(target, asked.schema) as found:
            names = [lock.name for lock in found.locks(f"{incomplete}*", include_free=True, limit=50)]
            return [name for name in names if name.isprintable()]  # a shell would take others for several
    except (DblockError, OSError):
        return []


def _runs() -> bool:
    from dblock import embedded

    return embedded.status() is not None


def common(function: Function) -> Function:
    """Add the options that every command takes, and hand over what they say."""
    options = [
        click.option(
            "--dsn",
            metavar="DSN",
            expose_value=False,
            callback=_keep("dsn"),
            help="The database: a URL or libpq keywords. Otherwise $DBLOCK_DSN, .env, [tool.dblock]; else embedded.",
        ),
        click.option(
            "--schema",
            metavar="NAME",
            expose_value=False,
            callback=_keep("schema_given"),
            help="The schema that dblock lives in (default: dblock).",
        ),
        *answering(),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def answering() -> list[Callable[[Function], Function]]:
    """Return the options on how to answer."""
    return [
        click.option(
            "--json", is_flag=True, expose_value=False, callback=_keep("as_json"), help="Answer in JSON, for scripts."
        ),
        click.option(
            "--debug",
            is_flag=True,
            expose_value=False,
            callback=_keep("debug"),
            help="Show where in the code an error comes from.",
        ),
    ]


def command(name: str, *, epilog: str | None = None) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command of a function whose first argument is what was asked for."""

    def make(function: Callable[..., Any]) -> click.Command:
        handed = click.pass_obj(function)
        # In the list of commands: what comes before the details.
        short = re.split("[;:,.]", (function.__doc__ or "").strip(), maxsplit=1)[0] + "."
        settings = {"help_option_names": ["-h", "--help"]}
        return click.command(name, epilog=epilog, short_help=short, context_settings=settings)(common(handed))

    return make


lock_name = click.argument("name", metavar="NAME", shell_complete=_complete_locks)
"""The argument that names a lock."""


def confirmed(asked: Asked, yes: bool, question: str) -> None:
    """Go on only if somebody says so, by the option or at a terminal."""
    from dblock.errors import DblockError

    if yes:
        return
    if asked.as_json or not (sys.stdin is not None and sys.stdin.isatty()):
        raise DblockError("Nobody is there to confirm. Add --yes to go ahead.")
    if not click.confirm(question, err=True):
        raise DblockError("Not confirmed; nothing was done.")
