"""The `dblock` command.

Each command's module is imported when that command is called, and its dependencies when it runs, so that `dblock ls`
starts quickly. An error is printed as one line on standard error, with an exit code that scripts can rely on
(dblock.cli.exit_codes). A traceback is printed only with --debug.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from dblock.cli import exit_codes
from dblock.cli.context import CommandContext, common_options
from dblock.cli.output import printable, to_json
from dblock.errors import DblockError, LockTimeout, LoginRefused, Unavailable

COMMANDS = {
    "run": "run.command:run",
    "once": "once.command:once",
    "schedules": "once.schedules:schedules",
    "migrate": "migrate.command:migrate",
    "migrations": "migrate.status:migrations",
    "guard": "guard",
    "elect": "elect.command:elect",
    "leader": "elect.leader:leader",
    "barriers": "barriers",
    "ls": "inspect:list_locks",
    "show": "inspect",
    "history": "inspect",
    "waiters": "inspect",
    "graph": "graph.command:graph",
    "watch": "watch.command:watch",
    "serve": "serve",
    "force-release": "force_release:force_release_lock",
    "delete": "delete",
    "install": "admin",
    "uninstall": "admin",
    "status": "admin",
    "doctor": "doctor",
    "certify": "certify.command:certify",
    "grant": "admin",
    "revoke": "admin",
    "reaper": "admin",
    "token": "admin",
    "embedded": "admin",
    "fence": "fence",
    "demo": "demo.command:demo",
    "bench": "bench.command:bench",
    "completion": "completion",
}
"""Each command and its module, with the function's name where that differs from the command's."""


class _LogNotices(logging.Handler):
    """Prints the library's log records as notices, and repeats a warning only after a while."""

    REPEAT_AFTER = 30.0

    def __init__(self, context: CommandContext) -> None:
        super().__init__()
        self._context = context
        self._printed_at: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record, unless the same warning was printed less than REPEAT_AFTER seconds ago."""
        if record.levelno >= logging.WARNING:
            if time.monotonic() < self._printed_at.get(record.msg, -math.inf) + self.REPEAT_AFTER:
                return
            self._printed_at[record.msg] = time.monotonic()
        self._context.notice(record.getMessage())


class _LazyGroup(click.Group):
    """Imports a command's module when the command is looked up."""

    def list_commands(self, click_context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, click_context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].partition(":")
        found: click.Command = getattr(import_module(f"dblock.cli.{module}"), attribute or name)
        return found

    def resolve_command(self, click_context: click.Context, args: list[str]) -> Any:
        if isinstance(click_context.obj, CommandContext):
            click_context.obj.command = args[0]
        try:
            return super().resolve_command(click_context, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"{error.message}{hint}", click_context) from None


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="The database is named by --dsn, $DBLOCK_DSN, a .env file or [tool.dblock] in pyproject.toml, or is the one "
    "that --embedded starts for you. For the exit codes, see docs/reference/cli.md.",
)
@click.version_option(None, "--version", package_name="dblock", message="dblock %(version)s")
@common_options
def dblock() -> None:
    """Locks with fencing tokens, in the Postgres you already run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    context = CommandContext(own_process=arguments is None)
    # The library itself prints nothing; an operator at a terminal should see what it found wrong and repaired.
    handler = _LogNotices(context)
    handler.setLevel(logging.WARNING)
    logging.getLogger("dblock").addHandler(handler)
    # dblock's errors carry the driver's messages, so the driver's own log would repeat them. SQLAlchemy would log the
    # traceback of a Ctrl-C that comes while it closes a connection.
    for library in ("psycopg", "sqlalchemy"):
        logging.getLogger(library).addHandler(logging.NullHandler())
    try:
        code = _invoke(sys.argv[1:] if arguments is None else list(arguments), context)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code if isinstance(code, int) else exit_codes.OK
    except BrokenPipeError:
        # The reader closed the pipe. Writing the rest of the output must not fail at exit.
        _discard_output()
        return exit_codes.OK
    except (KeyboardInterrupt, click.Abort):
        if sys.stderr is not None and sys.stderr.isatty():
            click.echo(err=True)  # after the ^C
        _print_error(context, "interrupted", "Interrupted", exit_codes.INTERRUPTED)
        return exit_codes.INTERRUPTED
    except BaseException as error:
        if isinstance(error, (SystemExit, GeneratorExit)):
            raise
        return _report_failure(context, error)
    finally:
        logging.getLogger("dblock").removeHandler(handler)


def _invoke(arguments: list[str], context: CommandContext) -> Any:
    if "_DBLOCK_COMPLETE" in os.environ:
        return dblock.main(arguments, "dblock", obj=context)
    try:
        with dblock.make_context("dblock", arguments, obj=context) as click_context:
            return dblock.invoke(click_context)
    except click.exceptions.Exit as end:
        return end.exit_code


def _report_failure(context: CommandContext, error: BaseException) -> int:
    """Print the error and return its exit code."""
    if context.debug:
        import traceback

        traceback.print_exception(error)
    run = context.command in ("run", "migrate", "once", "elect")
    if isinstance(error, click.ClickException):
        if run and isinstance(error, click.NoSuchOption) and "--" not in sys.argv:
            line = "migrate" if context.command == "migrate" else f"{context.command} NAME"
            hint = f"If this option belongs to the command, put -- before the command: dblock {line} -- COMMAND…"
            error = click.UsageError(f"{error.format_message()} {hint}", getattr(error, "ctx", None))
        code, message = error.exit_code, error.format_message()
    elif isinstance(error, (DblockError, OSError)):
        code, message = exit_codes.code_of(error), _message(context, error)
    elif isinstance(error, ImportError) and "psycopg" in str(error):
        code, message = exit_codes.NOT_CONFIGURED, _NO_LIBPQ
    else:
        code = exit_codes.BUG
        message = f"unexpected error, a bug: {type(error).__name__}: {error}. Run again with --debug and report it."
    code = exit_codes.under_run(code) if run else code
    if isinstance(error, click.ClickException) and not context.as_json:
        error.show()
    elif not (context.quiet and isinstance(error, LockTimeout)):
        _print_error(context, message, type(error).__name__, code)
    if isinstance(error, OSError):
        _discard_output()
    return code


_NO_LIBPQ = (
    "psycopg finds no libpq on this machine. Install libpq (Debian: apt-get install libpq5), or the extra that brings "
    "it: pip install 'dblock[binary]' (in a checkout: pip install -e '.[binary]')."
)


def _message(context: CommandContext, error: BaseException) -> str:
    if isinstance(error, LockTimeout):
        waited = f" within {error.timeout:g} s" if error.timeout else ""
        return f"lock {printable(error.name)!r} was not acquired{waited}{context.held_by}."
    if isinstance(error, (Unavailable, LoginRefused)) and context.source != "--dsn":
        return f"{error} (The database is named by: {context.source}.)"
    if isinstance(error, OSError) and error.filename is None and error.strerror:
        return f"the output could not be written: {error.strerror}"
    return str(error)


def _print_error(context: CommandContext, message: str, kind: str, code: int) -> None:
    if context.as_json:
        message = to_json({"error": message, "kind": kind, "exit_code": code})
    else:
        one_line = " ".join(line.strip() for line in message.splitlines())  # libpq's messages may have several
        message = printable(f"dblock: {one_line}")
    try:
        click.echo(message, err=True)
    except OSError:
        return  # standard error is closed


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
