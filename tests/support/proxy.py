"""A network between client and server that can be cut at a chosen moment.

The proxy passes bytes both ways. Told to lose an answer, it lets the request through, waits for the server's whole
answer to it, and then cuts the connection instead of passing the answer on: the request was carried out, and the
client cannot know.

It can also be slow, or fall silent, in both directions or in one: connections stay open, and nothing passes. What was
sent meanwhile is passed on when it flows again, as a network does that sends again what was not confirmed; so a request
may arrive long after its client has given it up. And it can leave a connection half open: one end is told that the
other has gone, and the other is not.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from psycopg import conninfo

READY = b"Z\x00\x00\x00\x05I"
"""ReadyForQuery, outside a transaction: the end of every answer."""


class Proxy:
    """Stands between clients and the server of a DSN; `dsn` leads through it.

    By a socket in `folder`, if one is named: where the server has one of the same kind, neither end can tell that
    something stands between them.
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
        self._times = 0
        self.lost = 0
        """How many answers were."""
        self.delay = 0.0
        """Seconds that every answer is held back."""
        self.jitter = 0.0
        """Up to so many more, differently each time."""
        self.loses: Callable[[bytes], bool] = lambda _: False
        """Tells of a request whether its answer is to be lost."""
        self.before_cut: Callable[[], object] = lambda: None
        """Called when an answer has come that will be lost, before the client can notice."""
        self._flowing = threading.Event()
        """Whether requests are passed on."""
        self._answers_flow = threading.Event()
        self.flow()
        self._closed = False
        self._links: set[_Link] = set()
        self._half_open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_answer_to(self, fragment: bytes, times: int = 1) -> None:
        """Cut the connection once the next request that contains this fragment has been answered."""
        self._trap, self._times = fragment, times

    def fall_silent(self) -> None:
        """Pass nothing on, in either direction, until told to flow again. Connections can still be made."""
        self.hold_requests()
        self.hold_answers()

    def hold_requests(self) -> None:
        """Pass nothing on to the server until told to flow again."""
        self._flowing.clear()

    def hold_answers(self) -> None:
        """Pass nothing on to the clients until told to flow again."""
        self._answers_flow.clear()

    def flow(self) -> None:
        self._flowing.set()
        self._answers_flow.set()

    def fall_silent_at(self, fragment: bytes) -> None:
        """Fall silent as soon as a request contains this fragment."""
        self._silencer = fragment

    def cut(self) -> int:
        """Cut every connection at one moment; new ones can be made. The result is how many there were."""
        # Whoever sees the first of its connections end gets nothing through on the others any more.
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
        """Tell every client that its connection is gone, and the server nothing, until the next cut."""
        return self._halve(lambda link: (link.client, link.server))

    def lose_servers(self) -> int:
        """Tell the server that every connection is gone, and the clients nothing, until the next cut."""
        return self._halve(lambda link: (link.server, link.client))

    def _halve(self, ends: Callable[[_Link], tuple[socket.socket, socket.socket]]) -> int:
        links = list(self._links)
        for link in links:
            told, kept = ends(link)
            self._half_open.append(kept)
            link.half_open = True
            _close(told)
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
                _close(client)  # the server is not there
                continue
            self._links.add(link)
            if self._closed:
                # Accepted in the very moment, and not among those that were cut.
                _close(link.client)
                _close(link.server)
            threading.Thread(target=self._requests, args=(link,), daemon=True).start()
            threading.Thread(target=self._answers, args=(link,), daemon=True).start()

    def _connect(self) -> socket.socket:
        if not self._host.startswith("/"):
            return socket.create_connection((self._host, self._port))
        server = socket.socket(socket.AF_UNIX)
        server.connect(f"{self._host}/.s.PGSQL.{self._port}")
        return server

    def _requests(self, link: _Link) -> None:
        try:
            while data := link.client.recv(65536):
                if self._silencer and self._silencer in data:
                    self.fall_silent()
                if self._times and self._trap in data:
                    self._times -= 1
                    link.armed = True
                elif self.loses(data):
                    link.armed = True
                self._flowing.wait()
                if not link.half_open:
                    link.server.sendall(data)
        except OSError:
            pass
        finally:
            if not link.half_open:
                _close(link.server)
            self._links.discard(link)

    def _answers(self, link: _Link) -> None:
        try:
            while data := link.server.recv(65536):
                if link.armed and data.endswith(READY):
                    self.before_cut()
                    self.lost += 1
                    return
                if not link.armed:
                    time.sleep(self.delay + self.jitter * random.random())
                    self._answers_flow.wait()
                    if not link.half_open:
                        link.client.sendall(data)
        except OSError:
            pass
        finally:
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
        """Cut every connection, and take no more."""
        self._closed = True
        _close(self._listener)
        self.cut()
        self.flow()


class _Link:
    """One connection through the proxy."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.armed = False
        """Whether the answer to what was asked last is to be lost."""
        self.half_open = False
        """Whether one end has been told that it is gone."""


def _close(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)
    opened.close()
