"""The roles that can be made, one of each kind, and who stands by while they do what they can."""

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

KINDS = ("nobody", "lock", "see", "force-release", "fence")
"""What a role was granted: nothing; one of dblock's rights; or fenced_store, by `dblock fence grant`."""

_numbers = itertools.count()

Connect = Callable[[str], psycopg.Connection]


@pytest.fixture(scope="session")
def kinds(server: str) -> Iterator[dict[str, str]]:
    """A role of each kind that may log in, by kind; what it may is granted in each database anew."""
    names = {kind: f"dblock_{kind.replace('-', '_')}_{os.getpid()}_{next(_numbers)}" for kind in KINDS}
    with psycopg.connect(server, autocommit=True) as admin:
        for name in names.values():
            admin.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'app'").format(sql.Identifier(name)))
        yield names
        for name in names.values():
            admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@pytest.fixture
def connect(dsn: str, kinds: dict[str, str]) -> Iterator[Connect]:
    """Opens sessions of these kinds, in autocommit, each with exactly the rights of its kind."""
    for kind, role in kinds.items():
        if kind == "fence":
            fenced_store.grant(dsn, role)
        elif kind != "nobody":
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
