"""Any text works as a name: it is stored exactly, is equal to no other name, and is shown without harm.

The same corpus goes through both clients, the SQL functions and the command line. Text that Postgres cannot store is
refused before anything is sent, with an error that names the reason. On a terminal the command line shows names,
holders and meta of other clients escaped, in tables and in JSON: no control character and no character that reverses
a line reaches the terminal.
"""

from __future__ import annotations

import itertools
import json
import unicodedata
import uuid
from typing import Any

import psycopg
import pytest

import dblock
from dblock import cli
from tests.support.facade import Clients
from tests.support.shell import Shell
from tests.support.terminal import Terminal

NAMES = [
    "'", "''", '"', '""', "`", "$$", "$1", "$body$", "\\", "\\\\", "\\'", "\\n", "%", "%%", "%s", "%(name)s", "_",
    "a%", "a_", "{}", "{a}", "{a,b}", "NULL", "null", "a,b", "a;b", "--", "/*",
    "'; DROP TABLE dblock.distributed_locks; --", "x' OR '1'='1", "x'); SELECT pg_sleep(9); --", ":name", "@", "#",
    "&", "|", "$(reboot)", "`reboot`", "-rf", "--json", "*", "?", "../../etc/passwd", "http://user@host/",
    "<script>alert(1)</script>", "]]>", "[red]x[/red]", "{{7*7}}", "${jndi:x}", " ", "  ", "a ", " a", "a", "A",
    "\t", "a\tb", "\n", "a\nb", "a\r\nb", "a\rb", "\x01", "\x07", "\x08", "\x1b[2J", "\x1b]0;title\x07", "\x7f",
    "\x80", "\x9b2J", "\x9d0;t\x9c", "\u202eabc", "\u2066abc\u2069", "\u200b", "a\u200bb", "\ufeffa", "\u2028",
    "\u2029", "\U000e0001", "\ufffe", "\uffff", "é", "e\u0301", "ﬁ", "fi", "ß", "SS", "İ", "\u0131", "日本語",
    "\U0001f600", "\U0001f1e9\U0001f1ea", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "x" * 512, "ü" * 256,
    "\U0001f600" * 128, "dblock", "public.dblock", "pg_catalog", json.dumps({"a": [{"b": "c"}] * 5}), "0", "-1",
    "1e309", "true", "infinity", "00000000-0000-0000-0000-000000000000",
]  # fmt: skip

IMPOSSIBLE = {
    "a\0b": "NUL",
    "\ud800": "surrogate",
    "a\udfffb": "surrogate",
    "x" * 513: "512",
    "": "512",
    "\U0001f600" * 129: "512",
}
"""Names that no lock can have, each with a word of its error message."""

UNSAFE = ("Cc", "Cf", "Zl", "Zp")


def raw(shown: str) -> set[str]:
    """Return the characters that a terminal would act on instead of showing them."""
    return {one for one in shown if unicodedata.category(one) in UNSAFE} - {"\n"}


async def test_every_name_is_a_lock_of_its_own(clients: Clients, owner: psycopg.Connection) -> None:
    """All locks are held at once: if two names were the same lock, the second could not be acquired."""
    client = clients(holder="'; \x1b[2J \u202e %s {}", presence=None)
    leases = {}
    for number, name in enumerate(NAMES):
        lock = client.lock(name, ttl=60, meta={name: [name, {"deep": [number]}]})
        leases[name] = await lock.try_acquire()
        assert leases[name] is not None, ascii(name)
    assert len({lease.token for lease in leases.values()}) == len(NAMES) == len(set(NAMES))
    for number, name in enumerate(NAMES):
        holder = await client.lock(name).holder()
        assert (holder.token, holder.holder) == (leases[name].token, "'; \x1b[2J \u202e %s {}"), ascii(name)
        assert holder.meta == {name: [name, {"deep": [number]}]}
    kept = owner.execute("SELECT name FROM distributed_locks").fetchall()
    assert {name for (name,) in kept} == set(NAMES)
    gone, stays = NAMES[::2], NAMES[1::2]
    for name in gone:
        assert await leases[name].release()
    for name in stays:
        await leases[name].renew()
    assert owner.execute("SELECT count(*) FROM list_locks(include_free => false)").fetchone() == (len(stays),)


@pytest.mark.parametrize("name", IMPOSSIBLE, ids=lambda name: ascii(name)[:20])
async def test_text_that_postgres_cannot_store_is_refused_with_the_reason(clients: Clients, name: str) -> None:
    client = clients("host=127.0.0.1 port=1 user=app")  # nothing is sent
    with pytest.raises(dblock.InvalidArgument, match=IMPOSSIBLE[name]) as refused:
        await client.lock(name).try_acquire()
    assert not raw(str(refused.value))
    assert len(str(refused.value)) < 800
    if len(name) < 9 and name:
        with pytest.raises(dblock.InvalidArgument, match=f"{IMPOSSIBLE[name]}"):
            client.lock("a", meta={"x": [name]})
            await client.lock("a", meta={"x": [name]}).try_acquire()
        with pytest.raises(dblock.InvalidArgument):
            await clients("host=127.0.0.1 port=1 user=app", holder=name).lock("a").try_acquire()


def test_every_name_has_a_queue_of_its_own(owner: psycopg.Connection) -> None:
    """In SQL, as a waiter sees it: its ticket, the row of its queue, and the wake-up."""
    client = uuid.uuid4()
    for name in NAMES:
        owner.execute("SELECT try_acquire(%s, '1 hour')", [name])
        attempt = uuid.uuid4()
        ticket = owner.execute(
            "SELECT granted, ticket FROM acquire(%s, '60 s', %s, NULL, %s, %s)", [name, name, attempt, client]
        ).fetchone()
        assert ticket == (False, 1), ascii(name)
        assert owner.execute("SELECT last_ticket FROM lock_queues WHERE name = %s", [name]).fetchone() == (1,)
        waits = owner.execute("SELECT queue(%s)", [name]).fetchone()
        assert waits is not None
        assert [one["holder"] for one in waits[0]] == [name]
        # In a search by name, a LIKE wildcard in the name is an ordinary character.
        assert len(owner.execute("SELECT * FROM list_locks(name => %s)", [name]).fetchall()) == 1
    owner.execute(f"LISTEN dblock_{client.hex}".encode())
    for name in NAMES:
        # On a busy machine this takes longer than a waiter without heartbeats counts as alive.
        owner.execute("SELECT heartbeat(%s, %s::text[])", [client, [name]])
        token = owner.execute("SELECT token FROM holder(%s)", [name]).fetchone()
        assert token is not None
        owner.execute("SELECT release(%s, %s, durable => false)", [name, token[0]])
    notified = {one.payload for one in owner.notifies(timeout=60, stop_after=len(NAMES))}
    assert len(notified) == len(NAMES), "each release must wake another waiter"


@pytest.fixture
def written(owner: psycopg.Connection) -> list[str]:
    """Create locks with hostile names, holders, meta, waiters and history events."""
    client = uuid.uuid4()
    for name in NAMES:
        owner.execute("SELECT try_acquire(%s, '1 hour', %s, %s::jsonb)", [name, name, json.dumps({name: name})])
        owner.execute("SELECT acquire(%s, '1 hour', %s, NULL, gen_random_uuid(), %s)", [name, name, client])
        owner.execute("SELECT force_release(%s, token, %s, %s) FROM holder(%s)", [name, name, name, name])
    # The client counts as alive for as long as the test takes.
    owner.execute("UPDATE lock_clients SET seen_until = clock_timestamp() + interval '1 hour'")
    return NAMES


@pytest.mark.second_stage
def test_command_line_shows_every_name_escaped(
    written: list[str], dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*arguments: str) -> str:
        code = cli.main(["--dsn", dsn, *arguments])
        output = capsys.readouterr()
        assert not raw(output.out + output.err), (arguments, ascii(raw(output.out + output.err)))
        assert code == 0, output.err
        return output.out

    for command in ("ls", "waiters", "history", "graph"):
        limit = [] if command == "graph" else ["--limit", "500"]
        assert "\\x1b[2J" in shown(command, *limit)
        parsed = json.loads(shown(command, *limit, "--json"))
        assert set(written) <= set(texts(parsed)), "JSON must contain the exact names"
    for name in written[::8]:
        assert json.loads(shown("show", "--json", "--", name))["lock"]["name"] == name
    for name in ("\x1b[2J", "\x9b2J", "\u202eabc", "\u2028", "'; DROP TABLE dblock.distributed_locks; --"):
        shown("show", "--", name)
    # An error names the missing lock, whose name is hostile too.
    for more in ([], ["--json"]):
        assert cli.main(["--dsn", dsn, "show", *more, "--", "not there \x1b[2J\x9b2J\r\u202e\u2028"]) == 1
        assert not raw(capsys.readouterr().err)


@pytest.mark.second_stage
def test_terminal_receives_no_control_characters_from_names(written: list[str], shell: Shell) -> None:
    for arguments in (["ls"], ["ls", "--json"]):
        with Terminal(shell.command(*arguments), columns=200, rows=60) as terminal:
            assert terminal.ended() == 0
            seen = terminal.raw.decode()
        for bad in ("\x1b[2J", "\x1b]0", "\x07", "\x9b", "\x9d", "\u202e", "\u2066", "\x08", "\u2028"):
            assert bad not in seen, (arguments, ascii(bad))


def texts(facts: Any) -> list[str]:
    """Return every string of a JSON document."""
    if isinstance(facts, dict):
        return list(itertools.chain(facts, *map(texts, facts.values())))
    if isinstance(facts, list):
        return list(itertools.chain(*map(texts, facts)))
    return [facts] if isinstance(facts, str) else []
