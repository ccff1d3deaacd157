"""A network between client and server that can be cut at a chosen moment.

The proxy passes bytes both ways. Told to lose an answer, it lets the request through, waits for the server's whole
answer to it, and then cuts the connection instead of passing the answer on: the request was carried out, and the
client cannot know.

It can also be slow, or fall silent: connections stay open, and nothing passes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

from psycopg import conninfo

READY = b"Z\x00\x00\x00\x05I"
"""ReadyForQuery, outside a transaction: the end of every answer."""


class Proxy:
    """Stands between clients and the server of a DSN; `dsn` leads through it."""

    def __init__(self, dsn: str) -> None:
        parameters = conninfo.conninfo_to_dict(dsn)
        self._host, self._port = str(parameters["host"]), int(parameters.get("port") or 5432)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.dsn = conninfo.make_conninfo(
            dsn, host="127.0.0.1", port=self._listener.getsockname()[1], sslmode="disable", gssencmode="disable"
        )
        self._trap = b""
        self._silencer = b""
        self._times = 0
        self.lost = 0
        self.delay = 0.0
        """Seconds that every answer is held back."""
        self.before_cut: Callable[[], object] = lambda: None
        """Called when an answer has come that will be lost, before the client can notice."""
        self._flowing = threading.Event()
        self._flowing.set()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_answer_to(self, fragment: bytes, times: int = 1) -> None:
        """Cut the connection once the next request that contains this fragment has been answered."""
        self._trap, self._times = fragment, times

    def fall_silent(self) -> None:
        """Pass nothing on, in either direction, until told to flow again. Connections can still be made."""
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def fall_silent_at(self, fragment: bytes) -> None:
        """Fall silent as soon as a request contains this fragment."""
        self._silencer = fragment

    def cut(self) -> None:
        """Cut every connection that there is; new ones can be made."""
        for opened in self._sockets:
            _close(opened)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = self._connect()
            self._sockets += [client, server]
            armed = threading.Event()
            threading.Thread(target=self._requests, args=(client, server, armed), daemon=True).start()
            threading.Thread(target=self._answers, args=(client, server, armed), daemon=True).start()

    def _connect(self) -> socket.socket:
        if not self._host.startswith("/"):
            return socket.create_connection((self._host, self._port))
        server = socket.socket(socket.AF_UNIX)
        server.connect(f"{self._host}/.s.PGSQL.{self._port}")
        return server

    def _requests(self, client: socket.socket, server: socket.socket, armed: threading.Event) -> None:
        try:
            while data := client.recv(65536):
                if self._silencer and self._silencer in data:
                    self.fall_silent()
                if self._times and self._trap in data:
                    self._times -= 1
                    armed.set()
                self._flowing.wait()
                server.sendall(data)
        except OSError:
            pass
        finally:
            _close(server)

    def _answers(self, client: socket.socket, server: socket.socket, armed: threading.Event) -> None:
        try:
            while data := server.recv(65536):
                if armed.is_set() and data.endswith(READY):
                    self.before_cut()
                    self.lost += 1
                    return
                if not armed.is_set():
                    time.sleep(self.delay)
                    self._flowing.wait()
                    client.sendall(data)
        except OSError:
            pass
        finally:
            _close(client)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cut every connection, and take no more."""
        _close(self._listener)
        self._flowing.set()
        for opened in self._sockets:
            _close(opened)


def _close(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)
    opened.close()
