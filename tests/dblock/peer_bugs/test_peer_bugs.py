"""Each mistake that another lock library has had is found by a check if it is made in dblock's own code."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.dblock.peer_bugs import PeerBug, all_peer_bugs
from tests.support.facade import AsyncClients
from tests.support.sessions import Sessions
from tests.support.shared_locks import keep_clients_alive
from tests.support.waits import WaitGraph

pytestmark = [pytest.mark.usefixtures("patient")]

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "concepts" / "peer-bugs.md"
SEEDED_HERE = [bug for bug in all_peer_bugs() if bug.check is not None]


def entries(bugs: list[PeerBug]) -> list[Any]:
    return [
        pytest.param(bug, id=bug.name, marks=[pytest.mark.second_stage, pytest.mark.alone] if bug.second_stage else [])
        for bug in bugs
    ]


async def run_check(bug: PeerBug, dsn: str, owner: psycopg.Connection, sessions: Sessions) -> None:
    """Run the check of an entry, with the fixtures that it asks for."""
    assert bug.check is not None
    clients = AsyncClients(dsn)
    if "graph" not in inspect.signature(bug.check).parameters:
        keep_clients_alive(owner)
    fixtures: dict[str, Any] = {
        "dsn": dsn,
        "owner": owner,
        "sessions": sessions,
        "clients": clients,
        "graph": WaitGraph(owner),
        **bug.arguments,
    }
    try:
        reply = bug.check(**{name: fixtures[name] for name in inspect.signature(bug.check).parameters})
        if inspect.isawaitable(reply):
            await reply
    finally:
        await clients.close()


@pytest.mark.parametrize("bug", entries(SEEDED_HERE))
async def test_check_fails_with_the_mistake(
    bug: PeerBug, dsn: str, owner: psycopg.Connection, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        bug.insert(owner, patched)
        with pytest.raises(bug.failures):
            await run_check(bug, dsn, owner, sessions)


@pytest.mark.parametrize(
    "bug", entries([bug for bug in SEEDED_HERE if str(getattr(bug.check, "__name__", "")).startswith("check_")])
)
async def test_check_passes_without_the_mistake(
    bug: PeerBug, dsn: str, owner: psycopg.Connection, sessions: Sessions
) -> None:
    """The other checks are tests of the suite, which run by themselves."""
    await run_check(bug, dsn, owner, sessions)


def test_seeded_bugs_of_the_robustness_suite_exist() -> None:
    from tests.robustness.mutations import all_bugs
    from tests.robustness.simulation.shared_locks.mutations import BUGS

    known = {*BUGS, *all_bugs()}
    for bug in all_peer_bugs():
        assert bug.check is not None or bug.elsewhere, f"{bug.name} is found by nothing"
        assert not bug.elsewhere or bug.elsewhere in known, bug.elsewhere


def table() -> list[str]:
    """Return the rows of the table in the docs."""
    rows = []
    for bug in all_peer_bugs():
        found_by = [f"`{bug.check.__name__}`"] if bug.check is not None else []
        found_by += [f"seeded bug `{bug.elsewhere}`"] if bug.elsewhere else []
        rows.append(f"| {', '.join(bug.issues)} | {bug.mistake} | {bug.place} | {'; '.join(found_by)} |")
    return rows


def test_page_of_the_docs_has_every_mistake() -> None:
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "#" in line]
    assert shown == table(), "write these rows:\n" + "\n".join(table())
