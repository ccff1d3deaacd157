"""Run the server: listen, serve, and end within two seconds of a signal.

On SIGTERM and SIGINT the server stops listening, replies to waiting requests with their tickets, ends the streams, and
exits. A second signal changes nothing.

With its last calls the server leaves the queues, so that other clients need not wait for seconds. If the database does
not reply, the process ends without these calls, and what the server had in the queues expires as after a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from dblock.errors import ConfigurationError
from dblock.server.app import create_app
from dblock.server.service import Service
from dblock.server.settings import Settings

STOP_WITHIN = 1
"""Seconds that requests have to end after the signal. Then they are cancelled."""

EXIT_WITHIN = 1.8
"""Seconds after the signal at which the process ends, whatever still waits for the database."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Server(uvicorn.Server):
    """uvicorn's server, except that on a signal it stops the service first, and exits with 0."""

    def __init__(self, config: uvicorn.Config, service: Service, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._service = service
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        # Not add_signal_handler, which restores the default at its end: a further signal would change the exit code.
        before = {number: signal.signal(number, lambda *_: loop.call_soon_threadsafe(self._stop)) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self.should_exit else handler)

    def _stop(self) -> None:
        if self.should_exit:
            return
        self._service.stopping.set()
        self.should_exit = True
        # In a thread, because the event loop may have ended by then. The thread stays until the process has ended,
        # because the interpreter waits for other threads that look up a host.
        last = threading.Timer(EXIT_WITHIN, os._exit, [0])
        last.daemon = True
        last.start()


def serve(settings: Settings, listening: Callable[[str], None] = lambda address: None) -> None:
    """Serve until a signal comes, in a process that then ends.

    `listening` is called with the address once the server accepts requests.
    """
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        # The peer of the socket decides whether a proxy's header is believed, so no header may change it.
        proxy_headers=False,
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=STOP_WITHIN,
        timeout_keep_alive=75,
    )
    opened = listen(settings)
    try:
        host, port = opened.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}{settings.prefix}"
        server = _Server(config, app.state.service, lambda: listening(address))
        asyncio.run(server.serve([opened]))
    finally:
        opened.close()


def listen(settings: Settings) -> socket.socket:
    """Return the listening socket of a server."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        opened = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        # str(error) may repeat the address.
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or errno.EINVAL)
        in_use = "Stop the program that listens there, or choose" if error.errno == errno.EADDRINUSE else "Choose"
        raise ConfigurationError(
            f"The server cannot listen at {settings.host}:{settings.port}: {why}. {in_use} another address with "
            "--listen HOST:PORT."
        ) from None
    # asyncio switches Nagle's algorithm off only for sockets that name their protocol. With it, the body of a reply
    # waits for the acknowledgement of the headers: 40 ms for each request over a connection that is kept open.
    return socket.socket(opened.family, opened.type, socket.IPPROTO_TCP, fileno=opened.detach())
