"""Run a holder that is stopped past the end of its lease and then continues as if nothing had happened.

As a program it reads orders from its standard input: acquire a lock, wait for a line, then write as the holder that
it believes to be. The program never checks its lease, so only the resource can refuse the write.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx
import psycopg
from obstore.store import LocalStore
from psycopg import conninfo
from sqlalchemy import URL, create_engine, text

import dblock
import fenced_store
from fenced_store.http import FencingAuth
from fenced_store.objects import FencedObjects
from tests.support.backends import Numbered
from tests.support.orphans import die_with_parent
from tests.support.s3 import bucket

KINDS = ["key", "transaction", "row", "table", "s3", "files", "http"]
OUTSIDE = {"s3", "files", "http"}
"""The kinds of resource outside Postgres."""


class Resources:
    """Provides one resource of each kind for every name, and writes to it as a holder."""

    def __init__(self, dsn: str, where: dict[str, str]) -> None:
        """Connect to the resources.

        `where` has the S3 server and bucket, the folder of files, and the address of tests.support.service.
        """
        query = {key: str(value) for key, value in conninfo.conninfo_to_dict(dsn).items()}
        self._engine = create_engine(URL.create("postgresql+psycopg", query=query))
        self._store = fenced_store.FencedStore(self._engine)
        self._raw = psycopg.connect(dsn)
        self._stores: dict[str, Any] = {"s3": bucket(where["s3"], where["bucket"]), "files": LocalStore(where["files"])}
        self._objects = {
            "s3": FencedObjects(self._stores["s3"]),
            "files": FencedObjects(self._stores["files"], pointers=self._store),
        }
        self._http = httpx.Client(base_url=where["http"], timeout=30)

    def prepare(self, kind: str, names: list[str], fenced: bool) -> None:
        """Create the resources, each with the value `start`."""
        raw = self._raw
        if kind in OUTSIDE:
            for name in names:
                self.write(kind, name, Numbered(1, 1), "start", fenced)
        elif kind == "key" and fenced:
            for name in names:
                self._store.put(name, "start", if_version=0)
        elif kind == "table":
            for name in names:
                raw.execute(f"CREATE TABLE IF NOT EXISTS whole_{name} (v text)".encode())
                raw.execute(f"DELETE FROM whole_{name}".encode())
                raw.execute(f"INSERT INTO whole_{name} VALUES ('start')".encode())
            raw.commit()
            if fenced:
                for name in names:
                    fenced_store.protect(self._engine, f"whole_{name}", per="table")
        else:
            table = f"{kind}s"
            raw.execute(f"CREATE TABLE IF NOT EXISTS {table} (id text PRIMARY KEY, v text)".encode())
            raw.execute(f"TRUNCATE {table}".encode())
            raw.cursor().executemany(f"INSERT INTO {table} VALUES (%s, 'start')".encode(), [[name] for name in names])
            raw.commit()
            if kind == "row" and fenced:
                fenced_store.protect(self._engine, table)
            elif any(one.resource == f"public.{table}" for one in fenced_store.protected(self._engine)):
                fenced_store.unprotect(self._engine, table)

    def claims(self, kind: str, name: str) -> list[Any]:
        """Return the claims of a lock for this resource."""
        if kind in self._objects:
            return [self._objects[kind].claims(name)]
        if kind == "http":
            return [f"stored:{name}"]
        return [{"row": f"public.rows:{name}", "table": f"public.whole_{name}"}.get(kind, name)]

    def write(self, kind: str, name: str, lease: Any, value: str, fenced: bool) -> None:
        """Write as the holder of a lease: with the lease's token if fenced, else without one."""
        if kind == "http":
            # The token instead of the lease, because the lease would know that it is lost.
            auth = FencingAuth(lease.token) if fenced else httpx.USE_CLIENT_DEFAULT
            folder = "stored" if fenced else "bare"
            self._http.put(f"/{folder}/{name}", content=value, auth=auth).raise_for_status()
        elif kind in self._objects and fenced:
            self._objects[kind].put(name, value.encode(), fence=lease)
        elif kind in self._objects:
            self._stores[kind].put(name, value.encode())
        elif kind == "key" and fenced:
            self._store.put(name, value, fence=lease)
        elif kind == "transaction" and fenced:
            with self._engine.begin() as connection, fenced_store.fence(connection, name, lease):
                connection.execute(text("UPDATE transactions SET v = :v WHERE id = :name"), {"v": value, "name": name})
        else:
            with self._raw.transaction():
                self._raw.execute("SELECT set_config('fenced_store.token', %s, true)", [str(lease.token)])
                if kind == "table":
                    self._raw.execute(f"UPDATE whole_{name} SET v = %s".encode(), [value])
                else:
                    self._raw.execute(f"UPDATE {kind}s SET v = %s WHERE id = %s".encode(), [value, name])

    def read(self, kind: str, name: str, fenced: bool) -> Any:
        """Return the value of a resource."""
        if kind == "http":
            return self._http.get(f"/{'stored' if fenced else 'bare'}/{name}").raise_for_status().text
        if kind in self._objects and fenced:
            there = self._objects[kind].get(name)
            return there and there.data.decode()
        if kind in self._objects:
            return bytes(self._stores[kind].get(name).bytes()).decode()
        if kind == "key" and fenced:
            found = self._store.get(name)
            return found and found.value
        with self._raw.transaction():
            if kind == "table":
                return self._raw.execute(f"SELECT v FROM whole_{name}".encode()).fetchone()[0]  # type: ignore[index]
            return self._raw.execute(f"SELECT v FROM {kind}s WHERE id = %s".encode(), [name]).fetchone()[0]  # type: ignore[index]

    def close(self) -> None:
        self._http.close()
        self._raw.close()
        self._engine.dispose()


def main() -> None:
    """Carry out orders until standard input ends."""
    die_with_parent()
    dsn = sys.argv[1]
    resources = Resources(dsn, json.loads(sys.argv[2]))
    with dblock.Client(dsn) as client:
        for line in sys.stdin:
            order = json.loads(line)
            kind, name, fenced = order["kind"], order["name"], order["fenced"]
            lease = client.lock(f"{kind} {name}", ttl=order["ttl"]).acquire()
            print(json.dumps({"token": lease.token}), flush=True)
            sys.stdin.readline()  # the test stops the process here
            try:
                resources.write(kind, name, lease, f"stale {lease.token}", fenced)
                outcome = "written"
            except (fenced_store.StaleTokenError, psycopg.Error) as error:
                outcome = (
                    "stale"
                    if fenced_store.errors.translated(error) or not isinstance(error, psycopg.Error)
                    else str(error)
                )
            lease.release()
            print(json.dumps({"outcome": outcome}), flush=True)
    resources.close()


if __name__ == "__main__":
    main()
