"""A look at a socket: which states a probe tells apart, and what keeps it from mistaking one for another."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import dblock
from dblock._core.presence import Presence, SocketState
from dblock._core.timings import default
from dblock._runtime import socket_probe
from dblock._runtime.socket_probe import SocketProbe
from tests.support.timings import timings_with

GRACE = 0.15
NOTIFICATION = b"A" + struct.pack(">ii", 4 + 4 + 9 + 6, 1234) + b"dblock_a\0" + b"probe\0"


def error(severity: str) -> bytes:
    fields = f"S{severity}\0V{severity}\0C57P01\0Mterminating connection due to administrator command\0\0".encode()
    return b"E" + struct.pack(">i", 4 + len(fields)) + fields


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def probe(ends: tuple[socket.socket, socket.socket]) -> Iterator[SocketProbe]:
    probe = SocketProbe(ends[0].fileno())
    yield probe
    probe.close()


def test_socket_without_input_is_open_until_the_other_end_closes(
    ends: tuple[socket.socket, socket.socket], probe: SocketProbe
) -> None:
    assert probe() is SocketState.OPEN
    ends[1].close()
    assert probe() is SocketState.CLOSED


@pytest.mark.parametrize(
    ("pending", "state"),
    [
        (NOTIFICATION, SocketState.OPEN),
        (NOTIFICATION * 20, SocketState.OPEN),
        (error("ERROR") + b"Z\0\0\0\5I", SocketState.OPEN),
        (error("FATAL"), SocketState.CLOSED),
        (NOTIFICATION + error("FATAL"), SocketState.CLOSED),
        (error("PANIC"), SocketState.CLOSED),
        (NOTIFICATION[:-1], SocketState.READABLE),
        (NOTIFICATION[3:], SocketState.READABLE),
        (b"\x17\x03\x03\x00\x20" + bytes(32), SocketState.READABLE),
        (b"E", SocketState.READABLE),
        (b"A\0\0\0\0" + error("FATAL"), SocketState.READABLE),
    ],
    ids=["one", "many", "reply", "fatal", "fatal later", "panic", "cut off", "tail", "tls", "short", "bad length"],
)
def test_unread_input_is_told_apart_without_reading_it(
    ends: tuple[socket.socket, socket.socket], probe: SocketProbe, pending: bytes, state: SocketState
) -> None:
    ends[1].sendall(pending)
    assert probe() is state
    assert ends[0].recv(65536) == pending


def test_probe_does_not_follow_the_number_of_its_socket(
    ends: tuple[socket.socket, socket.socket], probe: SocketProbe
) -> None:
    number = ends[0].fileno()
    ends[0].close()
    others = socket.socketpair()
    with others[0], others[1]:
        assert number in (others[0].fileno(), others[1].fileno()), "the number was not reused"
        assert probe() is SocketState.OPEN, "the server still sees the connection"
        ends[1].close()
        assert probe() is SocketState.CLOSED


def test_closed_probe_is_not_open(ends: tuple[socket.socket, socket.socket], probe: SocketProbe) -> None:
    probe.close()
    assert probe() is SocketState.CLOSED


def test_input_that_cannot_be_read_is_doubt(ends: tuple[socket.socket, socket.socket], probe: SocketProbe) -> None:
    presence = Presence("aa", GRACE, probe, 100)
    assert presence.stands(100)
    ends[1].sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    assert presence.stands(100 + GRACE * default.own_part - 0.001)
    assert not presence.stands(100 + GRACE * default.own_part), "it may be the server's last message"


def test_input_that_the_listener_reads_in_a_moment_is_no_doubt(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    probe = SocketProbe(ends[0].fileno(), timings_with(read_within=20))
    presence = Presence("aa", GRACE, probe, 100)
    ends[1].sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    reader = threading.Timer(0.01, ends[0].recv, (65536,))
    reader.start()
    assert presence.stands(110)
    reader.join()


def test_poll_that_reports_no_hang_up_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    native = select.poll

    class Patched:
        def __init__(self) -> None:
            self._poll = native()

        def register(self, handle: int, events: int) -> None:
            self._poll.register(handle, events)

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            return [(handle, events & select.POLLIN) for handle, events in self._poll.poll(timeout)]

    monkeypatch.setattr(select, "poll", Patched)
    assert socket_probe.find_poll() is None
    monkeypatch.delattr(select, "poll")
    assert socket_probe.find_poll() is None
    monkeypatch.undo()
    assert socket_probe.find_poll() is select.poll


def test_client_without_such_a_poll_has_no_presence(
    dsn: str, owner: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket_probe, "poll", None)
    with dblock.Client(dsn) as client, dblock.Client(dsn, presence=None) as other:
        lease = client.lock("a").acquire()
        held = other.lock("b").acquire()
        threading.Timer(0.2, held.release).start()
        client.lock("b").acquire(timeout=20).release()
        assert owner.execute("SELECT count(*) FROM lock_presence").fetchone() == (0,)
        assert "no presence" in caplog.text
        lease.release()
