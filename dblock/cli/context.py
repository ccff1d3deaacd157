"""The options that every command shares, and the ways to report its result.

Every command takes --dsn, --embedded, --schema, --json and --debug, before or after the command's name.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dblock.cli.config import Database, Sources
from dblock.cli.output import print_json, printable, to_json

if TYPE_CHECKING:
    from dblock._runtime.target import Target
    from dblock.embedded import Server

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class CommandContext:
    """The values of the shared options for one command."""

    dsn: str | None = None
    schema_option: str | None = None
    embedded: bool = False
    as_json: bool = False
    debug: bool = False
    quiet: bool = False
    else_embedded: bool = False
    """Whether the embedded Postgres is used if no database is named."""
    own_process: bool = False
    """Whether the command has this process to itself."""
    command: str | None = None
    """The name of the command."""
    held_by: str = ""
    """What is known of the holder of a lock that was not acquired."""
    sources: Sources = field(default_factory=Sources)

    @property
    def schema(self) -> str:
        """The name of dblock's schema."""
        return self.sources.schema(self.schema_option)

    @cached_property
    def database(self) -> Database:
        """The database to use, and its source."""
        if self.embedded and self.dsn is not None:
            raise click.UsageError("--dsn names a database, and --embedded chooses the embedded one. Use only one.")
        return self.sources.database(self.dsn, self.embedded, self.else_embedded)

    @property
    def source(self) -> str:
        """The source that named the database."""
        return self.database.source

    def resolve_target(self) -> Target:
        """Return the database to use. An embedded server may not be running yet."""
        from dblock._runtime.target import resolve
        from dblock.errors import ConfigurationError, InvalidArgument

        dsn, source = self.database
        try:
            return resolve(dsn, embedded=dsn is None)
        except InvalidArgument as error:
            if source == "--dsn":
                raise
            raise ConfigurationError(f"{error} (The database is named by: {source}.)") from None

    def target(self) -> Target:
        """Return the database to use, after starting it if it is an embedded server that is not running."""
        target = self.resolve_target()
        for ignored in self.sources.ignored:
            self.notice(f"{ignored}.")
        if target.embedded:
            start_embedded(None if self.quiet else self.notice)
        return target

    def installed_target(self) -> Target:
        """Return the database to use, started; install the schema if the server is embedded.

        A client does the same: an embedded server has no operator who would run `dblock install`.
        """
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

    def notice(self, message: str) -> None:
        """Print a message beside the result, on standard error."""
        text = to_json({"notice": message}) if self.as_json else printable(f"dblock: {' '.join(message.splitlines())}")
        with contextlib.suppress(OSError):  # standard error is closed
            click.echo(text, err=True)

    def failure(self, message: str, kind: str, exit_code: int) -> None:
        """Print, on standard error, why the command is about to end with this exit code."""
        if self.as_json:
            with contextlib.suppress(OSError):
                click.echo(to_json({"error": message, "kind": kind, "exit_code": exit_code}), err=True)
        else:
            self.notice(message)

    def output(self, data: Any, render: Callable[[], object]) -> None:
        """Print the result: the data as JSON if --json was given, otherwise whatever `render` prints."""
        if self.as_json:
            print_json(data)
        else:
            render()


def start_embedded(say: Callable[[str], None] | None) -> Server:
    """Return the embedded server, after starting it if it is not running; say which server it is."""
    from dblock import embedded

    running = embedded.status()
    if say is not None:
        say(f"embedded Postgres in {embedded.default_folder()}{'' if running else ', starting it'}")
    return running or embedded.start()


def _store_option(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def store(click_context: click.Context, parameter: click.Parameter, value: Any) -> None:
        # The option may stand before the command's name or after it; the last one counts.
        if value is not None and value is not False:
            setattr(click_context.find_root().obj, name, value)

    return store


def _complete_locks(click_context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return lock names that complete the argument; none if the database cannot be asked."""
    from dblock.admin.inspect import overview
    from dblock.errors import DblockError

    context = click_context.find_root().obj or CommandContext()
    context.dsn, context.schema_option = click_context.params.get("dsn"), click_context.params.get("schema")
    context.embedded = bool(click_context.params.get("embedded"))
    try:
        target = context.resolve_target()
        if target.embedded and not _embedded_is_running():
            return []
        with overview(target, context.schema) as database:
            names = [lock.name for lock in database.locks(f"{incomplete}*", include_free=True, limit=50)]
            return [name for name in names if name.isprintable()]  # a shell would split the others
    except (DblockError, OSError, ImportError, click.UsageError):
        return []


def _embedded_is_running() -> bool:
    from dblock import embedded

    return embedded.status() is not None


def common_options(function: Function) -> Function:
    """Add the shared options to a command and store their values in its CommandContext."""
    options = [
        click.option(
            "--dsn",
            metavar="DSN",
            expose_value=False,
            callback=_store_option("dsn"),
            help="Database to use: a URL or libpq keywords. Default: $DBLOCK_DSN, .env, [tool.dblock].",
        ),
        click.option(
            "--embedded",
            is_flag=True,
            expose_value=False,
            callback=_store_option("embedded"),
            help="Use the embedded Postgres of your user on this machine. Default: $DBLOCK_EMBEDDED.",
        ),
        click.option(
            "--schema",
            metavar="NAME",
            expose_value=False,
            callback=_store_option("schema_option"),
            help="Name of dblock's schema (default: dblock).",
        ),
        *output_options(),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def output_options() -> list[Callable[[Function], Function]]:
    """Return the options --json and --debug."""
    return [
        click.option(
            "--json",
            is_flag=True,
            expose_value=False,
            callback=_store_option("as_json"),
            help="Print JSON, for scripts.",
        ),
        click.option(
            "--debug",
            is_flag=True,
            expose_value=False,
            callback=_store_option("debug"),
            help="Print a traceback for errors.",
        ),
    ]


def command(name: str, *, epilog: str | None = None) -> Callable[[Callable[..., Any]], click.Command]:
    """Turn a function whose first argument is a CommandContext into a command."""

    def make(function: Callable[..., Any]) -> click.Command:
        with_context = click.pass_obj(function)
        # The list of commands shows the docstring's first clause.
        short = re.split("[;:,.]", (function.__doc__ or "").strip(), maxsplit=1)[0] + "."
        settings = {"help_option_names": ["-h", "--help"]}
        decorate = click.command(name, epilog=epilog, short_help=short, context_settings=settings)
        return decorate(common_options(with_context))

    return make


lock_name = click.argument("name", metavar="NAME", shell_complete=_complete_locks)
"""The argument that names a lock."""


def confirm(context: CommandContext, yes: bool, question: str) -> None:
    """Return if --yes was given or the user confirms at a terminal; otherwise raise."""
    from dblock.errors import DblockError

    if yes:
        return
    if context.as_json or not (sys.stdin is not None and sys.stdin.isatty()):
        raise DblockError("There is no terminal to confirm at. Add --yes to go ahead.")
    if not click.confirm(question, err=True):
        raise DblockError("Not confirmed; nothing was done.")
