"""The `dblock` command.

A command's module is imported when that command is asked for, and what it needs when it runs, so that `dblock ls` is
quick. What goes wrong is said in one line on standard error, with an exit code that scripts can rely on
(dblock.cli.exit_codes); a traceback only with --debug.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from dblock.cli import exit_codes
from dblock.cli.context import Asked, common
from dblock.cli.output import as_json, shown
from dblock.errors import DblockError, LeaseLost, LockTimeout, Unavailable

COMMANDS = {
    "run": "run.command:run",
    "ls": "inspect:list_locks",
    "show": "inspect",
    "history": "inspect",
    "waiters": "inspect",
    "graph": "graph.command:graph",
    "watch": "watch.command:watch",
    "break": "force_release:break_lock",
    "install": "admin",
    "uninstall": "admin",
    "status": "admin",
    "doctor": "doctor",
    "grant": "admin",
    "reaper": "admin",
    "token": "admin",
    "embedded": "admin",
    "fence": "fence",
    "demo": "demo.command:demo",
    "bench": "bench.command:bench",
    "completion": "completion",
}
"""Each command, and where it is: the module, and the name in it where that is another."""


class _Remarks(logging.Handler):
    """Says what the library logs; the same thing not again and again."""

    AGAIN = 30.0

    def __init__(self, asked: Asked) -> None:
        super().__init__()
        self._asked = asked
        self._said: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Say it, unless the same was said a moment ago."""
        if record.levelno >= logging.WARNING:
            if time.monotonic() < self._said.get(record.msg, -math.inf) + self.AGAIN:
                return
            self._said[record.msg] = time.monotonic()
        self._asked.remark(record.getMessage())


class _Commands(click.Group):
    """Finds a command's module when it is asked for."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].partition(":")
        found: click.Command = getattr(import_module(f"dblock.cli.{module}"), attribute or name)
        return found

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(context, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"{error.message}{hint}", context) from None


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Without --dsn, $DBLOCK_DSN, a .env or [tool.dblock], the embedded Postgres of this user is used, and "
    "started if need be. Exit codes: docs/reference/cli.md.",
)
@click.version_option(None, "--version", package_name="dblock", message="dblock %(version)s")
@common
def dblock() -> None:
    """Locks with fencing tokens, in the Postgres you already run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    asked = Asked()
    # The library is quiet; a person at a terminal wants to know what was found amiss and put right.
    handler = _Remarks(asked)
    handler.setLevel(logging.WARNING)
    logging.getLogger("dblock").addHandler(handler)
    # What the driver has to say reaches people by our errors, and not beside them.
    logging.getLogger("psycopg").addHandler(logging.NullHandler())
    try:
        code = _invoke(sys.argv[1:] if arguments is None else list(arguments), asked)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code if isinstance(code, int) else exit_codes.DONE
    except BrokenPipeError:
        # Whoever read our output has had enough of it; what is left of it must not be an error at exit.
        _discard_output()
        return exit_codes.DONE
    except (KeyboardInterrupt, click.Abort):
        if sys.stderr is not None and sys.stderr.isatty():
            click.echo(err=True)  # after the ^C
        _complain(asked, "interrupted", "Interrupted", exit_codes.INTERRUPTED)
        return exit_codes.INTERRUPTED
    except BaseException as error:
        if isinstance(error, (SystemExit, GeneratorExit)):
            raise
        return _failed(asked, error)
    finally:
        logging.getLogger("dblock").removeHandler(handler)


def _invoke(arguments: list[str], asked: Asked) -> Any:
    if "_DBLOCK_COMPLETE" in os.environ:
        return dblock.main(arguments, "dblock", obj=asked)
    try:
        with dblock.make_context("dblock", arguments, obj=asked) as context:
            return dblock.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code


def _failed(asked: Asked, error: BaseException) -> int:
    """Say what went wrong, and return the exit code for it."""
    if asked.debug:
        import traceback

        traceback.print_exception(error)
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        if context is not None and context.command.name == "run" and "--" not in sys.argv:
            hint = "Is it the command's own? Then put -- before that: dblock run NAME -- COMMAND…"
            error = click.UsageError(f"{error.format_message()} {hint}", context)
        if not asked.as_json:
            error.show()
            return error.exit_code
        code, said = error.exit_code, error.format_message()
    elif isinstance(error, (DblockError, OSError)):
        code, said = _code(error), _said(asked, error)
    else:
        code = exit_codes.BUG
        said = f"this should not happen: {type(error).__name__}: {error}. Run it again with --debug, and report it."
    _complain(asked, said, type(error).__name__, code)
    if isinstance(error, OSError):
        _discard_output()
    return code


def _said(asked: Asked, error: BaseException) -> str:
    if isinstance(error, LockTimeout):
        waited = f" within {error.timeout:g} s" if error.timeout else ""
        return f"lock {shown(error.name)!r} was not acquired{waited}. Who has it: dblock show {shlex.quote(error.name)}"
    if isinstance(error, Unavailable) and asked.dsn is None:
        return f"{error} (The database is named by: {asked.source}.)"
    if isinstance(error, OSError) and error.filename is None and error.strerror:
        return f"the answer could not be written: {error.strerror}"
    return str(error)


def _code(error: BaseException) -> int:
    if isinstance(error, LockTimeout):
        return exit_codes.NOT_ACQUIRED
    if isinstance(error, LeaseLost):
        return exit_codes.LOST
    return exit_codes.UNREACHABLE if isinstance(error, Unavailable) else exit_codes.FAILED


def _complain(asked: Asked, said: str, kind: str, code: int) -> None:
    if asked.as_json:
        said = as_json({"error": said, "kind": kind, "exit_code": code})
    else:
        said = shown(f"dblock: {' '.join(line.strip() for line in said.splitlines())}")  # libpq's may have several
    try:
        click.echo(said, err=True)
    except OSError:
        return  # nobody is there to be told


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
