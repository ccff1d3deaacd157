"""A presence is a session of the server itself: there is none where something stands in between."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

import dblock
from dblock._core import statements
from dblock._runtime.listener_connection import ListenerConnection
from tests.support.emulator import EmulatingPooler
from tests.support.eventually import eventually
from tests.support.pretender import pretend
from tests.support.proxy import Proxy


def presences(owner: psycopg.Connection) -> Any:
    return owner.execute("SELECT count(*) FROM lock_presence").fetchone()


def test_pooler_that_registers_the_presence_on_its_own_session_gets_none(
    dsn: str, owner: psycopg.Connection, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not str(conninfo.conninfo_to_dict(dsn).get("host")).startswith("/"):
        pytest.skip("the pooler of this test stands on a Unix socket")
    with EmulatingPooler(dsn, tmp_path, b"register_presence") as pooler, dblock.Client(pooler.dsn) as client:
        lease = client.lock("a", ttl=30).acquire()
        eventually(lambda: client._runtime.listener.flow.connection)
        assert pooler.diverted == 1
        assert client._runtime.flows.presence is None
        assert "There is no presence" in caplog.text
        assert presences(owner) == (0,), "what was registered was withdrawn"
        lease.renew()
        assert client._runtime.listener.flow.connection is not None


def test_proxy_that_changes_addresses_gets_no_presence(dsn: str, owner: psycopg.Connection) -> None:
    with Proxy(dsn) as proxy, dblock.Client(proxy.dsn) as client:
        client.lock("a", ttl=30).acquire()
        eventually(lambda: client._runtime.listener.flow.connection)
        assert client._runtime.flows.presence is None
        assert presences(owner) == (0,)


@pytest.mark.usefixtures("needs_presence")
@pytest.mark.parametrize("end", range(5))
def test_connection_is_direct_only_if_each_end_matches(dsn: str, end: int) -> None:
    """Over TCP a proxy shows by the client's end, and a translated address of the server by the server's."""
    with Proxy(dsn) as proxy, psycopg.connect(proxy.dsn) as connection:
        listener = ListenerConnection(connection, lambda payload: None)
        row = connection.execute(statements.WHICH_ENDPOINTS.sql).fetchone()
        assert row is not None
        assert not listener.is_direct(*row)
        with psycopg.connect(dsn) as direct:
            row = direct.execute(statements.WHICH_ENDPOINTS.sql).fetchone()
            assert row is not None
            assert ListenerConnection(direct, lambda payload: None).is_direct(*(one and str(one) for one in row))
        client, server = _names(connection)
        ends: list[str] = [str(connection.info.backend_pid), *client, *server]
        assert listener.is_direct(*ends)
        ends[end] = "9" if end in (0, 2, 4) else "192.0.2.7"
        assert not listener.is_direct(*ends)


def _names(connection: psycopg.Connection) -> tuple[list[str], list[str]]:

    with socket.socket(fileno=os.dup(connection.fileno())) as opened:
        return [str(one) for one in opened.getsockname()], [str(one) for one in opened.getpeername()]


@pytest.mark.second_stage
@pytest.mark.parametrize("what", ["LISTEN", pytest.param("NOTIFY", marks=pytest.mark.second_stage)])
def test_waiters_are_served_by_a_server_without_notifications(
    dsn: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """The waiter once got no turn at all where LISTEN is refused, because its heartbeat was sent after it."""
    with Proxy(dsn, tmp_path) as proxy, dblock.Client(dsn) as holder, dblock.Client(proxy.dsn) as client:
        if what == "LISTEN":
            proxy.rewrites = {b'LISTEN "dblock_': b'LISTXX "dblock_'}
        else:
            pretend(dsn, {"pg_notify(text, text)": "RETURNS void LANGUAGE sql AS 'SELECT NULL::void'"})
        lease = holder.lock("a").acquire()
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(client.lock("a", timeout=20).acquire)
            eventually(lambda: holder.lock("a").queue())
            sent, began = proxy.requests, time.monotonic()
            time.sleep(0.5)
            assert proxy.requests - sent < 80 * (time.monotonic() - began)
            released = time.monotonic()
            lease.release()
            assert waiting.result().token > lease.token
            assert time.monotonic() - released < 5, "not when the lease ends"
    refused = [record for record in caplog.records if "refused" in record.getMessage()]
    assert len(refused) == (what == "LISTEN"), "said once"
