"""Alembic projects, each on the database of its test."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.alembic_project import Project

Projects = Callable[..., Project]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def projects(dsn: str, tmp_path: Path) -> Projects:
    """Make projects, each in a folder of its own."""
    made: list[Project] = []

    def one(*, on: str = dsn, **options: Any) -> Project:
        made.append(Project(tmp_path / f"project{len(made)}", on, **options))
        return made[-1]

    return one


@pytest.fixture
def start() -> Iterator[Start]:
    """Start programs, and kill at the end those that are left."""
    started: list[subprocess.Popen[str]] = []

    def one(project: Project, *command: str, **environment: str) -> subprocess.Popen[str]:
        started.append(project.start(*command, **environment))
        return started[-1]

    yield one
    for process in started:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def rows(owner: psycopg.Connection, query: str) -> list[Any]:
    """Return the rows of a query; those of one column as values."""
    found = owner.execute(query.encode()).fetchall()
    return [row[0] if len(row) == 1 else row for row in found]


def marked(owner: psycopg.Connection) -> list[int]:
    """Return the sessions that run migrations."""
    return rows(owner, "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'dblock-migrate:%'")


def runs(owner: psycopg.Connection) -> list[str | None]:
    """Return the outcomes of all runs."""
    return rows(owner, "SELECT outcome FROM migration_runs ORDER BY run")


@pytest.fixture
def seeded(tmp_path: Path) -> Callable[[str], Path]:
    """Seed a bug into the programs of a project: the code runs when their interpreters start."""

    def one(code: str) -> Path:
        folder = tmp_path / "seeded"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(code)
        return folder

    return one
