"""The IDs of leases and tickets: signed, so that they cannot be guessed, and complete, so that no server stores them.

An ID contains the exact grant or attempt that it stands for. Every server of the same installation derives the key of
the signature from the installation's ID. A database role that can read the installation's ID may call the functions for
locks anyway.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import struct
from typing import NamedTuple

from dblock.server.problems import Problem

_SIGNATURE = 16
_LEASE = struct.Struct(">cqI")
_TICKET = struct.Struct(">c16s")
_LONGEST = 1024


class LeaseId(NamedTuple):
    """What the ID of a lease says."""

    name: str
    """The name of the row that is held: of the lock, or of a share of it."""
    token: int
    ttl: float


class TicketId(NamedTuple):
    """What the ID of a ticket says."""

    name: str
    attempt: str


class Signer:
    """Makes and reads the IDs of one installation."""

    def __init__(self, installation: str) -> None:
        self._key = hashlib.sha256(b"dblock http ids\0" + installation.encode()).digest()

    def lease(self, lease: LeaseId) -> str:
        """Return the ID of a lease."""
        return self._signed(_LEASE.pack(b"L", lease.token, round(lease.ttl * 1000)) + lease.name.encode())

    def ticket(self, ticket: TicketId) -> str:
        """Return the ID of a ticket."""
        return self._signed(_TICKET.pack(b"T", bytes.fromhex(ticket.attempt)) + ticket.name.encode())

    def read_lease(self, text: str) -> LeaseId:
        """Return what the ID of a lease says, or raise the problem of an ID that no server has made."""
        content = self._content(text, b"L", "lease")
        _, token, ttl = _LEASE.unpack_from(content)
        return LeaseId(content[_LEASE.size :].decode(), token, ttl / 1000)

    def read_ticket(self, text: str) -> TicketId:
        """Return what the ID of a ticket says, or raise the problem of an ID that no server has made."""
        content = self._content(text, b"T", "ticket")
        _, attempt = _TICKET.unpack_from(content)
        return TicketId(content[_TICKET.size :].decode(), attempt.hex())

    def attempt(self, caller: str, name: str, key: str) -> str:
        """Return the attempt of an Idempotency-Key, which no other caller and no other lock shares."""
        words = "\0".join((caller, name, key)).encode("utf-8", "surrogateescape")
        return hmac.new(self._key, b"attempt\0" + words, hashlib.sha256).hexdigest()[:32]

    def _signed(self, content: bytes) -> str:
        return base64.urlsafe_b64encode(self._signature(content) + content).rstrip(b"=").decode()

    def _content(self, text: str, kind: bytes, word: str) -> bytes:
        try:
            if len(text) > _LONGEST or not text.isascii():
                raise ValueError
            raw = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), b"-_", validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        content = raw[_SIGNATURE:]
        if not hmac.compare_digest(raw[:_SIGNATURE], self._signature(content)) or content[:1] != kind:
            raise Problem(
                404,
                f"unknown-{word}",
                f"There is no such {word}",
                f"No server of this installation has made this ID of a {word}.",
                f"Use the {word} as the server returned it.",
            )
        return content

    def _signature(self, content: bytes) -> bytes:
        return hmac.new(self._key, content, hashlib.sha256).digest()[:_SIGNATURE]
