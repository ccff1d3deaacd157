"""The settings of a server, checked before it listens."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dblock._core.schema_version import DEFAULT_SCHEMA
from dblock.errors import InvalidArgument

if TYPE_CHECKING:
    from dblock._runtime.target import Where
    from dblock.server.access import Credential

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

ROLES = ("see", "lock", "break")
"""What a caller may do, from the least to the most. Each role includes those before it."""


@dataclass(frozen=True)
class Limits:
    """How much one server accepts."""

    body: int = 65_536
    """Bytes of a request's body."""
    body_within: float = 10.0
    """Seconds in which a request's body must have arrived."""
    wait: float = 60.0
    """Seconds that one request may wait for a lock."""
    waiters: int = 1000
    """Requests that wait for locks at the same time."""
    streams: int = 200
    """Streams of events that are open at the same time."""
    page: int = 1000
    """Locks in one page of the list."""


@dataclass(frozen=True)
class Settings:
    """Where a server listens, which database it serves, and who may use it."""

    dsn: Where = None
    """The database, as a client takes it. None for $DBLOCK_DSN."""
    embedded: bool = False
    schema: str = DEFAULT_SCHEMA
    host: str = "127.0.0.1"
    port: int = 8080
    prefix: str = ""
    """The path under which a proxy publishes the server, such as /locks. Requests with and without it are accepted."""
    credentials: tuple[Credential, ...] = ()
    """The bearer tokens."""
    proxy_header: str | None = None
    """The header in which a proxy names the user."""
    proxy_networks: tuple[Network, ...] = ()
    """The proxy's addresses. The header counts only if the connection comes from one of them."""
    proxy_role: str = "see"
    """What a user that the proxy names may do."""
    hosts: tuple[str, ...] = ()
    """Public hosts of the server, such as locks.example.com, beside its own address."""
    open_metrics: bool = False
    """Whether /metrics needs no authentication."""
    unprotected: bool = False
    """Whether the server may listen beyond loopback without authentication."""
    ticket_ttl: float = 15.0
    """Seconds for which a ticket keeps its position without a request."""
    patience: float = 5.0
    """Seconds to wait for the database's reply."""
    pool_size: int = 8
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.prefix and (not self.prefix.startswith("/") or self.prefix.endswith("/") or "//" in self.prefix):
            raise InvalidArgument(
                f"The prefix must begin with a slash, and not end with one or have two in a row; got {self.prefix!r}."
            )
        if (self.proxy_header is None) != (not self.proxy_networks):
            raise InvalidArgument(
                "A proxy's header is believed only from the proxy's addresses. Give both --proxy-header and "
                "--proxy-from, or neither."
            )
        if self.proxy_role not in ROLES:
            raise InvalidArgument(f"A role is one of {', '.join(ROLES)}; got {self.proxy_role!r}.")
        if not self.authenticates and not self.unprotected and not self.on_loopback:
            raise InvalidArgument(
                f"The server does not listen at {self.host!r} without authentication, because every machine that "
                "reaches it could take locks from their holders. Give it --tokens or --proxy-header, listen at "
                "127.0.0.1, or add --i-know."
            )

    @property
    def authenticates(self) -> bool:
        """Whether a caller has to prove who it is."""
        return bool(self.credentials or self.proxy_header)

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
