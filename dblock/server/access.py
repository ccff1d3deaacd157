"""Who the caller is, and what it may do.

A caller proves its identity by a bearer token, by the password of HTTP Basic (for clients that know nothing else, such
as Terraform), or by a header of a proxy. The header counts only if the socket's peer is one of the proxy's addresses.
The digest of a token is compared with the digests of all tokens, so the time shows nothing about a token.

A browser sends requests for pages of other sites too. So a request that changes something is refused if the browser
says that it comes from another site. Without authentication the Host header must be the server's own.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from dblock.errors import ConfigurationError
from dblock.server.problems import Problem
from dblock.server.settings import ROLES, Settings

LEAST_TOKEN = 16
"""Characters that a bearer token has at least."""

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class Caller(NamedTuple):
    """The sender of a request."""

    name: str
    role: str
    """One of see, lock and break; each includes those before it."""

    def may(self, role: str) -> bool:
        """Return whether the caller has this role."""
        return ROLES.index(self.role) >= ROLES.index(role)


class Credential(NamedTuple):
    """A bearer token's digest, and the caller that it belongs to."""

    digest: bytes
    caller: Caller


def credential(name: str, role: str, token: str) -> Credential:
    """Return the credential for a token. It keeps only the token's digest."""
    if role not in ROLES or not name or not name.isprintable():
        raise ConfigurationError(
            f"A token belongs to a name and one of the roles {', '.join(ROLES)}; got {name!a:.40} and {role!a:.40}."
        )
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigurationError(
            f"The token of {name!r} must have {LEAST_TOKEN} or more ASCII characters without spaces."
        )
    return Credential(_digest(token), Caller(name, role))


def parse_credentials(text: str, source: str) -> tuple[Credential, ...]:
    """Return the credentials of a file or a variable: in each line a name, a role and a token.

    Empty lines and lines with # are skipped. No message contains a line, because it may have the token in it.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 3:
            raise ConfigurationError(f"Line {number} of {source} must have three words: a name, a role and a token.")
        try:
            found.append(credential(*words))
        except ConfigurationError as error:
            raise ConfigurationError(f"Line {number} of {source}: {error}") from None
    if not found:
        raise ConfigurationError(f"There is no token in {source}.")
    return tuple(found)


def caller_of(scope: Scope, settings: Settings) -> Caller | None:
    """Return the caller that sent a request. None if the caller is unknown."""
    headers = Headers(scope=scope)
    token = _token(headers.get("authorization", ""))
    if token is not None and settings.credentials:
        found = credential_of(token, settings)
        return None if found is None else found.caller
    if settings.proxy_header is not None and _from_proxy(scope, settings):
        name = headers.get(settings.proxy_header, "").strip()
        if name and name.isprintable():
            return Caller(name, settings.proxy_role)
    return None if settings.authenticates else Caller("anonymous", "break")


def require(scope: Scope, settings: Settings, role: str) -> Caller:
    """Return the caller if it has this role, else raise the problem to answer with."""
    caller = caller_of(scope, settings)
    if caller is None:
        raise Problem(
            401,
            "unauthenticated",
            "The caller is unknown",
            "The request has neither a valid token nor a user name from a trusted proxy.",
            "Send the header Authorization: Bearer TOKEN.",
            {"WWW-Authenticate": 'Bearer realm="dblock", Basic realm="dblock"'},
        )
    if not caller.may(role):
        raise Problem(
            403,
            "forbidden",
            "The caller may not do this",
            f"This needs the role {role}, and the caller has the role {caller.role}.",
            f"Ask the operator of the server for the role {role}.",
        )
    return caller


def refuse_cross_site(scope: Scope, settings: Settings) -> None:
    """Raise a problem if a browser sends the request for a page of another site."""
    headers = Headers(scope=scope)
    host = headers.get("host", "")
    if not settings.authenticates and not settings.unprotected and not _own_host(host, settings):
        raise _cross_site(f"The Host header is not this server's address: {host!a:.80}.")
    if scope["method"] in SAFE_METHODS:
        return
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise _cross_site("The browser says that the request comes from another site.")
    origin = headers.get("origin")
    if origin is not None and _authority(origin) not in (host.lower(), *(one.lower() for one in settings.hosts)):
        raise _cross_site("The Origin header is not this server's address.")


def _cross_site(detail: str) -> Problem:
    return Problem(
        403,
        "cross-site",
        "The request comes from another site",
        detail,
        "Send it from the server's own pages or from a program. Behind a proxy, name its host with --host-name.",
    )


def _authority(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _own_host(host: str, settings: Settings) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name in ("localhost", "127.0.0.1", "::1", settings.host) or host in settings.hosts or name in settings.hosts


def _from_proxy(scope: Scope, settings: Settings) -> bool:
    peer = scope.get("client")
    try:
        address = ipaddress.ip_address(peer[0] if peer else "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return any((mapped or address) in network for network in settings.proxy_networks)


def _token(authorization: str) -> str | None:
    """Return the token of an Authorization header. None without a header, empty if the header has no token."""
    if not authorization:
        return None
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def credential_of(token: str, settings: Settings) -> Credential | None:
    """Return the credential for this token. None if no caller has the token."""
    found, digest = None, _digest(token)
    for one in settings.credentials:
        if hmac.compare_digest(one.digest, digest):
            found = one
    return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
