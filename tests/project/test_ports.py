"""A port that tests reserve for a server: no other socket gets it, and the server does."""

from __future__ import annotations

import socket
import sys

import pytest

from tests.support.ports import ReservedPort


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a server share the address with the reservation")
def test_reserved_port_goes_to_its_server_and_to_no_other_socket() -> None:
    with ReservedPort() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port.number))
        for _ in range(2):  # also after a restart
            with (
                socket.create_server(("127.0.0.1", port.number)) as server,
                socket.create_connection(("127.0.0.1", port.number)),
            ):
                server.accept()[0].close()
