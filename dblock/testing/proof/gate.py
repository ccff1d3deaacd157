"""A gate between one holder and its database: it sees every statement, and can hold the holder at any of them.

The gate is a proxy that speaks enough of Postgres's protocol to find the statements. It passes on whole requests, so a
held request has not reached the server in any part. The connections of dblock's own clients pass through the gate too.
The gate does not freeze the holder at their statements. While the holder is frozen, the gate holds them like all
others.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Set
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from psycopg import conninfo

from dblock.testing.locations import Location

SSL_REQUEST, GSS_REQUEST = 80877103, 80877104

ENDS_A_REQUEST = b"QSHFXpcfd"
"""The types of the messages after which the server is expected to act."""

DROPPED = (
    "hostaddr",
    "sslmode",
    "sslnegotiation",
    "gssencmode",
    "channel_binding",
)
"""The parameters of a DSN that do not lead through the gate: its socket knows no encryption."""


class Statement(NamedTuple):
    """A statement that the holder has sent."""

    text: str
    location: Location | None


class Gate:
    """Stands between a holder and the server of a DSN. The holder connects to `dsn`."""

    def __init__(
        self, dsn: str, server: tuple[str, int], where: Callable[[], Location | None], own: Set[int] = frozenset()
    ) -> None:
        """Listen. `server` is the host and port to which the DSN leads. `where` returns the line of the holder.

        `own` has the process IDs of the sessions of dblock's clients. It grows while the holder runs.
        """
        parameters = conninfo.conninfo_to_dict(dsn)
        self._host, self._port = server
        self._where = where
        self.own = own
        self._folder = tempfile.mkdtemp(prefix="dblock-gate-")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._folder}/.s.PGSQL.{self._port}")
        self._listener.listen(64)
        for dropped in DROPPED:
            parameters.pop(dropped, None)
        parameters |= {"host": self._folder, "port": self._port}
        self.dsn = _url(dsn, parameters) if "://" in dsn else conninfo.make_conninfo("", **parameters)
        self.statements: list[Statement] = []
        """The statements that have reached the gate, in their order."""
        self._stop_at: int | None = None
        self.reached = 0
        """The number of the statement before which the holder is frozen."""
        self.changed = threading.Condition()
        self.frozen = False
        self._stepping = False
        self.cut_off = False
        self._links: list[_Link] = []
        threading.Thread(target=self._accept, name="proof gate", daemon=True).start()

    def freeze_at(self, number: int) -> None:
        """Freeze the holder when it sends the statement with this number, counted from 0."""
        self._stop_at = number

    def step(self) -> None:
        """Let a frozen holder's next statement through, and freeze it again at the one after that."""
        with self.changed:
            self._stepping = True
            self.reached = len(self.statements)
            self.changed.notify_all()

    def resume(self) -> None:
        """Let the holder continue."""
        with self.changed:
            self._stop_at, self.frozen, self._stepping = None, False, False
            self.changed.notify_all()

    def cut(self) -> None:
        """Close every connection, as if the holder had died, and let it open no other."""
        with self.changed:
            self.cut_off = True
            links = list(self._links)
        for link in links:
            link.close()
        self.resume()

    def backends(self) -> list[int]:
        """Return the process IDs of all sessions of the holder, including those of its clients."""
        return [link.backend for link in list(self._links) if link.backend]

    def close(self) -> None:
        """Close every connection, and stop listening."""
        self.cut()
        _close(self._listener)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = self._connect()
            except OSError:
                _close(client)
                continue
            link = _Link(self, client, server)
            with self.changed:
                refused = self.cut_off
                self._links.append(link)
            if refused:
                link.close()
                continue
            threading.Thread(target=link.pass_requests, name="proof gate", daemon=True).start()
            threading.Thread(target=link.pass_replies, name="proof gate", daemon=True).start()

    def _connect(self) -> socket.socket:
        if not self._host.startswith("/"):
            return socket.create_connection((self._host, self._port))
        server = socket.socket(socket.AF_UNIX)
        server.connect(f"{self._host}/.s.PGSQL.{self._port}")
        return server

    def admit(self, text: str | None, own: bool) -> None:
        """Wait until a request may pass. `text` is its statement, None if it has none."""
        with self.changed:
            number = None
            if text is not None and not own:
                number = len(self.statements)
                self.statements.append(Statement(text, self._where()))
                if number == self._stop_at:
                    self.frozen, self.reached = True, number
                self.changed.notify_all()
            self.changed.wait_for(lambda: self._may_pass(number, own))

    def _may_pass(self, number: int | None, own: bool) -> bool:
        if not self.frozen or self.cut_off:
            return True
        return self._stepping and (own or number is None or number < self.reached)


class _Link:
    """One connection through the gate."""

    def __init__(self, gate: Gate, client: socket.socket, server: socket.socket) -> None:
        self._gate = gate
        self._client, self._server = client, server
        self._prepared: dict[bytes, str] = {}
        self.backend = 0
        """The process ID of the session; 0 until the server has sent it."""

    def close(self) -> None:
        _close(self._client)
        _close(self._server)

    def pass_requests(self) -> None:
        """Pass on whole requests, from the start packet on."""
        with contextlib.suppress(OSError, EOFError):
            self._pass_start()
            request, texts = bytearray(), []
            while True:
                head = self._read(5)
                kind, length = head[:1], struct.unpack("!I", head[1:])[0]
                body = self._read(length - 4)
                request += head + body
                if (text := self._text_of(kind, body)) is not None:
                    texts.append(text)
                if kind in ENDS_A_REQUEST:
                    self._gate.admit("; ".join(texts) if texts else None, self.backend in self._gate.own)
                    self._server.sendall(request)
                    request, texts = bytearray(), []
        self.close()

    def _pass_start(self) -> None:
        while True:
            head = self._read(8)
            length, code = struct.unpack("!II", head)
            if code not in (SSL_REQUEST, GSS_REQUEST):
                break
            self._client.sendall(b"N")
        rest = self._read(length - 8)
        self._gate.admit(None, own=False)
        self._server.sendall(head + rest)

    def _text_of(self, kind: bytes, body: bytes) -> str | None:
        if kind == b"Q":
            return body[:-1].decode(errors="replace")
        if kind == b"P":
            name, text, _ = body.split(b"\0", 2)
            self._prepared[name] = text.decode(errors="replace")
        elif kind == b"B":
            return self._prepared.get(body.split(b"\0", 2)[1], "a prepared statement")
        return None

    def pass_replies(self) -> None:
        """Pass on the replies, and note the process ID of the session."""
        start = b""
        with contextlib.suppress(OSError):
            while data := self._server.recv(65536):
                if not self.backend:
                    start = self._find_backend(start + data)
                self._client.sendall(data)
        self.close()

    def _find_backend(self, replies: bytes) -> bytes:
        """Look for the message BackendKeyData. Return the part of a message that has not arrived completely."""
        while len(replies) >= 5:
            end = 1 + struct.unpack("!I", replies[1:5])[0]
            if len(replies) < end:
                break
            if replies[:1] == b"K":
                self.backend = struct.unpack("!I", replies[5:9])[0]
                return b""
            replies = replies[end:]
        return replies

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._client.recv(count - len(data))
            if not more:
                raise EOFError
            data += more
        return data


def _url(dsn: str, parameters: dict[str, Any]) -> str:
    """Return a URL, for drivers that know no other DSN."""
    given = {name: str(value) for name, value in parameters.items() if value is not None}
    user, password, name = (quote(given.pop(one, ""), safe="") for one in ("user", "password", "dbname"))
    login = f"{user}:{password}" if password else user
    return f"{dsn.split('://')[0]}://{login}{'@' if login else ''}/{name}?{urlencode(given, quote_via=quote)}"


def _close(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)
    opened.close()
