"""Create roles, one of each kind, and sessions of these roles."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo, sql

import fenced_store
from dblock._runtime import target
from dblock.admin import schema
from tests.support.shell import Shell

KINDS = ("none", "lock", "see", "force-release", "fence")
"""The grants of a role: none, one of dblock's privileges, or fenced_store's functions (`dblock fence grant`)."""

_numbers = itertools.count()

Connect = Callable[[str], psycopg.Connection]


@pytest.fixture(scope="session")
def kinds(server: str) -> Iterator[dict[str, str]]:
    """Create a login role of each kind. Its privileges are granted in each test's database."""
    names = {kind: f"dblock_{kind.replace('-', '_')}_{os.getpid()}_{next(_numbers)}" for kind in KINDS}
    with psycopg.connect(server, autocommit=True) as admin:
        for name in names.values():
            admin.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'app'").format(sql.Identifier(name)))
        yield names
        for name in names.values():
            admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@pytest.fixture
def connect(dsn: str, kinds: dict[str, str]) -> Iterator[Connect]:
    """Open sessions of these kinds, in autocommit, each with exactly the privileges of its kind."""
    for kind, role in kinds.items():
        if kind == "fence":
            fenced_store.grant(dsn, role)
        elif kind != "none":
            schema.grant(target.resolve(dsn), role, may=[kind])
    with ExitStack() as opened:

        def open_one(kind: str) -> psycopg.Connection:
            where = conninfo.make_conninfo(dsn, user=kinds[kind], password="app")
            return opened.enter_context(psycopg.connect(where, autocommit=True))

        yield open_one


@pytest.fixture
def shell(dsn: str, tmp_path: Path) -> Iterator[Shell]:
    made = Shell(dsn, tmp_path)
    yield made
    made.close()
