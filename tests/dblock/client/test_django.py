"""Leases and fences in a transaction of Django."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
from psycopg import conninfo

import dblock
import fenced_store

django = pytest.importorskip("django")


@pytest.fixture
def connection(dsn: str) -> Iterator[Any]:
    """Django's connection to this test's database, as `django.db.connections` makes it."""
    settings = import_module("django.conf").settings
    if not settings.configured:
        settings.configure()
    given = conninfo.conninfo_to_dict(dsn)
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": given.get("dbname"),
        "USER": given.get("user"),
        "PASSWORD": given.get("password") or "",
        "HOST": given.get("host"),
        "PORT": given.get("port"),
    }
    made = import_module("django.db.utils").ConnectionHandler({"default": database})["default"]
    yield made
    made.close()


@contextmanager
def atomic(connection: Any) -> Iterator[None]:
    """Enter `transaction.atomic()` for a connection that is in no global registry."""
    transaction = import_module("django.db").transaction
    with mock.patch.object(transaction, "get_connection", return_value=connection), transaction.atomic():
        yield


@pytest.mark.second_stage
def test_lease_is_proven_and_released_in_a_django_transaction(client: dblock.Client, connection: Any) -> None:
    lease = client.lock("a").acquire()
    with atomic(connection):
        lease.assert_held(connection)
        lease.release_in(connection)
    assert client.lock("a").try_acquire() is not None
    with atomic(connection), pytest.raises(dblock.LeaseLost):
        lease.assert_held(connection)


def test_fence_is_taken_in_a_django_transaction(client: dblock.Client, connection: Any) -> None:
    first = client.lock("a").acquire()
    first.release()
    second = client.lock("a").acquire()
    with atomic(connection), fenced_store.fence(connection, "invoice:42", second):
        pass
    with pytest.raises(fenced_store.StaleTokenError), atomic(connection):  # noqa: SIM117
        with fenced_store.fence(connection, "invoice:42", first.token):
            raise AssertionError("a stale token passed")


def test_django_connection_without_a_transaction_is_refused(client: dblock.Client, connection: Any) -> None:
    lease = client.lock("a").acquire()
    with pytest.raises(dblock.InvalidArgument, match="Begin a transaction first"):
        lease.assert_held(connection)


def test_django_connection_to_another_kind_of_database_is_refused(client: dblock.Client) -> None:
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    other = import_module("django.db.utils").ConnectionHandler({"default": database})["default"]
    with pytest.raises(dblock.InvalidArgument, match="sqlite3"):
        client.lock("a").acquire().assert_held(other)
    other.close()
