"""Run every example: those of the docs, page by page and in order, and each program in examples/."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import psycopg
import pytest
from obstore.store import MemoryStore
from psycopg import conninfo
from sqlalchemy import create_engine

import dblock
import fenced_store
from fenced_store import FencedStore
from tests.support.stages import first

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

PROGRAMS = {
    "apscheduler_once": ["three slots, each on one of two hosts: True"],
    "celery_locks": [
        "three reports of one customer ran one after the other: True",
        "each under a higher token: True",
        "five sends of a unique task: 1 message, totals of ada",
        "two refreshes at once: ['None', 'refreshed']",
    ],
    "claim_resources": [
        "without a claim, the previous holder's late write is accepted",
        "with a claim, the previous holder's late write is refused",
    ],
    "django_locks": [
        "The schema dblock is installed in the database default.",
        "pay while the invoice is being closed: 200 10",
        "close it twice at once: (200, 'closed at 10') (423, '')",
        "the command has closed all invoices",
        "while another process runs the command, exit code 75",
    ],
    "dramatiq_locks": [
        "three reports of one customer ran one after the other: True",
        "each under a higher token: True",
        "two refreshes at once: ['refreshed']",
    ],
    "fastapi_fenced": [
        "the holder writes: 200",
        "the next holder writes: 200",
        "the previous holder writes late: 409",
    ],
    "fastapi_locks": [
        "the cache is filled",
        "four requests close invoice 42 at once: [200, 423, 423, 423]",
        "four requests close one invoice each: [200, 200, 200, 200]",
        "after that, invoice 42 is free again: 200",
    ],
    "fenced_ledger": ["balance: 200"],
    "leader_election": [
        "the leader is web-1",
        "web-1 was killed; web-2 leads, under a higher token: True",
        "log: web-1 leads",
        "log: web-1 was lost, and there is a vacancy",
        "log: web-2 leads",
        "log: web-2 has resigned",
    ],
    "lock_from_sql": [
        "try_acquire while the lock is held: None",
        "acquire waited and was granted: True",
        "renewed: True",
        "released: True",
    ],
    "locked_functions": [
        "the fee is booked under the token of the withdrawal: True",
        "balances: {'ada': 69}",
        "while another caller builds the report: dblock.SKIPPED",
        "a booking without the lock is refused",
    ],
    "sqlalchemy_guard": ["under the lease, stored: 100", "without it, not stored: 100"],
    "transfer_between_accounts": ["any account: account:1", "sum of all balances: 300"],
    "paused_holder": [
        "the worker is stopped; waiting for its lease to expire",
        "this process acquired the lock and wrote 150",
        "worker: refused, because its token is lower than the stored one",
        "worker: its lease is lost",
        "stored: 150",
    ],
    "run_once_cron": ["Built today's report: 1234 rows."],
    "schedule_on_hosts": [
        "host-1 runs the slot, run 1",
        "host-2 runs the slot, run 2",
        "host-2 has built the report",
        "host-3 skips the slot",
        "ledger: host-1 died",
        "ledger: host-2 succeeded",
    ],
    "shared_locks": [
        "readers inside: 2",
        "a reader that comes now waits behind the writer: True",
        "the prices have not changed: True",
        "updated and still inside, under a higher token: True",
        "GPUs in use: [0, 1]",
        "a third worker gets one: False",
        "GPUs free: 2",
    ],
    "worker_queue_async": ["3 workers synchronised 6 customers, each of them once"],
}
"""The output of each program in examples/ on a new database."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def calling(app: Any) -> httpx.Client:
    """Return a client that starts the application for each request, sends the request, and stops the application."""

    async def respond(request: httpx.Request) -> httpx.Response:
        to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        from_app: asyncio.Queue[Any] = asyncio.Queue()
        await to_app.put({"type": "lifespan.startup"})
        life = asyncio.create_task(app({"type": "lifespan", "state": {}}, to_app.get, from_app.put))
        await from_app.get()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            got = await client.send(httpx.Request(request.method, request.url, headers=request.headers))
        await to_app.put({"type": "lifespan.shutdown"})
        await life
        return httpx.Response(got.status_code, headers=got.headers, content=got.content)

    transport = httpx.MockTransport(lambda request: asyncio.run(respond(request)))
    return httpx.Client(transport=transport, base_url="https://ledger.example")


@pytest.mark.parametrize(
    "page",
    # tests/project/test_contributing.py runs those of the contributors.
    [page for page in PAGES if blocks(page, "python") and "contributing" not in page.parts],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_python_examples_run(page: Path, dsn: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DBLOCK_DSN", dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE ledgers (ledger text PRIMARY KEY, total bigint)")
    fenced_store.install(dsn)
    made: list[Any] = []

    def engine_of_this_test(url: str) -> Any:
        made.append(create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn)))
        return made[-1]

    names: dict[str, Any] = {
        "MemoryStore": MemoryStore,
        "calling": calling,
        "create_engine": engine_of_this_test,
        "DSN": dsn,
    }
    clients: list[dblock.Client] = []
    make = dblock.Client.__init__

    def noted(self: dblock.Client, *args: Any, **options: Any) -> None:
        clients.append(self)
        make(self, *args, **options)

    monkeypatch.setattr(dblock.Client, "__init__", noted)
    exec("import dblock", names)
    for example in blocks(page, "python"):
        # The servers that the examples name do not exist. This test's database takes their place.
        example = re.sub(r'(Client|FencedStore)\("postgresql://[^"]*"\)', r"\1(DSN)", example)
        example = example.replace('httpx.Client(base_url="https://ledger.example")', "calling(app)")
        example = example.replace('S3Store("reports")', "MemoryStore()").replace("/srv/reports", str(tmp_path))
        example = example.replace("import create_engine, ", "import ").replace(
            "from sqlalchemy import create_engine", ""
        )
        exec(compile(example, str(page), "exec", dont_inherit=True), names)
    for opened in [*names.values(), *clients]:
        if isinstance(opened, FencedStore | dblock.Client):
            opened.close()
    for engine in made:
        engine.dispose()


def test_sql_examples_run(owner: psycopg.Connection) -> None:
    for page in PAGES:
        for example in blocks(page, "sql"):
            assert owner.execute(example.encode()).fetchone()


def run_program(name: str, dsn: str) -> list[str]:
    program = ROOT / "examples" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", program],
        env={**os.environ, "DBLOCK_DSN": dsn},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", ["claim_resources", *first(0, sorted(PROGRAMS.keys() - {"claim_resources"}))])
def test_each_program_prints_its_expected_output(name: str, dsn: str) -> None:
    assert run_program(name, dsn) == PROGRAMS[name]


@pytest.mark.second_stage
def test_program_for_node_prints_its_expected_output(dsn: str) -> None:
    """If node finds the driver `pg`; NODE_PATH may name its folder."""
    found = shutil.which("node") and subprocess.run(["node", "-e", "require.resolve('pg')"], stderr=subprocess.DEVNULL)
    if not found or found.returncode:
        pytest.skip("needs Node.js with the package pg")
    given = {name: quote(str(value), safe="") for name, value in conninfo.conninfo_to_dict(dsn).items()}
    url = "postgresql://{user}@/{dbname}?host={host}&port={port}".format(**{"port": "5432"} | given)
    program = ROOT / "examples" / "lock_from_node.js"
    done = subprocess.run(
        ["node", program], env={**os.environ, "DBLOCK_DSN": url}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [
        "a second client gives up after 0.3 s: null",
        "released: true",
        "the waiter was granted a higher token: true",
        "lost: false",
    ], done.stderr


@pytest.mark.second_stage
def test_second_run_of_the_cron_job_does_nothing(dsn: str) -> None:
    run_program("run_once_cron", dsn)
    assert run_program("run_once_cron", dsn) == ["Today's report was already built."]


def test_every_program_is_tested_and_listed() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    programs = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert programs == set(PROGRAMS) == set(re.findall(r"^\| \[(\w+)\.py\]", listed, re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_have_existing_targets() -> None:
    others = ["CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "spec/README.md"]
    for page in [*PAGES, *(ROOT / other for other in others)]:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
            found = page.parent / target if target else page
            assert found.exists(), f"{page.relative_to(ROOT)} links to {target}"
            if anchor:
                assert anchor in anchors(found), f"{page.relative_to(ROOT)} links to {target}#{anchor}"


def test_readme_commands_are_the_commands_of_ci() -> None:
    commands = blocks(ROOT / "README.md", "sh")
    assert "pip install -e '.[embedded]' && dblock demo\n" in commands
    assert "pip install -e '.[dev]' && pytest\n" in commands
    assert "pip install -e '.[dev]' && pytest\n" in (ROOT / ".ci" / "run").read_text()
