"""The store is strict between holders, and lets one holder write as often as it likes (invariant 10 of the design)."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

import dblock
import fenced_store
from fenced_store import InvalidArgument, NotInstalled, OutcomeUnknown, StaleTokenError, VersionConflict, _calls
from tests.fenced_store.postgres.conftest import Stores
from tests.support.proxy import Proxy
from tests.support.stages import first

VALUES: list[Any] = [
    {"a": [1, 2.5, None, "ß \N{SNOWMAN} \\u0000 \\ ' \""]},
    [], None, "", 0, False, b"", b"\x00\xff bytes", "x" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("value", first(3, VALUES), ids=repr)
async def test_get_returns_the_value_that_was_put(stores: Stores, value: Any) -> None:
    store = stores()
    stored = await store.put("k", value, fence=1)
    got = await store.get("k")
    assert (got.value, type(got.value)) == (value, type(value))
    assert (got.version, got.token, got.deleted) == (1, 1, False)
    assert got.stored_at == stored.stored_at
    assert stored == fenced_store.Stored("k", 1, 1, stored.write, stored.stored_at, False)


async def test_missing_key_is_none(stores: Stores) -> None:
    store = stores()
    assert await store.get("k") is None
    assert await store.history("k") == []


async def test_holder_writes_a_key_many_times(stores: Stores) -> None:
    store = stores()
    for number in range(20):
        assert (await store.put("k", number, fence=7)).version == number + 1
    assert (await store.get("k")).value == 19


async def test_lower_token_is_refused_with_all_details(stores: Stores) -> None:
    store = stores()
    stored = await store.put("k", "new", fence=8)
    with pytest.raises(StaleTokenError) as caught:
        await store.put("k", "old", fence=7)
    error = caught.value
    assert (error.resource, error.offered, error.stored, error.stored_at) == ("k", 7, 8, stored.stored_at)
    assert "'k'" in str(error)
    assert "token 7" in str(error)
    assert "token 8" in str(error)
    assert (await store.get("k")).value == "new"
    with pytest.raises(StaleTokenError):
        await store.delete("k", fence=7)
    assert (await store.get("k")).version == 1


async def test_delayed_write_is_refused(stores: Stores) -> None:
    """The write was buffered before a pause and delivered after a later write, of the same holder or of another."""
    store = stores()
    await store.put("k", "third", fence=7, write=3)
    with pytest.raises(StaleTokenError, match="a later write of the same holder"):
        await store.put("k", "second", fence=7, write=2)
    await store.put("k", "next holder", fence=8, write=1)
    with pytest.raises(StaleTokenError):
        await store.put("k", "fourth", fence=7, write=4)
    assert (await store.get("k")).value == "next holder"


async def test_deleting_keeps_the_fence(stores: Stores) -> None:
    store = stores()
    await store.put("k", 1, fence=7)
    assert (await store.delete("k", fence=8)).version == 2
    assert await store.get("k") is None
    with pytest.raises(StaleTokenError):
        await store.put("k", 2, fence=7)
    assert (await store.put("k", 3, fence=8)).version == 3
    await store.delete("never there", fence=9)
    with pytest.raises(StaleTokenError):
        await store.put("never there", 1, fence=8)


async def test_history_is_bounded_and_holds_deletions(stores: Stores) -> None:
    store = stores(history=3)
    for value in "abcde":
        await store.put("k", value, fence=1)
    await store.delete("k", fence=2)
    past = await store.history("k")
    assert [(one.version, one.value, one.token, one.deleted) for one in past] == [
        (6, None, 2, True), (5, "e", 1, False), (4, "d", 1, False),
    ]  # fmt: skip
    assert [one.version for one in await store.history("k", 1)] == [6]
    without = stores(history=0)
    await without.put("other", 1, fence=1)
    assert await without.history("other") == []


async def test_repeated_write_is_stored_once(stores: Stores) -> None:
    store = stores()
    first = await store.put("k", {"b": 1, "a": 2}, fence=7, write=5)
    again = await store.put("k", {"a": 2, "b": 1}, fence=7, write=5)
    assert (first.repeated, again.repeated) == (False, True)
    assert (again.version, again.stored_at) == (1, first.stored_at)
    await store.put("k", b"later", fence=8)
    assert (await store.put("k", {"a": 2, "b": 1}, fence=7, write=5)).version == 1, "accepted and then overwritten"
    assert (await store.get("k")).value == b"later"
    gone = await store.delete("k", fence=8, write=2**62)
    assert (await store.delete("k", fence=8, write=2**62)).version == gone.version


async def test_different_write_under_the_same_number_is_refused(stores: Stores) -> None:
    store = stores()
    await store.put("k", "one", fence=7, write=5)
    with pytest.raises(StaleTokenError, match="another write under the same number"):
        await store.put("k", "other", fence=7, write=5)
    with pytest.raises(StaleTokenError):
        await store.delete("k", fence=7, write=5)
    assert (await store.get("k")).value == "one"


async def test_claim_is_not_taken_for_a_repeated_write(stores: Stores) -> None:
    store = stores()
    await store.claim("k", fence=7)
    assert await store.get("k") is None
    assert not (await store.put("k", 1, fence=7, write=1)).repeated


async def test_claim_refuses_stale_writers_before_the_first_write(stores: Stores) -> None:
    store = stores()
    await store.put("k", "old", fence=7)
    await store.claim("k", "l", fence=8)
    await store.claim("k", fence=8)
    for key in "kl":
        with pytest.raises(StaleTokenError) as caught:
            await store.put(key, "stale", fence=7)
        assert caught.value.stored == 8
    assert (await store.get("k")).value == "old", "a claim keeps the value"
    await store.put("k", "new", fence=8)
    await store.claim("k", fence=8)
    assert (await store.put("k", "newer", fence=8)).version == 3
    with pytest.raises(fenced_store.FenceAhead, match="dblock token raise --above 8"):
        await store.claim("k", fence=7)


async def test_late_claim_is_stale(stores: Stores) -> None:
    store = stores()
    await store.claim("k", fence=8)
    with pytest.raises(StaleTokenError) as caught:
        await store.claim("k", fence=7)
    assert (caught.value.resource, caught.value.offered, caught.value.stored) == ("k", 7, 8)
    assert "acquire it again" in str(caught.value)


async def test_value_keeps_its_writer_after_a_claim(stores: Stores) -> None:
    store = stores(writer="the writer")
    stored = await store.put("k", "v", fence=3)
    await stores(writer="the next one").claim("k", fence=8)
    read = await store.get("k")
    assert (read.token, read.stored_at, read.stored_by) == (3, stored.stored_at, "the writer")
    await store.put("k", "w", fence=8)
    assert (await store.get("k")).token == 8


async def test_late_repeat_of_a_version_write_is_not_stored_again(stores: Stores) -> None:
    store = stores()
    await store.put("k", 1, fence=7, if_version=0, write=5)
    await store.delete("k", fence=7, write=6)
    assert (await store.put("k", 1, fence=7, if_version=0, write=5)).repeated
    assert await store.get("k") is None


async def test_compare_and_set_needs_no_lock(stores: Stores) -> None:
    store = stores()
    assert (await store.put("k", 1, if_version=0)).version == 1
    with pytest.raises(VersionConflict) as caught:
        await store.put("k", 1, if_version=0)
    assert (caught.value.key, caught.value.expected, caught.value.version) == ("k", 0, 1)
    assert (await store.put("k", 2, if_version=1)).version == 2
    with pytest.raises(VersionConflict):
        await store.delete("k", if_version=1)
    await store.delete("k", if_version=2)
    with pytest.raises(VersionConflict) as caught:
        await store.put("k", 3, if_version=2)
    assert caught.value.version == 0
    assert (await store.put("k", 3, if_version=0)).version == 4
    with pytest.raises(VersionConflict):
        await store.put("never there", 1, if_version=1)
    assert await store.get("never there") is None


async def test_write_with_version_and_token_needs_both(stores: Stores) -> None:
    store = stores()
    await store.put("k", 1, fence=7)
    with pytest.raises(VersionConflict):
        await store.put("k", 2, fence=8, if_version=5)
    with pytest.raises(StaleTokenError):
        await store.put("k", 2, fence=6, if_version=1)
    assert (await store.put("k", 2, fence=7, if_version=1)).version == 2
    assert (await store.put("k", 3, if_version=2)).token == 7, "a write without a token keeps the fence"
    with pytest.raises(StaleTokenError):
        await store.put("k", 4, fence=6)


@pytest.mark.parametrize("terms", [{"fence": 7}, {"if_version": 0}], ids=["token", "version"])
async def test_write_whose_reply_was_lost_is_stored_once(
    stores: Stores, owner: psycopg.Connection, terms: dict[str, int]
) -> None:
    """The connection is cut after the commit and before the reply."""
    with Proxy(stores.dsn) as proxy:
        store = stores(proxy.dsn)
        await store.get("warm")
        proxy.lose_reply_to(b"the key in question")
        stored = await store.put("the key in question", "value", **terms)
        assert proxy.lost == 1
        assert (stored.version, stored.repeated) == (1, True)
        assert owner.execute("SELECT count(*) FROM fenced_store.versions").fetchone() == (1,)
        proxy.lose_reply_to(b"the key in question")
        gone = await store.delete("the key in question", **({"if_version": 1} if "if_version" in terms else terms))
        assert (gone.version, gone.repeated) == (2, True)


async def test_write_without_any_reply_is_unknown_and_can_be_retried(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_calls, "PAUSE", 0.01)
    with Proxy(stores.dsn) as proxy:
        store = stores(proxy.dsn)
        proxy.lose_reply_to(b"the key in question", times=9)
        with pytest.raises(OutcomeUnknown) as caught:
            await store.put("the key in question", "value", fence=7)
    again = await stores().put("the key in question", "value", fence=7, write=caught.value.write)
    assert (again.version, again.repeated) == (1, True)


async def test_rejections_are_recorded_with_both_writers(stores: Stores, owner: psycopg.Connection) -> None:
    store = stores(writer="the new one")
    await store.put("k", 1, fence=8)
    stale = stores(writer="the old one")
    with pytest.raises(StaleTokenError):
        await stale.put("k", 2, fence=7)
    (noted,) = fenced_store.rejections(stores.dsn)
    assert (noted.resource, noted.offered, noted.stored, noted.refused) == ("k", 7, 8, True)
    assert (noted.rejected, noted.stored_by) == ("the old one", "the new one")
    assert fenced_store.rejections(stores.dsn, "other") == []
    owner.execute("DROP TABLE fenced_store.rejections")
    with pytest.raises(StaleTokenError):
        await stale.put("k", 2, fence=7)


def test_recorded_rejections_are_bounded(store: fenced_store.FencedStore, owner: psycopg.Connection) -> None:
    store.put("k", 1, fence=2)
    with pytest.raises(StaleTokenError):
        store.put("k", 1, fence=1)
    owner.execute("ALTER TABLE fenced_store.rejections ALTER COLUMN id RESTART WITH 20000")
    with pytest.raises(StaleTokenError):
        store.put("k", 1, fence=1)
    assert owner.execute("SELECT count(*), min(id) FROM fenced_store.rejections").fetchone() == (1, 20000)


HOSTILE = [
    "'; DROP TABLE fences; --",
    'a"b',
    "%s %(x)s :key \\ $1 {0}",
    "ünï\N{SNOWMAN}",
    "\n\t",
    "x" * 1024,
    "a:b",
    "public.t:1",
]


@pytest.mark.parametrize("name", first(3, HOSTILE), ids=ascii)
async def test_every_valid_name_is_a_key(stores: Stores, name: str) -> None:
    store = stores(writer=name[:512])
    await store.put(name, name, fence=1)
    await store.claim(name, name + "?" if len(name) < 1024 else name, fence=2)
    with pytest.raises(StaleTokenError):
        await store.put(name, name, fence=1)
    assert (await store.get(name)).value == name
    (noted,) = fenced_store.rejections(stores.dsn, name)
    assert noted.rejected == name[:512]


@pytest.mark.parametrize(
    "name", ["", "x" * 1025, "ü" * 513, "x" * 10_240, "nul\0", "\ud800", 42, None, b"k"], ids=ascii
)
async def test_invalid_name_is_refused_before_anything_is_sent(unreachable: Any, name: Any) -> None:
    for call in (
        unreachable.put(name, 1, fence=1), unreachable.delete(name, fence=1), unreachable.get(name),
        unreachable.history(name), unreachable.claim(name, fence=1),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match="resource's name"):
            await call


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs fence="),
        ({"fence": 0}, "from 1"),
        ({"fence": -3}, "from 1"),
        ({"fence": 2**63}, "from 1"),
        ({"fence": True}, "got bool"),
        ({"fence": "7"}, "got str"),
        ({"fence": 7.0}, "got float"),
        ({"fence": object()}, "got object"),
        ({"if_version": -1}, "version"),
        ({"if_version": "1"}, "version"),
        ({"fence": 1, "write": 0}, "write number"),
        ({"fence": 1, "write": "1"}, "write number"),
    ],
    ids=lambda one: (
        one if isinstance(one, str) else ", ".join(f"{key} {type(value).__name__}" for key, value in one.items())
    ),
)
async def test_invalid_options_are_refused(unreachable: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        await unreachable.put("k", 1, **options)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({1, 2}, "neither bytes nor JSON"),
        (float("nan"), "JSON"),
        ("\0", "NUL"),
        ({"a": ["\0"]}, "NUL"),
        ("\ud800", "surrogate"),
    ],
    ids=ascii,
)
async def test_invalid_values_are_refused(unreachable: Any, value: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        await unreachable.put("k", value, fence=1)


async def test_database_checks_its_arguments_again(owner: psycopg.Connection) -> None:
    for call, state in (
        ("write('', 1, 1, '1', NULL)", "22023"),
        ("write(repeat('x', 1025), 1, 1, '1', NULL)", "22023"),
        ("write('k', 0, 1, '1', NULL)", "FEN03"),
        ("write('k', NULL, 1, '1', NULL)", "FEN03"),
        ("write('k', -5, 1, '1', NULL, if_version => 0)", "FEN03"),
        ("raise_fence('k', -1)", "FEN03"),
        ("raise_fence('', 1)", "22023"),
        ("claim('{k}', 0)", "FEN03"),
        ("claim('{\"\"}', 1)", "22023"),
    ):
        with pytest.raises(psycopg.Error) as caught:
            owner.execute(f"SELECT fenced_store.{call}".encode())
        assert caught.value.sqlstate == state, call


async def test_missing_schema_names_the_command_to_run(stores: Stores, bare_dsn: str) -> None:
    store = stores(bare_dsn)
    for call in (store.put("k", 1, fence=1), store.get("k"), store.claim("k", fence=1)):
        with pytest.raises(NotInstalled, match="dblock fence setup"):
            await call
    advice = "dblock fence setup --fences billing"
    with fenced_store.FencedStore(bare_dsn, schema="billing") as other, pytest.raises(NotInstalled, match=advice):
        other.get("k")


def test_lease_is_a_fence_and_efficiency_lease_is_not(client: dblock.Client, store: fenced_store.FencedStore) -> None:
    lease = client.lock("a").acquire()
    assert store.put("k", 1, fence=lease).token == lease.token
    assert f"lock {lease.name!r}" in str(store.get("k"))
    wasteful = client.efficiency_lock("b").acquire()
    with pytest.raises(dblock.NoFencingToken):
        # The type checker refuses it too; if it did not, the unused ignore in the next line would be an error.
        store.put("k", 2, fence=wasteful)  # type: ignore[arg-type]


def test_token_of_another_service_is_not_joined_with_a_dblock_grant(
    client: dblock.Client, store: fenced_store.FencedStore, dsn: str
) -> None:
    lease = client.lock("not involved").acquire()
    store.put("k", 1, fence=lease.token + 1)
    client.lock("not involved either").acquire()
    with pytest.raises(StaleTokenError):
        store.put("k", 2, fence=lease.token)
    owned = fenced_store.rejections(dsn)[0]
    assert owned.stored == lease.token + 1
    with fenced_store.FencedStore(dsn, writer="zookeeper") as other:
        other.put("l", 1, fence=lease.token + 1)
        with pytest.raises(StaleTokenError):
            other.put("l", 1, fence=lease.token)
    assert fenced_store.rejections(dsn)[0].lock is None


@pytest.mark.parametrize("dsn", ["nonsense", "sqlite://", "postgresql://me:sec ret@host:x y/"])
def test_unreadable_dsn_is_refused_and_not_shown(dsn: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        fenced_store.FencedStore(dsn)
    assert "sec ret" not in str(caught.value)


def test_token_of_another_service_is_accepted(store: fenced_store.FencedStore) -> None:
    class Etcd:
        token = 4_611_686_018_427_387_904

    assert store.put("k", 1, fence=Etcd()).token == Etcd.token


async def test_granted_role_can_raise_a_fence_but_not_lower_it(
    stores: Stores, owner: psycopg.Connection, role: str
) -> None:
    from psycopg import conninfo

    app = conninfo.make_conninfo(stores.dsn, user=role, password="app")
    with pytest.raises(fenced_store.AccessDenied, match="dblock fence grant ROLE"):
        await stores(app).put("k", 1, fence=8)
    fenced_store.grant(stores.dsn, role)
    with pytest.raises(fenced_store.AccessDenied, match="was granted nothing"):
        fenced_store.grant(app, "pg_monitor")
    with pytest.raises(fenced_store.AccessDenied, match="Only the role that ran"):
        fenced_store.rejections(app)
    await stores(app).put("k", 1, fence=8)
    with psycopg.connect(app, autocommit=True) as connection:
        for statement in (
            "UPDATE fenced_store.fences SET token = 1",
            "DELETE FROM fenced_store.fences",
            "TRUNCATE fenced_store.fences",
            "SELECT * FROM fenced_store.fences",
            "DELETE FROM fenced_store.rejections",
            "SELECT fenced_store.purge_deleted_fences('1 day')",
            "SELECT fenced_store.insert_rejection('k', 1, 1, 1, 1, NULL, NULL, NULL, true)",
            "CREATE TABLE fenced_store.mine ()",
            "CREATE FUNCTION fenced_store.refuse() RETURNS void LANGUAGE sql AS ''",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())
        # A schema of the role's own at the head of search_path does not change what the functions call.
        connection.execute("CREATE TEMP TABLE fences (resource text PRIMARY KEY, token bigint)")
        connection.execute("SET search_path TO pg_temp, public")
        with pytest.raises(psycopg.Error) as caught:
            connection.execute("SELECT fenced_store.raise_fence('k', 7)")
        assert caught.value.sqlstate == "FEN01"
        assert json.loads(caught.value.diag.message_detail or "")["stored"] == 8
    assert owner.execute("SELECT token FROM fenced_store.fences").fetchone() == (8,)


@pytest.mark.parametrize(
    ("call", "sqlstate"),
    [
        ("claim('{k}', 1, patience => 'NaN')", "22023"),
        ("claim('{k}', 1, patience => 'infinity')", "22023"),
        ("claim('{k}', 1, patience => 1e300)", "22023"),
        ("preserve_fence(NULL, 1)", "22023"),
        ("preserve_fence(repeat('x', 1025), 1)", "22023"),
        ("create_guard(0, '{id}')", "42809"),
        ("create_guard('pg_class', NULL)", "22023"),
        ("create_guard('pg_class', '{nothing}')", "22023"),
        ("create_guard('pg_class', '{relacl}')", "22023"),
        ("lock_table(0, 'ACCESS SHARE')", "42704"),
        ("lock_table(NULL, 'ACCESS SHARE')", "42704"),
        ("lock_table('pg_class', 'ACCESS SHARE MODE; SELECT 1; --')", "22023"),
        ("lock_table('pg_class', NULL)", "22023"),
        ("highest_token(0)", "42704"),
        ("protect_table(NULL)", "42704"),
    ],
)
def test_invalid_sql_arguments_raise_clear_errors(owner: psycopg.Connection, call: str, sqlstate: str) -> None:
    with pytest.raises(psycopg.Error) as refused:
        owner.execute(f"SELECT * FROM fenced_store.{call}".encode())
    assert refused.value.sqlstate == sqlstate


def test_optional_sql_arguments_may_be_null(owner: psycopg.Connection) -> None:
    owner.execute("SELECT fenced_store.raise_fence('k', 1, NULL)")
    owner.execute("SELECT fenced_store.claim('{k}', 2, patience => '-infinity')")
    assert owner.execute("SELECT token, write_number FROM fenced_store.fences").fetchone() == (2, 0)
    # With any search_path, because the function has its own.
    owner.execute("SET search_path TO public")
    assert owner.execute("SELECT fenced_store.guard_function_name('pg_class', 'k', '{oid}')").fetchone() is not None
