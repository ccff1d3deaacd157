"""Simulate a pooler that emulates sessions: it keeps session state on a backend of its own.

Some poolers accept LISTEN and advisory locks in transaction mode, and keep them on a background connection that
outlives the client. Here every statement that contains one of the `fragments` goes to such a backend, and all others to
the backend to which the client's connection was opened. It stands on a Unix socket, so that no address gives it away.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from types import TracebackType

from psycopg import conninfo

READY = b"Z\x00\x00\x00\x05"
"""ReadyForQuery, the end of every reply, up to the byte that says whether a transaction is open."""


class EmulatingPooler:
    """Stands between clients and a server on a Unix socket. Connect to `dsn` to go through it."""

    def __init__(self, dsn: str, folder: Path, *fragments: bytes) -> None:
        parameters = conninfo.conninfo_to_dict(dsn)
        self._server = f"{parameters['host']}/.s.PGSQL.{parameters.get('port') or 5432}"
        self._fragments = fragments
        self.diverted = 0
        """How many statements went to a background connection."""
        self._sockets: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/.s.PGSQL.5432")
        self._listener.listen(128)
        self.dsn = conninfo.make_conninfo(dsn, host=str(folder), port=5432, sslmode="disable", gssencmode="disable")
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            startup = client.recv(65536)
            server, background = self._connect(startup), self._connect(startup)
            client.sendall(_reply(server))
            _reply(background)
            while data := client.recv(65536):
                chosen = server
                if any(fragment in data for fragment in self._fragments):
                    chosen = background
                    self.diverted += 1
                chosen.sendall(data)
                if data[:1] == b"X":
                    break
                client.sendall(_reply(chosen))

    def _connect(self, startup: bytes) -> socket.socket:
        opened = socket.socket(socket.AF_UNIX)
        opened.connect(self._server)
        opened.sendall(startup)
        self._sockets.append(opened)
        return opened

    def __enter__(self) -> EmulatingPooler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for opened in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
            opened.close()


def _reply(server: socket.socket) -> bytes:
    """Return a whole reply."""
    reply = b""
    while reply[-6:-1] != READY:
        data = server.recv(65536)
        if not data:
            raise ConnectionResetError
        reply += data
    return reply
