"""Simulate a network between client and server that can be cut at a chosen moment.

The proxy passes bytes both ways. To lose a reply, the proxy lets the request through, waits for the server's whole
reply to it, and then cuts the connection instead of passing the reply on. The server has carried the request out, and
the client cannot know.

The proxy can also be slow, or fall silent, in both directions or in one. Then connections stay open and no bytes pass.
When the proxy flows again, it passes on the bytes that were sent in between, like a network that retransmits
unacknowledged packets. So a request may arrive long after its client has given it up. The proxy can also leave a
connection half open: it closes the connection to one end, and keeps the connection to the other end open.
"""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from psycopg import conninfo

READY = b"Z\x00\x00\x00\x05I"
"""ReadyForQuery, outside a transaction: the end of every reply."""


def fatal(state: str, text: str, severity: str = "SFATAL\0VFATAL\0") -> bytes:
    """Return the last message of a session, as it goes over the wire."""
    fields = f"{severity}C{state}\0M{text}\0\0".encode()
    return b"E" + (len(fields) + 4).to_bytes(4, "big") + fields


SERVER_CRASHED = fatal("08P01", "server conn crashed?", severity="SFATAL\0")
"""What PgBouncer tells a client whose server connection has broken."""


class Proxy:
    """Stands between clients and the server of a DSN. Connect to `dsn` to go through the proxy.

    If `folder` is given, the proxy listens on a Unix socket there. If the server listens on a Unix socket too, neither
    end can detect the proxy.
    """

    def __init__(self, dsn: str, folder: Path | None = None) -> None:
        parameters = conninfo.conninfo_to_dict(dsn)
        self._host, self._port = str(parameters["host"]), int(parameters.get("port") or 5432)
        if folder is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            host, port = self._listener.getsockname()
        else:
            host, port = str(folder), self._port
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(f"{folder}/.s.PGSQL.{port}")
            self._listener.listen(128)
        self.dsn = conninfo.make_conninfo(dsn, host=host, port=port, sslmode="disable", gssencmode="disable")
        self._trap = b""
        self._silencer = b""
        self.requests = 0
        """How many requests have reached the proxy, whether or not it has passed them on."""
        self._times = 0
        self.lost = 0
        """The number of lost replies."""
        self.delay = 0.0
        """Seconds that the proxy holds every reply back."""
        self.jitter = 0.0
        """At most this many random seconds are added to `delay` for each reply."""
        self.loses: Callable[[bytes], bool] = lambda _: False
        """Returns whether to lose the reply to a request."""
        self.before_cut: Callable[[], object] = lambda: None
        """Called when the server has sent a reply that will be lost, before the client can notice the cut."""
        self.last_message = b""
        """What a client is told instead of a lost reply, before the cut."""
        self.rewrites: dict[bytes, bytes] = {}
        """What to replace in each request, by text of the same length: a server that does something else."""
        self.keeps_clients = False
        """Whether a connection to a client stays open when the server closes its side."""
        self._flowing = threading.Event()
        """Set while requests are passed on."""
        self._replies_flow = threading.Event()
        self.flow()
        self._closed = False
        self._links: set[_Link] = set()
        self._half_open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_reply_to(self, fragment: bytes, times: int = 1) -> None:
        """Cut the connection once the server has replied to the next request that contains this fragment."""
        self._trap, self._times = fragment, times

    def fall_silent(self) -> None:
        """Hold back all bytes, in both directions, until `flow`. Clients can still connect."""
        self.hold_requests()
        self.hold_replies()

    def hold_requests(self) -> None:
        """Hold back all bytes to the server until `flow`."""
        self._flowing.clear()

    def hold_replies(self) -> None:
        """Hold back all bytes to the clients until `flow`."""
        self._replies_flow.clear()

    def flow(self) -> None:
        """Pass bytes on again, in both directions."""
        self._flowing.set()
        self._replies_flow.set()

    def fall_silent_at(self, fragment: bytes) -> None:
        """Fall silent as soon as a request contains this fragment."""
        self._silencer = fragment

    def cut(self) -> int:
        """Cut every connection at one moment, and return their number. Clients can connect again."""
        # A client that sees its first connection end can send no more requests over its other connections.
        flowing = self._flowing.is_set()
        self._flowing.clear()
        links = list(self._links)
        for link in links:
            _close(link.client)
            _close(link.server)
        for opened in self._half_open:
            _close(opened)
        self._half_open.clear()
        if flowing:
            self._flowing.set()
        return len(links)

    def lose_clients(self) -> int:
        """Close every connection to a client, and keep the connections to the server open until the next cut."""
        return self._halve(lambda link: (link.client, link.server))

    def lose_servers(self) -> int:
        """Close every connection to the server, and keep the connections to the clients open until the next cut."""
        return self._halve(lambda link: (link.server, link.client))

    def _halve(self, ends: Callable[[_Link], tuple[socket.socket, socket.socket]]) -> int:
        links = list(self._links)
        for link in links:
            closed, kept = ends(link)
            self._half_open.append(kept)
            link.half_open = True
            _close(closed)
        return len(links)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                link = _Link(client, self._connect())
            except OSError:
                _close(client)  # the server does not accept connections
                continue
            self._links.add(link)
            if self._closed:
                # Accepted while the proxy was closing, so close() did not cut this connection.
                _close(link.client)
                _close(link.server)
            threading.Thread(target=self._requests, args=(link,), daemon=True).start()
            threading.Thread(target=self._replies, args=(link,), daemon=True).start()

    def _connect(self) -> socket.socket:
        if not self._host.startswith("/"):
            return socket.create_connection((self._host, self._port))
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(f"{self._host}/.s.PGSQL.{self._port}")
        except OSError:
            server.close()
            raise
        return server

    def _requests(self, link: _Link) -> None:
        try:
            while data := link.client.recv(65536):
                self.requests += 1
                if self._silencer and self._silencer in data:
                    self.fall_silent()
                if self._times and self._trap in data:
                    self._times -= 1
                    link.armed = True
                elif self.loses(data):
                    link.armed = True
                for old, new in self.rewrites.items():
                    assert len(old) == len(new)
                    data = data.replace(old, new)
                self._flowing.wait()
                if not link.half_open:
                    link.server.sendall(data)
        except OSError:
            pass
        finally:
            if not link.half_open:
                _close(link.server)
            self._links.discard(link)

    def _replies(self, link: _Link) -> None:
        try:
            while data := link.server.recv(65536):
                if link.armed and data.endswith(READY):
                    self.before_cut()
                    self.lost += 1
                    link.client.sendall(self.last_message)
                    return
                if not link.armed:
                    time.sleep(self.delay + self.jitter * random.random())
                    self._replies_flow.wait()
                    if not link.half_open:
                        link.client.sendall(data)
        except OSError:
            pass
        finally:
            if self.keeps_clients and not link.half_open:
                link.half_open = True
                self._half_open.append(link.client)
                _close(link.server)
            if not link.half_open:
                _close(link.client)
            self._links.discard(link)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cut every connection, and accept no more."""
        self._closed = True
        _close(self._listener)
        self.cut()
        self.flow()


class _Link:
    """Holds both halves of one connection through the proxy."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.armed = False
        """Whether to lose the reply to the last request."""
        self.half_open = False
        """Whether the connection to one end was closed, and the other kept open."""


def _close(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)
    opened.close()


def main() -> None:
    """Stand before the server of a DSN until standard input is closed."""
    with Proxy(sys.argv[1]) as proxy:
        print(proxy.dsn, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
