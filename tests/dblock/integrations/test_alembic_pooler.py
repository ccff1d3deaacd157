"""The gate for Alembic behind a pooler in transaction mode: every step runs once, and no lock stays in the pool."""

from __future__ import annotations

import psycopg
import pytest

from tests.dblock.integrations.conftest import Projects, Start, rows
from tests.dblock.integrations.test_alembic_faults import (
    ALTER,
    CREATE,
    INDEX,
    INDEXES,
    NOTE,
    prepare,
    replicas_succeed,
)
from tests.support.pooler import needs_pgbouncer, pooled

ADVISORY = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"


@pytest.mark.second_stage
@needs_pgbouncer
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(INDEX, id="concurrently"),
        pytest.param(ALTER.format("b"), marks=pytest.mark.nightly, id="transaction"),
    ],
)
def test_ten_replicas_behind_a_transaction_pooler_run_every_step_once(
    step: str, dsn: str, projects: Projects, start: Start, owner: psycopg.Connection
) -> None:
    prepare(owner, bare=True)
    with pooled(dsn) as through:
        project = projects(on=through)
        project.revision("a", None, f"{CREATE}\n{NOTE.format('a')}")
        project.revision("b", "a", f"{step}\n{NOTE.format('b')}")
        before = rows(owner, ADVISORY)
        replicas_succeed(project, start, 10)
        assert rows(owner, ADVISORY) == before
    assert rows(owner, "SELECT revision FROM public.ran ORDER BY 1") == ["a", "b"]
    assert rows(owner, INDEXES) == [("i", True)] * (step == INDEX)
    assert rows(owner, "SELECT outcome FROM dblock.migration_runs") == ["succeeded"]
