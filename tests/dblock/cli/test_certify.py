"""`dblock certify`: it says what holds on this database, goes red where something does not, and leaves nothing."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

from dblock._core import acquire, renewal
from dblock._core.options import quoted
from dblock._runtime.target import resolve
from dblock.admin import schema
from dblock.admin.probe import BEHAVIOURS
from dblock.cli.certify import certificate, trials
from dblock.cli.certify.certificate import GUARANTEES, Certificate, certify
from dblock.cli.certify.stage import schema_for_trials
from tests.support.eventually import eventually
from tests.support.machine import measured
from tests.support.pooler import needs_pgbouncer, pooled
from tests.support.pretender import ADVISORY, pretend
from tests.support.proxy import Proxy
from tests.support.servers import private_server
from tests.support.shell import Shell, ended
from tests.support.standby import standby_of, wait_until_caught_up
from tests.support.terminal import Terminal


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try everything in fewer rounds."""
    for name, value in {"PAIRS": 3, "CONTENDERS": 2, "ROUNDS": 3, "HAND_OVERS": 1}.items():
        monkeypatch.setattr(trials, name, value)


@pytest.fixture
def _short_ttl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let leases end soon. A machine that is late then sees a takeover only after the end of the lease."""
    monkeypatch.setattr(trials, "SHORT_TTL", 0.6)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try everything, also on a machine that needs longer than a certificate may take."""
    monkeypatch.setattr(certificate, "LONGEST", 300.0)


def states(found: Certificate) -> dict[str, str]:
    for one in found.trials:
        print(one)  # so that a failed comparison shows what each trial saw
    return {one.id: one.state for one in found.guarantees if one.state != "holds"}


def left(dsn: str) -> list[Any]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(
            "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'dblock_certify%' OR nspname LIKE 'dblock_probe%'"
        ).fetchall()


@pytest.mark.second_stage
@pytest.mark.usefixtures("needs_presence")
@pytest.mark.usefixtures("_short")
def test_certificate_says_what_holds_with_figures(shell: Shell, bare_dsn: str) -> None:
    done = shell.run("certify", "--dsn", bare_dsn, "--json")
    found = done.json
    weak = {one["id"]: one["why"] for one in found["guarantees"] if one["state"] != "holds"}
    # The server of the tests does not wait for its disk.
    assert weak == {"durability": "fsync is off: a crash of the machine loses grants."}
    assert (done.code, found["complete"]) == (3, False)
    assert [one["id"] for one in found["behaviours"]] == [one.id for one in BEHAVIOURS]
    assert all(one["holds"] and one["figures"] for one in found["trials"])
    assert found["facts"]["engine"].startswith("PostgreSQL ")
    assert (found["facts"]["connection"], found["facts"]["fsync"]) == ("direct", False)
    assert found["seconds"] < 30
    assert left(bare_dsn) == []


@pytest.mark.usefixtures("_patient")
@pytest.mark.second_stage
def test_certificate_is_printed_and_accepted(shell: Shell, bare_dsn: str) -> None:
    done = shell.run("certify", "--dsn", bare_dsn, "--accept", "durability", "--accept", "presence")
    assert done.code == 0, done.out
    assert "connection  " in done.out
    assert "fails (accepted)  durability" in done.out
    assert "guarantees hold on this database" in done.out
    assert left(bare_dsn) == []


def test_accepted_guarantee_must_exist(shell: Shell, bare_dsn: str) -> None:
    done = shell.run("certify", "--dsn", bare_dsn, "--accept", "fences")
    assert (done.code, "Did you mean 'fence'?" in done.err) == (2, True)


def test_server_that_only_pretends_gets_no_schema(bare_dsn: str) -> None:
    pretend(bare_dsn, dict(ADVISORY))
    found = certify(resolve(bare_dsn))
    assert not any(one.holds for one in found.trials)
    assert states(found)["exclusion"] == "fails"
    assert states(found)["token-order"] == "unknown"
    assert not found.complete
    assert left(bare_dsn) == []


BROKEN = {
    "exact-release": "CREATE OR REPLACE FUNCTION release(name text, token bigint, durable boolean DEFAULT true)"
    " RETURNS boolean LANGUAGE sql SET search_path FROM CURRENT AS $$ WITH freed AS (UPDATE distributed_locks AS l"
    " SET expires_at = '-infinity' WHERE l.name = $1 RETURNING 1) SELECT EXISTS (SELECT FROM freed) $$",
    "token-order": "ALTER SEQUENCE token_sequence INCREMENT -1;"
    " ALTER FUNCTION catch_up_tokens(bigint, timestamptz) RENAME TO real_catch_up;"
    " CREATE FUNCTION catch_up_tokens(bigint, timestamptz) RETURNS timestamptz LANGUAGE sql"
    " AS $$ SELECT pg_postmaster_start_time() $$",
    "presence": "ALTER FUNCTION remaining_grace(uuid, boolean, boolean) RENAME TO real_grace;"
    " CREATE FUNCTION remaining_grace(uuid, boolean, boolean) RETURNS double precision LANGUAGE sql"
    " AS $$ SELECT NULL::float8 $$",
}
"""The statements that break each guarantee."""


@pytest.mark.usefixtures("needs_presence")
@pytest.mark.usefixtures("_short", "_short_ttl")
@pytest.mark.second_stage
@pytest.mark.parametrize("guarantee", list(BROKEN))
def test_broken_guarantee_is_shown(bare_dsn: str, monkeypatch: pytest.MonkeyPatch, guarantee: str) -> None:
    original = schema.install

    def install(target: Any, name: str = "dblock", **options: Any) -> str | None:
        before = original(target, name, **options)
        with psycopg.connect(bare_dsn, autocommit=True) as connection:
            connection.execute(f"SET search_path TO {quoted(name)}".encode())
            connection.execute(BROKEN[guarantee].encode())
        return before

    monkeypatch.setattr(schema, "install", install)
    found = states(certify(resolve(bare_dsn)))
    assert found[guarantee] in ("fails", "weaker")
    assert left(bare_dsn) == []


@pytest.mark.second_stage
def test_holder_that_trusts_its_lease_too_long_fails_its_trial(bare_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Proxy(bare_dsn) as proxy, schema_for_trials(resolve(bare_dsn)) as name:
        trials.cut_off(resolve(proxy.dsn), name)
        for module in (acquire, renewal):
            monkeypatch.setattr(module, "TRUST", 1.5)
        with pytest.raises(trials.Failed, match="still trusted its lease"):
            trials.cut_off(resolve(proxy.dsn), name)


@needs_pgbouncer
@pytest.mark.alone
@pytest.mark.usefixtures("_patient")
@pytest.mark.second_stage
def test_pooler_costs_speed_and_no_safety(bare_dsn: str) -> None:
    with pooled(bare_dsn) as through, measured() as lateness:
        found = certify(resolve(through))
        assert found.seconds < 30 + lateness()
    assert states(found) == {"durability": "fails", "wake-ups": "weaker", "presence": "weaker"}
    assert found.facts.connection == "pooler"
    assert left(bare_dsn) == []


@pytest.mark.usefixtures("_patient")
@pytest.mark.second_stage
def test_translated_addresses_cost_only_presence(bare_dsn: str) -> None:
    with Proxy(bare_dsn) as proxy:
        found = certify(resolve(proxy.dsn))
    assert states(found) == {"durability": "fails", "presence": "weaker"}
    assert found.facts.connection == "address translation"


@pytest.mark.second_stage
def test_standby_is_recognised() -> None:
    with private_server() as primary, standby_of(primary) as standby:
        wait_until_caught_up(primary, standby)
        found = certify(resolve(standby.url))
        assert found.facts.connection == "standby"
        assert {one.state for one in found.guarantees} == {"unknown"}
        asynchronous = certify(resolve(primary.url))
    assert [one.why for one in asynchronous.guarantees if one.id == "durability"] == [
        "no commit waits for the attached standbys: a failover can lose grants. Tokens still rise, so fences hold."
    ]


@pytest.mark.second_stage
def test_terminal_shows_what_is_tried(shell: Shell, bare_dsn: str) -> None:
    with Terminal(shell.command("certify", dsn=bare_dsn), columns=100) as terminal:
        terminal.wait_for("Trying ")
        assert terminal.ended() == 3
        lines = terminal.lines()
    assert "Trying" not in terminal.text
    assert any("guarantees hold on this database" in line for line in lines)


@pytest.mark.second_stage
def test_ctrl_c_removes_the_schema(shell: Shell, bare_dsn: str) -> None:
    running = shell.start("certify", dsn=bare_dsn)
    eventually(lambda: any("certify" in str(name) for name in left(bare_dsn)), "the schema of the trials")
    running.send_signal(signal.SIGINT)
    done = ended(running)
    assert done.code == 130, done.err
    assert left(bare_dsn) == []


def test_every_guarantee_rests_on_something_that_is_tried() -> None:
    tried = {one.id for one in BEHAVIOURS} | {one.id for one in trials.TRIALS}
    assert {name for definition in GUARANTEES for name in definition.rests_on} <= tried
    assert {one.id for one in trials.TRIALS} <= {name for definition in GUARANTEES for name in definition.rests_on}
    assert not {one.id for one in BEHAVIOURS} & {one.id for one in trials.TRIALS}
    page = (Path(__file__).parents[3] / "docs" / "reference" / "engines.md").read_text()
    for name in (*tried, *(definition.id for definition in GUARANTEES)):
        assert f"`{name}`" in page, name


def test_role_that_may_not_create_a_schema_gets_an_error_that_says_so(shell: Shell, dsn: str, role: str) -> None:
    schema.grant(dsn, role)
    done = shell.run("certify", dsn=conninfo.make_conninfo(dsn, user=role, password="app"))
    assert (done.code, done.out) == (77, "")
    assert "GRANT CREATE ON DATABASE" in done.err
