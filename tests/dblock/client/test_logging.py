"""What a client logs at DEBUG, and under which name the server shows its sessions."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine

import dblock
from tests.support.eventually import eventually, eventually_async
from tests.support.facade import Clients


@pytest.mark.second_stage
@pytest.mark.usefixtures("patient")
async def test_each_step_of_a_lock_is_logged_at_debug(clients: Clients, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "dblock")
    client, other = clients(), clients()
    lease = await client.lock("a", ttl=6).acquire()
    await eventually_async(lambda: "keep-alive: renewed 1 lease" in caplog.text, "the renewal is logged")
    with pytest.raises(dblock.LockTimeout):
        await other.lock("a").acquire(timeout=0.3)
    await lease.release()
    unkept = await client.lock("b", ttl=0.2, keep_alive=False).acquire()
    await asyncio.sleep(0.25)
    assert unkept.lost.is_set()
    for words in (
        "lock 'a': acquiring",
        f"lock 'a': granted, token {lease.token}",
        "lock 'a': queued, ticket",
        "keep-alive: renewed 1 lease",
        "lock 'a': not acquired within 0.3 s",
        f"lock 'a': released, token {lease.token}",
        f"lock 'b': lease under token {unkept.token} lost, expired",
    ):
        assert any(words in message for message in caplog.messages), (words, caplog.messages)


def test_sessions_of_an_engine_have_a_name(dsn: str, owner: psycopg.Connection[Any]) -> None:
    names = "SELECT DISTINCT application_name FROM pg_stat_activity WHERE application_name IN ('dblock', 'mine')"
    for options, expected in (({}, "dblock"), ({"application_name": "mine"}, "mine")):
        engine = create_engine("postgresql+psycopg://", creator=lambda o=options: psycopg.connect(dsn, **o))
        with dblock.Client(engine) as client, client.lock("a"):
            assert owner.execute(names).fetchall() == [(expected,)]
        # The server ends a session a moment after its client has closed it.
        eventually(lambda: not owner.execute(names).fetchall(), "the sessions of a closed client have ended")
