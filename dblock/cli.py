"""The `dblock` command.

Exit codes: 0 done; 1 it could not be done, and why is on standard error; 2 the command was not understood;
130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dblock import fence_cli
from dblock.errors import DblockError
from dblock.target import EmbeddedTarget, Target, resolve

if TYPE_CHECKING:
    from dblock.embedded import Server

DESCRIPTION = "Locks with fencing tokens, in the Postgres you already run."
WHICH = "Without --dsn and DBLOCK_DSN, the embedded Postgres of this user is used, and started if need be."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    # The library is quiet; a person at a terminal wants to know what was found amiss and put right.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("dblock: %(message)s"))
    handler.setLevel(logging.WARNING)
    logging.getLogger("dblock").addHandler(handler)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        code = command(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except DblockError as error:
        print(f"dblock: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dblock: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has had enough of it; what is left of it must not be an error at exit.
        _discard_output()
        return 0
    except OSError as error:
        print(f"dblock: {error}", file=sys.stderr)
        _discard_output()
        return 1
    finally:
        logging.getLogger("dblock").removeHandler(handler)


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    from dblock import __version__

    parser = argparse.ArgumentParser(prog="dblock", description=DESCRIPTION, epilog=WHICH)
    parser.add_argument("--version", action="version", version=f"dblock {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    database = argparse.ArgumentParser(add_help=False)
    database.add_argument("--dsn", help="the database: a URL or libpq keywords (default: $DBLOCK_DSN, else embedded)")
    database.add_argument("--schema", default="dblock", help="the schema that dblock lives in (default: dblock)")

    def add(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, parents=[database], help=summary, description=summary, epilog=WHICH)
        command.set_defaults(command=run)
        return command

    install = add("install", _install, "create dblock's schema, or bring it up to date")
    install.add_argument("--sql", action="store_true", help="print the statements instead of running them")
    uninstall = add("uninstall", _uninstall, "remove dblock's schema and all locks in it")
    uninstall.add_argument("--yes", action="store_true", help="do not ask")
    add("status", _status, "tell what is installed; exit code 1 unless it fits this version")
    grant = add("grant", _grant, "let a role lock and unlock, and nothing else")
    grant.add_argument("role", metavar="ROLE")
    reaper = add("reaper", _reaper, "delete the rows of locks that nobody has used for long")
    reaper.add_argument("--once", action="store_true", help="do it once, and tell how many went")
    reaper.add_argument("--idle", type=float, default=86_400, metavar="S", help="how long unused (default: a day)")
    reaper.add_argument("--interval", type=float, default=3_600, metavar="S", help="between runs (default: an hour)")
    add(
        "demo",
        _demo,
        "processes contend for one lock; one is killed, one is frozen (installs what is missing)",
    )

    token = commands.add_parser("token", help="the token sequence: look at it, raise it")
    tokens = token.add_subparsers(metavar="ACTION", required=True)
    summary = "tell the highest token that was handed out"
    tokens.add_parser("show", parents=[database], help=summary, description=summary).set_defaults(command=_token_show)
    summary = "make every token from now on higher than a number, as after a restore; never lowers them"
    raising = tokens.add_parser("raise", parents=[database], help=summary, description=summary)
    raising.add_argument(
        "--above", type=int, required=True, metavar="N", help="the highest token any resource has seen"
    )
    raising.set_defaults(command=_token_raise)

    fence_cli.add_commands(commands, _target)

    embedded = commands.add_parser("embedded", help="the embedded Postgres of this user")
    actions = embedded.add_subparsers(metavar="ACTION", required=True)
    for name, run, summary in (
        ("start", _start, "start it, or find it running"),
        ("stop", _stop, "stop it, ending the sessions of all who use it"),
        ("status", _embedded_status, "tell whether it runs; exit code 1 if not"),
        ("url", _url, "print the DSN to connect with, starting it if need be"),
    ):
        actions.add_parser(name, help=summary, description=summary).set_defaults(command=run)
    return parser


def _target(options: argparse.Namespace) -> Target:
    target = resolve(options.dsn)
    if isinstance(target, EmbeddedTarget):
        _start_embedded()
    return target


def _start_embedded() -> Server:
    from dblock import embedded

    running = embedded.status()
    if running:
        return running
    print("Starting the embedded Postgres…", file=sys.stderr)
    return embedded.start()


def _install(options: argparse.Namespace) -> int:
    from dblock import schema

    if options.sql:
        print(schema.ddl(options.schema))
        return 0
    target = _target(options)
    before = schema.install(target, options.schema)
    if before == schema.REVISION:
        print(f"Schema {options.schema!r} in {target} is at revision {before}; nothing to do.")
    elif before is None:
        print(f"Installed dblock in schema {options.schema!r} of {target}, revision {schema.REVISION}.")
    else:
        print(f"Brought schema {options.schema!r} in {target} from revision {before} to {schema.REVISION}.")
    return 0


def _uninstall(options: argparse.Namespace) -> int:
    from dblock import schema

    target = _target(options)
    if not options.yes:
        print(f"This removes schema {options.schema!r} from {target}, with every lock that is held now.")
        if not sys.stdin.isatty():
            raise DblockError("Nobody is there to confirm. Add --yes to go ahead.")
        if input("Type the schema's name to go ahead: ").strip() != options.schema:
            raise DblockError("Not confirmed; nothing was removed.")
    last = schema.uninstall(target, options.schema)
    print(f"Removed schema {options.schema!r} from {target}. The highest token it had handed out was {last}.")
    if last:
        option = "" if options.schema == schema.DEFAULT_SCHEMA else f" --schema {shlex.quote(options.schema)}"
        again = f"dblock install{option} && dblock token raise --above {last}{option}"
        print(f"Resources may remember it. To go on above it after a new install in {target}: {again}")
    return 0


def _status(options: argparse.Namespace) -> int:
    from dblock import schema

    target = _target(options)
    found = schema.status(target, options.schema)
    print(f"database  {found.database} at {target}, Postgres {found.server}{', a standby' if found.standby else ''}")
    print(f"schema    {found.schema}: {found.state}", end="")
    print(f", revision {found.revision} (this version needs {schema.REVISION})" if found.revision else "")
    found.check()
    return 0


def _grant(options: argparse.Namespace) -> int:
    from dblock import schema

    target = _target(options)
    schema.grant(target, options.role, options.schema)
    print(f"Role {options.role!r} may now lock and unlock in schema {options.schema!r} of {target}.")
    return 0


def _reaper(options: argparse.Namespace) -> int:
    from dblock.reaper import Reaper

    reaper = Reaper(_target(options), idle=options.idle, interval=options.interval, schema=options.schema)
    if options.once:
        print(f"Deleted the rows of {reaper.once()} idle locks.")
        return 0
    # A job that runs for days says what it does.
    logging.getLogger("dblock").setLevel(logging.INFO)
    for handler in logging.getLogger("dblock").handlers:
        handler.setLevel(logging.INFO)
    reaper.run()
    return 0


def _token_show(options: argparse.Namespace) -> int:
    from dblock import tokens

    found = tokens.show(_target(options), options.schema)
    print(f"highest   {found.highest or 'none was handed out yet'}")
    print(f"timeline  {found.timeline}")
    return 0


def _token_raise(options: argparse.Namespace) -> int:
    from dblock import tokens

    least = tokens.raise_above(_target(options), options.above, options.schema)
    print(f"The next token will be {least} or higher.")
    return 0


def _demo(options: argparse.Namespace) -> int:
    from dblock import demo, embedded, schema

    target = resolve(options.dsn)
    ours = isinstance(target, EmbeddedTarget) and embedded.status() is None
    try:
        target = _target(options)
        schema.install(target, options.schema)
        print(f"Three workers and one lock, on {target}:\n")
        demo.tell_story(target, options.schema, lambda line: print(line, flush=True))
    finally:
        # What was started for the story ends with it, unless somebody has come to use it meanwhile.
        server = embedded.status() if ours else None
        if server is not None and not server.in_use():
            server.stop()
    return 0


def _start(options: argparse.Namespace) -> int:
    server = _start_embedded()
    print(f"The embedded Postgres runs, process {server.pid}: {server.url}")
    return 0


def _stop(options: argparse.Namespace) -> int:
    from dblock import embedded

    print("Stopped the embedded Postgres." if embedded.stop() else "The embedded Postgres was not running.")
    return 0


def _embedded_status(options: argparse.Namespace) -> int:
    from dblock import embedded

    server = embedded.status()
    if server is None:
        print(f"The embedded Postgres does not run. Its folder is {embedded.default_folder()}.")
        return 1
    print(f"The embedded Postgres runs, process {server.pid}, in {server.folder}: {server.url}")
    return 0


def _url(options: argparse.Namespace) -> int:
    print(_start_embedded().url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
