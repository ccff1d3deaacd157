"""A presence: trusted while its socket is open and its last heartbeat is recent."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dblock._core.presence import Presence
from dblock._core.timings import default
from dblock._runtime.socket_probe import SocketProbe

Ends = tuple[socket.socket, socket.socket]
NOTIFICATION = b"A\0\0\0\x10\0\0\0\1dblock\0\0"


@pytest.fixture
def ends() -> Iterator[Ends]:
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    listener.close()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def probe(ends: Ends) -> Iterator[SocketProbe]:
    probe = SocketProbe(ends[0].fileno())
    yield probe
    probe.close()


def test_presence_stands_for_a_while_after_a_heartbeat(probe: SocketProbe) -> None:
    presence = Presence("aa", 0.15, probe, 100)
    assert presence.stands(100 + default.trusted_for - 0.01)
    assert not presence.stands(100 + default.trusted_for)
    presence.confirm(110)
    assert presence.stands(100 + default.trusted_for)
    assert presence.left(110) == default.trusted_for


def test_presence_falls_when_the_server_closes_the_connection(ends: Ends, probe: SocketProbe) -> None:
    presence = Presence("aa", 0.15, probe, 100)
    ends[1].sendall(NOTIFICATION)
    assert presence.stands(101)
    ends[1].close()
    assert not presence.stands(111), "the last probe was ten seconds ago, so the session may have ended then"


def test_recent_probe_bounds_how_long_a_presence_can_have_been_gone(ends: Ends, probe: SocketProbe) -> None:
    presence = Presence("aa", 0.15, probe, 100)
    assert presence.stands(101)
    ends[1].close()
    assert presence.stands(101 + 0.15 * default.own_part - 0.001)
    assert not presence.stands(101 + 0.15 * default.own_part)


def test_presence_in_doubt_falls_and_an_ended_presence_binds_nothing(probe: SocketProbe) -> None:
    presence = Presence("aa", 0.15, probe, 100)
    presence.doubt()
    assert not presence.stands(101)
    presence.end()
    assert presence.stands(101)
    assert presence.stands(100 + 2 * default.trusted_for)


def test_presence_is_thread_safe(probe: SocketProbe) -> None:
    presence = Presence("aa", 0.15, probe, 100)
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda _: presence.stands(101), range(5000)))


def test_socket_closed_by_this_process_is_not_open(probe: SocketProbe) -> None:
    presence = Presence("aa", 0.15, probe, 100)
    probe.close()
    assert not presence.stands(101)
