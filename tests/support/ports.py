"""Reserve a port for a server that has to be told its port before it starts.

Between the choice of a free port and the start of the server, another test could be given the same port. So the port
stays bound: the kernel gives it to no socket that asks for any port. A server that asks for this port still gets it,
because like the reservation it allows the address to be reused, and the reservation never listens.
"""

from __future__ import annotations

import socket
import sys
from types import TracebackType


class ReservedPort:
    """A port on 127.0.0.1, until it is closed."""

    def __init__(self) -> None:
        self._bound = socket.socket()
        self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._bound.bind(("127.0.0.1", 0))
        self.number = int(self._bound.getsockname()[1])
        if sys.platform != "linux":
            self._bound.close()  # other systems let no server share the address

    def close(self) -> None:
        self._bound.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
