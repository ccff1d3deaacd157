"""What the tests of Django's migrate share: projects, programs, and what they ask the database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.django_project import Program, Project

Start = Callable[..., Program]

MARKED = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'dblock-mig%'"


@pytest.fixture
def project(tmp_path: Path, bare_dsn: str) -> Project:
    """A project on an empty database."""
    return Project(tmp_path / "project", bare_dsn)


@pytest.fixture
def database(bare_dsn: str) -> Iterator[psycopg.Connection]:
    """A connection to the database of the project."""
    with psycopg.connect(bare_dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def start() -> Iterator[Start]:
    """Start programs, and kill at the end those that are left."""
    started: list[Program] = []

    def one(
        project: Project, *command: str, real: bool = False, schema: str | None = None, **environment: str
    ) -> Program:
        program = project.start(*command, real=real, schema=schema, **environment)
        started.append(program)
        return program

    yield one
    for program in started:
        program.kill()


def rows(database: psycopg.Connection, query: str) -> list[Any]:
    """Return the rows of a query; those of one column as values."""
    return [row[0] if len(row) == 1 else row for row in database.execute(query.encode()).fetchall()]


def steps(database: psycopg.Connection, schema: str = "public") -> list[str]:
    """Return the steps that took effect, in their order."""
    return rows(database, f"SELECT step FROM {schema}.steps ORDER BY at")


def applied(database: psycopg.Connection, schema: str = "public") -> list[str]:
    """Return what Django has recorded, in its order."""
    return rows(database, f"SELECT name FROM {schema}.django_migrations WHERE app = 'shop' ORDER BY id")


def outcomes(database: psycopg.Connection) -> list[str | None]:
    """Return how the runs ended, the oldest first."""
    return rows(database, "SELECT outcome FROM dblock.migration_runs ORDER BY run")
