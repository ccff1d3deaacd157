"""The socket that a server listens at."""

from __future__ import annotations

import asyncio
import socket

import pytest

from dblock.server.serving import listen
from dblock.server.settings import Settings


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_connection_sends_each_part_of_a_reply_at_once(host: str) -> None:
    """A body that waits for the acknowledgement of the headers is 40 ms late."""
    try:
        opened = listen(Settings(host=host, port=0))
    except OSError:
        if host == "127.0.0.1":
            raise
        pytest.skip("this machine has no IPv6")
    undelayed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        undelayed.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0)
        writer.close()

    async with await asyncio.start_server(accept, sock=opened):
        _, writer = await asyncio.open_connection(*opened.getsockname()[:2])
        writer.close()
        await writer.wait_closed()
        assert await undelayed
