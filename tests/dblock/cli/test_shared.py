"""The commands for operators, on read-write locks and semaphores."""

from __future__ import annotations

import psycopg
import pytest

import dblock
from tests.support.shell import Shell

STILL_ALIVE = "UPDATE lock_clients SET seen_until = now() + interval '1 hour'"


@pytest.fixture
def held(client: dblock.Client, owner: psycopg.Connection) -> list[dblock.PermitLease]:
    """Eleven permits of twelve, and a read-write lock with a reader that a writer waits for."""
    client.read_lock("prices", ttl=60, keep_alive=False).acquire()
    owner.execute(
        "SELECT acquire_shared('prices', 'read-write', 'write', attempt => gen_random_uuid(),"
        " client => gen_random_uuid(), holder => 'carol')"
    )
    owner.execute(STILL_ALIVE)
    semaphore = client.semaphore("gpus", permits=12, ttl=60, keep_alive=False)
    return [semaphore.acquire() for _ in range(11)]


@pytest.mark.usefixtures("held")
def test_shares_are_listed_below_their_lock(shell: Shell, client: dblock.Client) -> None:
    client.lock("gpus!", ttl=60).acquire()  # sorts between the semaphore and its shares
    listed = [row.split() for row in shell.run("ls").out.splitlines()[1:]]
    shares = [f"gpus#{number}" for number in range(11)]
    assert [row[0] for row in listed] == ["gpus", *shares, "gpus!", "prices", "prices#reader-0"]
    kinds = {row[0]: row[1:3] for row in listed}
    assert (kinds["gpus"], kinds["gpus#10"]) == (["semaphore", "held"], ["permit", "held"])
    assert (kinds["prices"], kinds["prices#reader-0"]) == (["read-write", "held"], ["reader", "held"])
    assert "11 of 12 permits" in " ".join(listed[0])
    found = {one["name"]: one for one in shell.run("ls", "gpus", "--json").json}
    assert list(found) == ["gpus", *shares]
    assert (found["gpus"]["kind"], found["gpus"]["permits"], found["gpus"]["held"]) == ("semaphore", 12, 11)
    assert (found["gpus#3"]["kind"], found["gpus#3"]["head"], found["gpus#3"]["held"]) == ("permit", "gpus", None)
    assert found["gpus"]["released_at"] is None, "it is held"


@pytest.mark.usefixtures("held")
def test_show_prints_all_holders_and_what_waiters_wait_for(shell: Shell, owner: psycopg.Connection) -> None:
    owner.execute("SELECT record_event('gpus#0', 1, 'expired', 'yesterday', now() - interval '1 day')")
    shown = shell.run("show", "gpus").out
    for part in ("semaphore", "held, 11 of 12 permits", "gpus#10", "yesterday"):
        assert part in shown
    assert len(shell.run("show", "gpus", "--json").json["shares"]) == 11
    assert [row.split()[2:] for row in shell.run("waiters").out.splitlines()][1][0] == "carol"
    assert [one["mode"] for one in shell.run("waiters", "--json").json] == ["write"]
    assert "write" in shell.run("show", "prices").out
    watched = shell.run("history", "gpus", "--json").json
    assert [one["name"] for one in watched] == ["gpus#0"]


def test_force_release_takes_one_holder_of_several(shell: Shell, held: list[dblock.PermitLease]) -> None:
    refused = shell.run("force-release", "gpus", "--yes")
    assert refused.code == 1
    assert f"has 11 holders. Choose one by its name or with --token: gpus#0 (token {held[0].token}" in refused.err
    done = shell.run("force-release", "gpus", "--token", str(held[3].token), "--now", "--yes")
    assert done.code == 0, done.err
    assert done.out.startswith("Took share 'gpus#3'")
    assert "The share is free." in done.out, "the semaphore is not"
    assert "gpus#3" in shell.run("history", "gpus").out
    assert "gpus#3" in shell.run("show", "gpus").out
    with pytest.raises(dblock.LeaseLost):
        held[3].renew()
    assert shell.run("force-release", "gpus#4", "--now", "--yes").code == 0
    with pytest.raises(dblock.LeaseLost):
        held[4].renew()
    held[5].renew()
    assert "is not held under token 7" in shell.run("force-release", "gpus", "--token", "7", "--yes").err


def test_delete_frees_a_name_that_is_not_in_use(
    shell: Shell, client: dblock.Client, held: list[dblock.PermitLease]
) -> None:
    refused = shell.run("delete", "gpus")
    assert refused.code == 1
    assert "is in use" in refused.err
    for lease in held:
        lease.release()
    alone = shell.run("delete", "gpus#0").err
    assert alone.endswith("is a permit of the semaphore 'gpus'. It cannot be deleted alone. Delete 'gpus'.\n")
    assert shell.run("delete", "gpus", "--json").json == {"name": "gpus", "deleted": True}
    assert client.lock("gpus").acquire().token > held[-1].token
    assert "is not there" in shell.run("delete", "gpus#0").err
