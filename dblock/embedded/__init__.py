"""A real Postgres without any setup: its programs come from a wheel, and dblock starts and stops it.

    server = dblock.embedded.start()      # finds the running server, or starts it
    client = dblock.Client(server.url)    # or dblock.Client(embedded=True)
    dblock.embedded.stop()

All processes of one user share one server, and so contend for the same locks. The server keeps running when the
process that started it ends, until it is stopped or the machine shuts down. Only its user can connect: it listens on a
socket in a private folder and on no port.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dblock.errors import EmbeddedError

if sys.platform == "win32":
    raise EmbeddedError("The embedded Postgres needs Linux or macOS. Set DBLOCK_DSN to use another Postgres.")

from dblock.embedded.server import Server

__all__ = ["Server", "default_folder", "start", "status", "stop"]

HOME_VARIABLE = "DBLOCK_HOME"


def default_folder() -> Path:
    """Return the folder of this user's server: $DBLOCK_HOME, or the system's usual folder for such data."""
    given = os.environ.get(HOME_VARIABLE)
    if given:
        return Path(given).expanduser().absolute()
    if os.geteuid() == 0:
        # Postgres refuses to run as root, and no other account may enter root's home.
        return Path("/var/lib/dblock")
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "dblock"


def start(folder: Path | None = None) -> Server:
    """Return this user's server, after starting it if it is not running."""
    server = Server(folder or default_folder())
    server.start()
    return server


def stop(folder: Path | None = None) -> bool:
    """Stop this user's server; return False if it was not running."""
    return Server(folder or default_folder()).stop()


def status(folder: Path | None = None) -> Server | None:
    """Return this user's server; None if it is not running."""
    server = Server(folder or default_folder())
    return server if server.answers() else None
