"""A scene for the dashboard's tests and pictures: locks of every kind, waiters, a cycle, a dead holder, fences."""

from __future__ import annotations

import uuid
from typing import Any

import psycopg

import fenced_store
from tests.support.eventually import eventually

MINE = "batch@worker-2:4412"


class Scene:
    """Holders and waiters that stay as they are, and sessions that play them."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.session = self._connect()
        self._alive = [self._connect() for _ in range(2)]

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn, autocommit=True, options="-c search_path=dblock,public")

    def call(self, statement: str, *arguments: Any) -> list[Any]:
        """Execute a statement, and return the first row."""
        row = self.session.execute(statement.encode(), arguments).fetchone()
        return list(row or ())

    def present(self, session: psycopg.Connection[Any]) -> uuid.UUID:
        """Make a session a presence, with a grace that outlasts the test."""
        presence = uuid.uuid4()
        session.execute("SELECT register_presence(%s, '1 hour')", [presence])
        return presence

    def hold(self, name: str, holder: str, ttl: str = "10 min", presence: uuid.UUID | None = None) -> int:
        """Let a holder acquire a lock, and return the token."""
        found = self.call(
            "SELECT token FROM try_acquire(%s, %s::interval, %s, presence => %s) WHERE granted",
            name, ttl, holder, presence,
        )  # fmt: skip
        return int(found[0])

    def wait(self, name: str, holder: str) -> None:
        """Let a client wait for a lock for as long as the test lasts."""
        self.call(
            "SELECT 1 FROM acquire(%s, '1 min', %s, attempt => %s, client => %s)",
            name, holder, uuid.uuid4(), self._client(),
        )  # fmt: skip

    def share(self, name: str, kind: str, mode: str | None, holder: str, permits: int | None = None) -> None:
        """Let a holder acquire a share of a lock, or wait for it."""
        self.call(
            "SELECT 1 FROM acquire_shared(%s, %s, %s, %s::integer, '10 min', %s, attempt => %s, client => %s)",
            name, kind, mode, permits, holder, uuid.uuid4(), self._client(),
        )  # fmt: skip

    def _client(self) -> uuid.UUID:
        client = uuid.uuid4()
        self.clients = [*getattr(self, "clients", []), client]
        return client

    def keep(self) -> None:
        """Let the waiters count as alive for hours."""
        self.call(
            "WITH kept AS (UPDATE lock_clients SET seen_until = clock_timestamp() + interval '9 hours' RETURNING 1)"
            " SELECT count(*) FROM kept"
        )

    def close(self) -> None:
        """End the sessions."""
        for session in (self.session, *self._alive):
            session.close()


def build(dsn: str) -> Scene:
    """Make the scene in a database with both schemas."""
    scene = Scene(dsn)
    alive, dead = scene.present(scene._alive[0]), scene.present(scene._alive[1])
    scene.call("SELECT record_grants(true) IS NULL")
    scene.session.execute("CREATE TABLE public.ledger (id int PRIMARY KEY, amount int)")
    scene.session.execute("CREATE TABLE public.mails (id int PRIMARY KEY, text text)")
    fenced_store.protect(dsn, "public.ledger")
    for number in range(3):
        token = scene.hold("billing:close", f"billing@worker-{number + 1}:88{number}1", "60 s")
        scene.call("SELECT release('billing:close', %s)", token)
    scene.hold("billing:close", "billing@worker-4:9120", "300 ms")
    scene.call("SELECT pg_sleep(0.35) IS NULL")
    token = scene.hold("billing:close", "billing@worker-1:8801", presence=alive)
    scene.call("SELECT fenced_store.claim('{invoices/2026-11,public.ledger}', %s, %s) IS NULL", token, "billing")
    for number in range(4):
        scene.wait("billing:close", f"billing@worker-{number + 5}:71{number}0")
    scene.hold("export:monthly", MINE, presence=dead)
    scene.wait("export:monthly", "export@worker-9:3312")
    scene.hold("stock:berlin", "ann@web-1:812")
    scene.hold("stock:paris", "bob@web-2:99")
    scene.wait("stock:paris", "ann@web-1:812")
    scene.wait("stock:berlin", "bob@web-2:99")
    forced = scene.hold("report:weekly", "report@worker-3:5510", "4 min")
    scene.call("SELECT force_release('report:weekly', %s, 'kim', 'the report hangs')", forced)
    for number in range(3):
        scene.share("cache:config", "read-write", "read", f"web-{number + 1}:80{number}")
    scene.share("cache:config", "read-write", "write", "deploy@ci:77")
    for number in range(4):
        scene.share("gpu", "semaphore", None, f"train-{number + 1}", 3)
    scene.hold("import:customers", "import@worker-6:6120", "45 s")
    scene.hold("election:scheduler", "scheduler@node-2:410", "1 min")
    scene.hold("tenant/42 <b>%", "api@web-3:1200", "25 min")
    for number in range(6):
        scene.hold(f"nightly:{number:02}", f"cron@worker-{number}:40{number}", f"{number + 2} min")
    scene.keep()
    scene._alive[1].close()
    ended = "SELECT NOT alive FROM list_presence('export:monthly')"
    eventually(lambda: scene.call(ended) == [True], "the end of the dead holder's session")
    return scene
