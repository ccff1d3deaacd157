"""Protected tables: which columns can be a key, and which resource a row has."""

from __future__ import annotations

import datetime
import decimal
import ipaddress
import random
import uuid
from typing import Any

import psycopg
import pytest

import fenced_store
from fenced_store import InvalidArgument, protect, row
from tests.fenced_store.postgres.tables.conftest import carrying, refused
from tests.support.stages import first


def test_row_resources_match_keys_of_all_types(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute(
        "CREATE TABLE many (a text, b timestamptz, c bytea, d uuid, e date, f numeric, v int,"
        " PRIMARY KEY (b, a, c, d, e, f))"
    )
    made = protect(dsn, "many")
    assert made.key == ("b", "a", "c", "d", "e", "f")
    inserted = (
        "('x,\\y', '2026-01-02 03:04:05+00', '\\x00ff', '00000000-0000-0000-0000-000000000001', '2026-01-02', 1.50, 1)"
    )
    carrying(owner, 8, f"INSERT INTO many VALUES {inserted}", "DELETE FROM many")
    # The resource of a row does not depend on how the session prints its key.
    for setting in ("TimeZone = 'Asia/Tokyo'", "DateStyle = 'German'", "bytea_output = 'escape'"):
        refused(owner, 7, f"SET LOCAL {setting}", f"INSERT INTO many VALUES {inserted}")
    key = ("2026-01-02T03:04:05", "x,\\y", "00ff", "00000000-0000-0000-0000-000000000001", "2026-01-02", "1.5")
    assert owner.execute("SELECT token FROM fenced_store.fences WHERE resource = %s", [made.row(*key)]).fetchone() == (
        8,
    )


def test_similar_keys_have_different_fences(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE pairs (a text, b text, v int, PRIMARY KEY (b, a))")
    protect(dsn, "pairs", key=["a", "b"])
    for a, b in (("x,y", "z"), ("x\\", ",z"), ("\\N", "z"), ("", ",")):
        owner.execute("INSERT INTO pairs VALUES (%s, %s)", [a, b])
    carrying(owner, 8, "DELETE FROM pairs")
    for a, b in (("x", "y,z"), ("x\\,", "z"), ("N", "z"), (",", ""), ("", "")):
        with owner.transaction():
            owner.execute("SELECT set_config('fenced_store.token', '7', true)")
            owner.execute("INSERT INTO pairs VALUES (%s, %s)", [a, b])
    refused(owner, 7, "INSERT INTO pairs VALUES ('x,y', 'z')")


def test_long_key_shares_no_fence_with_a_short_key(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE long (id text PRIMARY KEY)")
    made = protect(dsn, "long")
    carrying(owner, 8, "INSERT INTO long VALUES (repeat('ü', 1000))", "DELETE FROM long")
    refused(owner, 7, "INSERT INTO long VALUES (repeat('ü', 1000))")
    carrying(owner, 7, "INSERT INTO long VALUES (repeat('ü', 999))")
    (resource,) = owner.execute("SELECT max(resource) FROM fenced_store.fences").fetchone()  # type: ignore[misc]
    assert resource == made.row("ü" * 1000)
    assert made.row(resource.split(":", 1)[1]) != resource


EQUALS = {
    "numeric": ("1.0", "1.00"),
    "timestamptz": ("'2026-01-02 12:00+00'", "'2026-01-02 13:00+01'"),
    "bpchar": ("'a'", "'a '"),
    "varchar": ("'a'", "'a'"),
    "date": ("'2026-01-02'", "'Jan 2 2026'"),
    "bytea": ("'\\x61'", "'a'"),
    "uuid": ("'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", "'{a0eebc999c0b4ef8bb6d6bb9bd380a11}'"),
    "bool": ("true", "'yes'"),
    "mood": ("'fine'", "'fine'"),
    "positive": ("7.0", "7.00"),
}


@pytest.mark.parametrize("kind", first(4, EQUALS))
def test_equal_keys_have_one_fence(dsn: str, owner: psycopg.Connection, kind: str) -> None:
    owner.execute("CREATE TYPE mood AS ENUM ('fine')")
    owner.execute("CREATE DOMAIN positive AS numeric CHECK (VALUE > 0)")
    owner.execute(f"CREATE TABLE keyed (id {kind} PRIMARY KEY)".encode())
    protect(dsn, "keyed")
    one, other = EQUALS[kind]
    carrying(owner, 8, f"INSERT INTO keyed VALUES ({one})", "DELETE FROM keyed")
    refused(owner, 7, f"INSERT INTO keyed VALUES ({other})")


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("id float8 PRIMARY KEY", "double precision may not look the same"),
        ("id interval PRIMARY KEY", "interval may not"),
        ("id timestamptz[] PRIMARY KEY", "may not look the same"),
        ("id text COLLATE either PRIMARY KEY", "text may not"),
        ("id int GENERATED ALWAYS AS (v) STORED, PRIMARY KEY (id)", "it is generated"),
        ("id int UNIQUE", "it may be NULL"),
        ("id int NOT NULL", "No unique index"),
        ("id int NOT NULL UNIQUE DEFERRABLE", "No unique index"),
    ],
)
def test_columns_that_cannot_identify_rows_are_refused_as_key(
    dsn: str, owner: psycopg.Connection, column: str, said: str
) -> None:
    if "COLLATE" in column:
        try:
            owner.execute("CREATE COLLATION either (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
        except psycopg.errors.FeatureNotSupported:
            pytest.skip("this server has no ICU, and so no such collation")
    owner.execute(f"CREATE TABLE keyed (v int, {column})".encode())
    with pytest.raises(InvalidArgument, match=said):
        protect(dsn, "keyed", key="id")
    protect(dsn, "keyed", per="table")


def test_new_key_starts_above_every_token_seen(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE two (id int PRIMARY KEY, k int NOT NULL UNIQUE)")
    protect(dsn, "two")
    carrying(owner, 9, "INSERT INTO two VALUES (2, 12)", "DELETE FROM two")
    protect(dsn, "two", key="k")
    refused(owner, 8, "INSERT INTO two VALUES (2, 12)")


def test_timestamps_as_keys_do_not_depend_on_datestyle(
    dsn: str, owner: psycopg.Connection, store: fenced_store.FencedStore
) -> None:
    owner.execute("CREATE TABLE moments (id timestamptz PRIMARY KEY)")
    made = protect(dsn, "moments")
    store.claim(made.row(datetime.datetime(2014, 10, 25, 21, 30, tzinfo=datetime.timezone.utc)), fence=9)
    settings = ("SET LOCAL TimeZone = 'Europe/Moscow'", "SET LOCAL DateStyle = 'SQL'")
    refused(owner, 8, *settings, "INSERT INTO moments VALUES ('2014-10-25T21:30Z')")
    carrying(owner, 8, *settings, "INSERT INTO moments VALUES ('2014-10-25T22:30Z')")


ROWS = {
    "bool": (True, "true"),
    "timestamptz": (
        datetime.datetime(2026, 1, 2, 3, 4, 5, 120000, tzinfo=datetime.timezone.utc),
        "'2026-01-02 04:04:05.12+01'",
    ),
    "timestamp": (datetime.datetime(2026, 1, 2, 3, 4, 5), "'2026-01-02 03:04:05'"),
    "date": (datetime.date(2026, 1, 2), "'2026-01-02'"),
    "time": (datetime.time(3, 4, 5, 500000), "'03:04:05.5'"),
    "numeric": (decimal.Decimal("-1.50"), "-1.5"),
    "numeric ": (decimal.Decimal("1E+3"), "1000.00"),
    "numeric  ": (decimal.Decimal("0.00"), "0"),
    "bytea": (b"\x01\xff", "'\\x01ff'"),
    "uuid": (uuid.UUID("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"), "'A0EEBC999C0B4EF8BB6D6BB9BD380A11'"),
    "int": (-7, "-7"),
    "text": ("", "''"),
    "char(5)": ("ab", "'ab'"),
    "inet": (ipaddress.ip_address("10.0.0.1"), "'10.0.0.1/32'"),
}


@pytest.mark.parametrize("kind", first(6, ROWS))
def test_row_is_claimed_by_the_value_of_its_key(
    dsn: str, owner: psycopg.Connection, store: fenced_store.FencedStore, kind: str
) -> None:
    value, literal = ROWS[kind]
    owner.execute(f"CREATE TABLE keyed (id {kind} PRIMARY KEY)".encode())
    made = protect(dsn, "keyed")
    store.claim(made.row(value), fence=9)
    refused(owner, 8, f"INSERT INTO keyed VALUES ({literal})")


@pytest.mark.parametrize(
    "value", [1.5, None, [1], object(), decimal.Decimal("NaN"), "nul\0"], ids=lambda value: type(value).__name__
)
def test_value_that_cannot_be_a_key_names_no_row(value: Any) -> None:
    with pytest.raises(InvalidArgument):
        fenced_store.row("public.orders", value)


def addresses() -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Addresses of every shape: zero runs of all lengths and places, and IPv4 addresses inside of IPv6 ones."""
    chosen = random.Random(7)
    words = [0, 0, 0, 0, 1, 0x0102, 0x0304, 0xFF, 0xFFFF, 0xFFFF, 0xABCD]
    found = [
        ipaddress.IPv6Address(b"".join(chosen.choice(words).to_bytes(2, "big") for _ in range(8))) for _ in range(3000)
    ]
    for high in (0, 0xFFFF, 0xFFFE, 0xFFFF << 16, 0x64FF9B << 72):
        for low in (0, 1, 2, 0xFF, 0xFFFF, 0x10000, 0x01020304, 0x01020000, 0xFFFFFFFF, 0x80000001):
            found.append(ipaddress.IPv6Address(high << 32 | low))
    return [*found, *(ipaddress.IPv4Address(chosen.getrandbits(32)) for _ in range(50))]


def test_row_resources_name_every_address_as_postgres_writes_it(owner: psycopg.Connection) -> None:
    values = addresses()
    written = owner.execute(
        "SELECT concat(v::inet) FROM unnest(%s::text[]) WITH ORDINALITY AS u (v, n) ORDER BY n",
        ([one.exploded for one in values],),
    ).fetchall()
    wrong = [
        (row("t", value), text)
        for value, (text,) in zip(values, written, strict=True)
        if row("t", value) != f"t:{text}"
    ]
    assert not wrong, f"{len(wrong)} of {len(values)}: {wrong[:3]}"


def test_row_resources_name_networks_and_interfaces_as_postgres_writes_them(owner: psycopg.Connection) -> None:
    chosen = random.Random(8)
    for address in addresses()[::20]:
        size = chosen.choice([address.max_prefixlen, chosen.randrange(address.max_prefixlen + 1)])
        for value, kind in (
            (ipaddress.ip_interface((address, size)), "inet"),
            (ipaddress.ip_network((address, size), strict=False), "cidr"),
        ):
            assert row("t", value) == f"t:{_scalar(owner, f'SELECT concat(%s::{kind})', value.exploded)}"


def test_stale_write_is_refused_after_a_claim_by_an_ipv4_mapped_address(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE public.callers (address inet PRIMARY KEY, seen int)")
    callers = fenced_store.protect(dsn, "public.callers")
    for address in map(ipaddress.IPv6Address, ("::ffff:1.2.3.4", "::1.2.3.4")):
        owner.execute("INSERT INTO public.callers VALUES (%s, 0)", (address,))
        with fenced_store.FencedStore(dsn) as store:
            store.claim(callers.row(address), fence=60)
        with pytest.raises(psycopg.Error) as refused, owner.transaction():
            owner.execute("SET LOCAL fenced_store.token = '55'")
            owner.execute("UPDATE public.callers SET seen = 1 WHERE address = %s", (address,))
        assert refused.value.sqlstate == "FEN01"


def test_scoped_address_names_no_row() -> None:
    """Postgres has no type for an address with a zone."""
    with pytest.raises(InvalidArgument, match="fe80::1%eth0"):
        row("t", ipaddress.IPv6Address("fe80::1%eth0"))


def _scalar(connection: psycopg.Connection, statement: str, *values: Any) -> Any:
    found = connection.execute(statement.encode(), values).fetchone()
    assert found is not None
    return found[0]
