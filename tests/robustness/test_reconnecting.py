"""After a restart or move of the database, clients continue by themselves and know which leases they still have."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

import dblock
from dblock._core.lease_state import LeaseState
from dblock.embedded import Server
from tests.support.eventually import eventually
from tests.support.machine import measured
from tests.support.proxy import Proxy
from tests.support.standby import kill, promote, standby_of, wait_until_caught_up
from tests.support.warm_start import Program

pytestmark = pytest.mark.timeout(120)


def wait_for_renewal(lease: dblock.Lease) -> None:
    before = lease.expires_at
    eventually(lambda: lease.expires_at != before or lease.lost.is_set(), "a renewal")
    assert lease.expires_at != before, repr(lease)


@pytest.mark.second_stage
def test_leases_survive_a_restart(own_server: Server) -> None:
    with dblock.Client(own_server.url, presence=None) as client:
        lease = client.lock("a", ttl=9).acquire()
        wait_for_renewal(lease)
        own_server.stop()
        with pytest.raises(dblock.Unavailable):
            client.lock("b").acquire()
        own_server.start()
        wait_for_renewal(lease)
        assert client.lock("b").acquire().token > lease.token
        assert lease.release() is True


@pytest.mark.second_stage
def test_leases_survive_a_move_to_another_host_of_the_dsn(dsn: str) -> None:
    with Proxy(dsn) as one, Proxy(dsn) as other:
        ports = [str(conninfo.conninfo_to_dict(proxy.dsn)["port"]) for proxy in (one, other)]
        both = conninfo.make_conninfo(one.dsn, host="127.0.0.1,127.0.0.1", port=",".join(ports))
        with dblock.Client(both) as client:
            lease = client.lock("a", ttl=5).acquire()
            wait_for_renewal(lease)
            one.close()
            wait_for_renewal(lease)
            assert client.lock("b").acquire().release()
            assert lease.release() is True


@pytest.mark.second_stage
def test_lease_lost_in_a_failover_has_the_right_reason(own_server: Server) -> None:
    """The lease granted after the standby was cut off is lost. The lease that was replicated before is kept."""
    with standby_of(own_server) as standby:
        hosts = [conninfo.conninfo_to_dict(each.url) for each in (own_server, standby)]
        both = conninfo.make_conninfo(
            own_server.url, host=",".join(str(host["host"]) for host in hosts), port="5432,5432"
        )
        with dblock.Client(both, presence=None) as client:
            replicated = client.lock("replicated", ttl=60).acquire()
            wait_until_caught_up(own_server, standby)
            standby.stop()
            lost = client.lock("lost", ttl=60).acquire()
            kill(own_server)
            standby.start()
            promote(standby)
            for lease in (replicated, lost):
                assert isinstance(lease._state, LeaseState)
                lease._state.sent_at -= 60  # due now, not in twenty seconds
            client.lock("next", ttl=1).acquire()
            assert lost.lost.wait(20) is True
            assert lost.lost.reason is dblock.Reason.SUPERSEDED
            assert not replicated.lost.is_set()
            next_token = client.lock("lost").acquire().token
            assert next_token > lost.token


@pytest.mark.second_stage
def test_acknowledged_grant_survives_a_synchronous_failover(own_server: Server) -> None:
    """The primary is killed right after the grants were acknowledged. With synchronous replication nothing is lost."""
    with standby_of(own_server) as standby:
        wait_until_caught_up(own_server, standby)
        with psycopg.connect(own_server.url, autocommit=True) as owner:
            owner.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            owner.execute("SELECT pg_reload_conf()")
            # A role's default that does not wait must not matter.
            owner.execute("ALTER ROLE postgres SET synchronous_commit = off")
            synchronous = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
            eventually(lambda: owner.execute(synchronous).fetchone(), "commits wait for the standby")
        with dblock.Client(own_server.url, patience=30) as client:
            tokens = {f"{number}": client.lock(f"{number}", ttl=600).acquire().token for number in range(20)}
            kill(own_server)
            promote(standby)
            with dblock.Client(standby.url) as survivor:
                for name, token in tokens.items():
                    holder = survivor.lock(name).holder()
                    assert holder is not None, f"the grant of {name} under token {token} is gone"
                    assert holder.token == token


@pytest.mark.second_stage
def test_lock_of_a_killed_holder_is_granted_again_after_its_ttl(dsn: str, owner: psycopg.Connection) -> None:
    def one(column: str) -> Any:
        return owner.execute(f"SELECT {column} FROM distributed_locks WHERE name = 'a'".encode()).fetchone()[0]  # type: ignore[index]

    # On a machine that stalls, the lease may be lost before it is renewed. Then the holder acquires another one.
    script = (
        "import dblock, sys; client = dblock.Client(sys.argv[1], presence=None)\n"
        "while True: lease = client.lock('a', ttl=2).acquire(); lease.lost.wait()"
    )
    named = conninfo.make_conninfo(dsn, application_name="holder")
    sessions = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'holder'"
    with (
        Program([sys.executable, "-c", script, named]) as holder,
        dblock.Client(dsn) as client,
        measured() as lateness,
    ):
        eventually(lambda: one("bool_or(expires_at > granted_at + interval '2.2 s')"), "a renewal")
        holder.kill()
        holder.wait()
        # A session that has ended has carried out all that was sent to it, such as a renewal.
        eventually(lambda: not owner.execute(sessions).fetchone(), "the end of its sessions")
        lost, expired = one("token"), one("expires_at")
        lease = client.lock("a").acquire(timeout=60)
        assert timedelta() <= one("granted_at") - expired < timedelta(seconds=1 + lateness())
        assert lease.token > lost


@pytest.mark.second_stage
def test_standby_and_old_primary_grant_nothing(own_server: Server) -> None:
    with standby_of(own_server) as standby:
        with dblock.Client(standby.url) as client, pytest.raises(dblock.NotWritable):
            client.lock("a").acquire()
        with psycopg.connect(own_server.url, autocommit=True) as owner:
            owner.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            owner.execute("SELECT pg_reload_conf()")

            def refuses() -> bool:
                with psycopg.connect(own_server.url) as session:
                    return session.execute("SHOW default_transaction_read_only").fetchone() == ("on",)

            eventually(refuses, "sessions are read-only")
        with dblock.Client(own_server.url) as client, pytest.raises(dblock.NotWritable):
            client.lock("a").acquire()
