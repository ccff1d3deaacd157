"""The plugin's parts on a database of this run, without a server of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dblock
from dblock.testing.chaos import PostgresChaos
from dblock.testing.leaks import Watch, watching
from dblock.testing.private_database import PrivateDatabase


@pytest.fixture
def database(dsn: str) -> Iterator[PrivateDatabase]:
    made = PrivateDatabase(dsn, "dblock", "fenced_store", exclusive=True)
    yield made
    made.close()


@pytest.fixture
def watch(database: PrivateDatabase) -> Iterator[Watch]:
    """Watches the clients that a test makes."""
    with watching(Watch()) as watch:
        yield watch
    watch.note_calls()
    watch.close_clients()


@pytest.fixture
def chaos(database: PrivateDatabase, watch: Watch) -> Iterator[PostgresChaos]:
    made = PostgresChaos(database, watch)
    yield made
    made.undo()


@pytest.fixture
def holder(watch: Watch, dsn: str) -> Iterator[dblock.Client]:
    with dblock.Client(dsn, holder="holder") as client:
        yield client


@pytest.fixture
def other(watch: Watch, dsn: str) -> Iterator[dblock.Client]:
    with dblock.Client(dsn, holder="other") as client:
        yield client
