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

_NO_EXTRA = "dblock serve needs the extra that brings its web server: pip install 'dblock[server]'"


@command("serve")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:8080",
    show_default=True,
    help="Address to listen at. Beyond this machine it needs authentication.",
)
@click.option(
    "--tokens",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"File with a name, a role (see, lock, break) and a token in each line. Default: ${TOKENS_VARIABLE}.",
)
@click.option("--proxy-header", metavar="NAME", help="Header in which a proxy names the user.")
@click.option(
    "--proxy-from", metavar="CIDR", multiple=True, help="Address of the proxy whose header is believed. Repeatable."
)
@click.option(
    "--proxy-role",
    type=click.Choice(["see", "lock", "break"]),
    default="see",
    show_default=True,
    help="What a user that the proxy names may do.",
)
@click.option("--host-name", metavar="HOST", multiple=True, help="Host under which a proxy publishes the server.")
@click.option("--prefix", metavar="PATH", default="", help="Path under which a proxy publishes the server.")
@click.option("--open-metrics", is_flag=True, help="Answer /metrics without authentication.")
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
    try:
        from dblock.server.serving import serve as run
        from dblock.server.settings import Settings
    except ImportError as error:
        if error.name not in ("jinja2", "markupsafe", "starlette", "uvicorn"):
            raise
        raise click.ClickException(_NO_EXTRA) from None

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
    context.installed_target() if settings.embedded else context.resolve_target()
    run(settings, lambda address: context.notice(f"serving at {address}"))


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
            return parse_credentials(tokens.read_text(), str(tokens))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"The file {tokens} cannot be read: {type(error).__name__}.") from None
    # Taken out of the environment, so that no program that this one starts inherits it.
    text = os.environ.pop(TOKENS_VARIABLE, None)
    return () if text is None else parse_credentials(text, f"${TOKENS_VARIABLE}")


def _networks(proxy_from: tuple[str, ...]) -> tuple[Network, ...]:
    try:
        return tuple(ipaddress.ip_network(one) for one in proxy_from)
    except ValueError as error:
        raise click.UsageError(f"--proxy-from: {error}") from None
