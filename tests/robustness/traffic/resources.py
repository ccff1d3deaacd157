"""Wrap fenced resources of every kind for the traffic: one value under each name, to read, claim and write.

Each thread of the traffic has its own instance, and reconnects after a failure. A failure means the same for all kinds:
REFUSED has certainly changed nothing, UNKNOWN may have taken effect or may still do so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import obstore.exceptions
import psycopg
import sqlalchemy.exc
from obstore.store import LocalStore

import fenced_store
from fenced_store.http import FencingAuth
from fenced_store.objects import FencedObjects
from tests.support.backends import Numbered
from tests.support.s3 import bucket, new_bucket, running_s3
from tests.support.service import running_service

KINDS = ("key", "transaction", "row", "table", "s3", "files", "http")

REFUSED = (fenced_store.StaleTokenError, fenced_store.ObjectBusy, fenced_store.ClaimTimeout)
UNKNOWN = (
    fenced_store.OutcomeUnknown,
    fenced_store.Unavailable,
    psycopg.Error,
    sqlalchemy.exc.DBAPIError,
    httpx.HTTPError,
    obstore.exceptions.BaseError,
)

Elements = list[str]


class Resource:
    """Keep one list under each name of a key-value store; the base class of the other resources."""

    numbered = True
    """Whether a write can carry a write number."""
    claims_from_tasks = True
    """Whether a lock of an asynchronous client can claim the resource."""

    def __init__(self, dsn: str, where: dict[str, str]) -> None:
        self.dsn = dsn
        self.where = where
        self.store = fenced_store.FencedStore(dsn)
        self._connection: psycopg.Connection[Any] | None = None

    @classmethod
    @contextmanager
    def set_up(cls, dsn: str, folder: Path) -> Iterator[dict[str, str]]:
        """Run the services that the resource needs besides the database, and yield their addresses."""
        yield {}

    @classmethod
    def prepare(cls, dsn: str, names: list[str]) -> None:
        """Create what must exist before the first write."""

    def name(self, name: str) -> str:
        """Return the name of the fence."""
        return name

    def claims(self, name: str) -> list[Any]:
        """Return the claims for a lock on this resource."""
        return [self.name(name)]

    def claim(self, name: str, lease: Any) -> None:
        """Claim the resource, which refuses all older tokens from now on."""
        self.store.claim(self.name(name), fence=lease.token, patience=2)

    def read(self, name: str) -> Elements:
        """Return the stored list."""
        found = self.store.get(name)
        return [] if found is None else list(json.loads(found.value))

    def write(self, name: str, elements: Elements, token: int, number: int) -> bool:
        """Write the whole list under a token; return True or raise an error."""
        self.store.put(name, json.dumps(elements), fence=token, write=number)
        return True

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """A connection of this resource alone, outside a transaction."""
        if self._connection is None or self._connection.closed or self._connection.broken:
            self._connection = psycopg.connect(self.dsn)
        elif self._connection.info.transaction_status:
            self._connection.rollback()
        return self._connection

    def close(self) -> None:
        self.store.close()
        if self._connection is not None:
            self._connection.close()


class Transaction(Resource):
    """Rows of an unprotected table, written in a transaction that takes the fence."""

    numbered = False

    @classmethod
    def prepare(cls, dsn: str, names: list[str]) -> None:
        with psycopg.connect(dsn) as connection:
            connection.execute("CREATE TABLE transactions (id text PRIMARY KEY, v text)")

    def read(self, name: str) -> Elements:
        row = self.connection.execute("SELECT v FROM transactions WHERE id = %s", [name]).fetchone()
        self.connection.rollback()
        return list(json.loads(row[0])) if row else []

    def write(self, name: str, elements: Elements, token: int, number: int) -> bool:
        connection = self.connection
        with connection.transaction(), fenced_store.fence(connection, name, token):
            connection.execute(
                "INSERT INTO transactions VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET v = excluded.v",
                [name, json.dumps(elements)],
            )
        return True


class Row(Resource):
    """Rows of a protected table, written by plain SQL in a transaction that carries the token."""

    numbered = False
    table, statement = (
        "set_rows",
        "INSERT INTO set_rows VALUES (%(name)s, %(v)s) ON CONFLICT (id) DO UPDATE SET v = excluded.v",
    )

    @classmethod
    def prepare(cls, dsn: str, names: list[str]) -> None:
        with psycopg.connect(dsn) as connection:
            connection.execute("CREATE TABLE set_rows (id text PRIMARY KEY, v text)")
        _protect(dsn, ["set_rows"], "row")

    def name(self, name: str) -> str:
        return f"public.set_rows:{name}"

    def read(self, name: str) -> Elements:
        row = self.connection.execute("SELECT v FROM set_rows WHERE id = %s", [name]).fetchone()
        self.connection.rollback()
        return list(json.loads(row[0])) if row else []

    def write(self, name: str, elements: Elements, token: int, number: int) -> bool:
        return self._write(name, self.statement, elements, token)

    def _write(self, name: str, statement: str, elements: Elements, token: int) -> bool:
        try:
            connection = self.connection
            with connection.transaction():
                connection.execute("SELECT set_config('fenced_store.token', %s, true)", [str(token)])
                connection.execute(statement.encode(), {"name": name, "v": json.dumps(elements)})
        except psycopg.Error as error:
            refusal = fenced_store.errors.translated(error)
            if refusal is None:
                raise
            raise refusal from error
        return True


class Table(Row):
    """Protected tables of one row each."""

    @classmethod
    def prepare(cls, dsn: str, names: list[str]) -> None:
        with psycopg.connect(dsn) as connection:
            for name in names:
                connection.execute(f"CREATE TABLE whole_{name} (v text)".encode())
                connection.execute(f"INSERT INTO whole_{name} VALUES ('[]')".encode())
        _protect(dsn, [f"whole_{name}" for name in names], "table")

    def name(self, name: str) -> str:
        return f"public.whole_{name}"

    def read(self, name: str) -> Elements:
        row = self.connection.execute(f"SELECT v FROM whole_{name}".encode()).fetchone()
        self.connection.rollback()
        return list(json.loads(row[0])) if row else []

    def write(self, name: str, elements: Elements, token: int, number: int) -> bool:
        return self._write(name, f"UPDATE whole_{name} SET v = %(v)s", elements, token)


class S3(Resource):
    """Objects in an S3 bucket."""

    claims_from_tasks = False

    def __init__(self, dsn: str, where: dict[str, str]) -> None:
        super().__init__(dsn, where)
        self.objects = self._objects()

    def _objects(self) -> FencedObjects:
        return FencedObjects(bucket(self.where["s3"], self.where["bucket"]))

    @classmethod
    @contextmanager
    def set_up(cls, dsn: str, folder: Path) -> Iterator[dict[str, str]]:
        with running_s3() as address:
            yield {"s3": address, "bucket": new_bucket(address)}

    def claims(self, name: str) -> list[Any]:
        return [self.objects.claims(name)]

    def claim(self, name: str, lease: Any) -> None:
        self.objects.claim(name, fence=lease.token, patience=2)

    def read(self, name: str) -> Elements:
        there = self.objects.get(name)
        return [] if there is None else list(json.loads(there.data))

    def write(self, name: str, elements: Elements, token: int, number: int) -> bool:
        self.objects.put(name, json.dumps(elements).encode(), fence=token, write=number)
        return True


class Files(S3):
    """Files in a folder, with their pointers in the fenced store."""

    def _objects(self) -> FencedObjects:
        return FencedObjects(LocalStore(self.where["files"]), pointers=self.store)

    @classmethod
    @contextmanager
    def set_up(cls, dsn: str, folder: Path) -> Iterator[dict[str, str]]:
        files = folder / "files"
        files.mkdir(exist_ok=True)
        yield {"files": str(files)}


class Http(Resource):
    """Values in an HTTP service behind FencingMiddleware."""

    def __init__(self, dsn: str, where: dict[str, str]) -> None:
        super().__init__(dsn, where)
        self.http = httpx.Client(base_url=where["http"], timeout=10)

    @classmethod
    @contextmanager
    def set_up(cls, dsn: str, folder: Path) -> Iterator[dict[str, str]]:
        with running_service(dsn) as address:
            yield {"http": address}

    def name(self, name: str) -> str:
        return f"stored:{name}"

    def read(self, name: str) -> Elements:
        response = self.http.get(f"/stored/{name}")
        return [] if response.status_code == 404 else list(response.raise_for_status().json())

    def write(self, name: str, elements: Elements, token: int, number: int) -> bool:
        auth = FencingAuth(Numbered(token, number))
        self.http.put(f"/stored/{name}", content=json.dumps(elements), auth=auth).raise_for_status()
        return True

    def close(self) -> None:
        self.http.close()
        super().close()


CLASSES: dict[str, type[Resource]] = {
    "key": Resource,
    "transaction": Transaction,
    "row": Row,
    "table": Table,
    "s3": S3,
    "files": Files,
    "http": Http,
}


def _protect(dsn: str, tables: list[str], per: Any) -> None:
    for table in tables:
        fenced_store.protect(dsn, table, per=per)
