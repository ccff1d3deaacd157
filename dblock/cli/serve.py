"""`dblock serve`: the HTTP API and the dashboard."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dblock.cli.context import CommandContext, command

if TYPE_CHECKING:
    from dblock.server.access import Credential
    from dblock.server.settings import Network

TOKENS_VARIABLE = "DBLOCK_SERVER_TOKENS"

PATIENCE = 5.0
"""Seconds to wait for the database's reply at the start."""


@command("serve")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:8080",
    show_default=True,
    help="Address to listen at. Beyond this machine, the server needs authentication.",
)
@click.option(
    "--tokens",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"File with a name, a role (see, lock, break) and a token in each line. Default: ${TOKENS_VARIABLE}.",
)
@click.option("--proxy-header", metavar="NAME", help="Header in which a proxy names the user.")
@click.option(
    "--proxy-from",
    metavar="CIDR",
    multiple=True,
    help="Address from which that header counts: the proxy's. Repeatable.",
)
@click.option(
    "--proxy-role",
    type=click.Choice(["see", "lock", "break"]),
    default="see",
    show_default=True,
    help="What a user that the proxy names may do.",
)
@click.option(
    "--host-name", metavar="HOST", multiple=True, help="Host under which a proxy publishes the server. Repeatable."
)
@click.option("--prefix", metavar="PATH", default="", help="Path under which a proxy publishes the server.")
@click.option("--open-metrics", is_flag=True, help="Reply to /metrics without authentication.")
@click.option("--i-know", is_flag=True, help="Listen beyond this machine without authentication.")
def serve(
    context: CommandContext,
    listen: str,
    tokens: Path | None,
    proxy_header: str | None,
    proxy_from: tuple[str, ...],
    proxy_role: str,
    host_name: tuple[str, ...],
    prefix: str,
    open_metrics: bool,
    i_know: bool,
) -> None:
    """Serve locks over HTTP, with a dashboard.

    The server keeps no state: you can stop it and start another while leases are held. It renews no lease by itself.
    """
    from dblock.errors import ConfigurationError

    try:
        from dblock.server.serving import serve as run
        from dblock.server.settings import Settings
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("jinja2", "markupsafe", "starlette", "uvicorn"):
            raise
        raise ConfigurationError(
            f"dblock serve needs {missing}, which is not installed. Install the extra that brings it: "
            "pip install 'dblock[server]'"
        ) from None

    host, port = _address(listen)
    database = context.database
    settings = Settings(
        dsn=database.dsn,
        embedded=database.dsn is None,
        schema=context.schema,
        host=host,
        port=port,
        prefix=prefix.rstrip("/"),
        credentials=_credentials(tokens),
        proxy_header=proxy_header,
        proxy_networks=_networks(proxy_from),
        proxy_role=proxy_role,
        hosts=host_name,
        open_metrics=open_metrics,
        unprotected=i_know,
    )
    _check_database(context)
    run(settings, lambda address: context.notice(f"serving at {address}"))


def _check_database(context: CommandContext) -> None:
    """Fail if only an operator can help. Only warn if the database does not reply, because it may come back."""
    from dblock._runtime.runner import Runner
    from dblock.admin.schema import install
    from dblock.errors import Unavailable

    runner = Runner(context.target(), context.schema, 1, PATIENCE)
    try:
        runner.open(install)
    except Unavailable as error:
        context.notice(
            f"{error} (The database is named by: {context.source}.) Until the database replies, the reply to every "
            "request is 503."
        )
    finally:
        runner.close()


def _address(listen: str) -> tuple[str, int]:
    host, separator, port = listen.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise click.UsageError(f"--listen takes HOST:PORT, such as 127.0.0.1:8080; got {listen!r}.")
    return host.strip("[]") or "0.0.0.0", int(port)  # noqa: S104  what an empty host means


def _credentials(tokens: Path | None) -> tuple[Credential, ...]:
    from dblock.errors import ConfigurationError
    from dblock.server.access import parse_credentials

    if tokens is not None:
        try:
            return parse_credentials(tokens.read_text("utf-8"), str(tokens))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigurationError(
                f"The file {tokens} cannot be read: {why}. --tokens names a text file with a name, a role and a token "
                "in each line."
            ) from None
    # Removed from the environment, so that no program that the server starts inherits the tokens.
    text = os.environ.pop(TOKENS_VARIABLE, None)
    return () if text is None else parse_credentials(text, f"${TOKENS_VARIABLE}")


def _networks(proxy_from: tuple[str, ...]) -> tuple[Network, ...]:
    try:
        return tuple(ipaddress.ip_network(one) for one in proxy_from)
    except ValueError as error:
        raise click.UsageError(f"--proxy-from: {error}") from None
