"""Every kind of fenced resource in fenced_store, as a Backend of fenced_store.conformance."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx
from sqlalchemy import Connection, Engine, text

import fenced_store
from fenced_store import FenceAhead, FencedStore, StaleTokenError, fence
from fenced_store.http import FencingAuth
from fenced_store.objects import FencedObjects

TABLE = "CREATE TABLE IF NOT EXISTS {} (name text PRIMARY KEY, data bytea, token bigint, number bigint)"

WRITE = text(
    "INSERT INTO things AS t VALUES (:name, :data, :token, :number) ON CONFLICT (name) DO UPDATE"
    " SET data = excluded.data, token = excluded.token, number = excluded.number"
    " WHERE (excluded.token, excluded.number) > (t.token, t.number) RETURNING true"
)
OVERWRITE = text(WRITE.text.split(" WHERE ")[0])
"""The same without the comparison."""
FOUND = text("SELECT data, token, number FROM things WHERE name = :name")


def values(name: str, data: bytes | None, token: int, number: int) -> dict[str, Any]:
    return {"name": name, "data": data, "token": token, "number": number}


def is_repeated(name: str, data: bytes | None, token: int, number: int, found: Any) -> bool:
    """Return whether a write that changed nothing was accepted before; raise StaleTokenError if not."""
    if (token, number, data) == (found.token, found.number, found.data):
        return True
    raise StaleTokenError(name, token, found.token, None, numbers=(number, found.number))


class Keys:
    """Keys of a FencedStore."""

    def __init__(self, dsn: str) -> None:
        self._store = FencedStore(dsn, patience=60)
        self.close = self._store.close

    def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
        if data is None:
            return self._store.delete(resource, fence=token, write=number).repeated
        return self._store.put(resource, data, fence=token, write=number).repeated

    def claim(self, resource: str, token: int) -> None:
        self._store.claim(resource, fence=token)

    def read(self, resource: str) -> bytes | None:
        found = self._store.get(resource)
        return None if found is None else found.value


class Transactions:
    """Rows of a user's table, written inside `fence(...)`; the write number is compared with the row's."""

    write_it, find_it = WRITE, FOUND

    def __init__(self, engine: Engine, dsn: str) -> None:
        self._engine = engine
        self._store = FencedStore(dsn)
        self.close = self._store.close

    def _enter(self, connection: Connection, resource: str, token: int) -> Any:
        return fence(connection, resource, token)

    def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
        with self._engine.begin() as connection, self._enter(connection, resource, token):
            if connection.execute(self.write_it, values(resource, data, token, number)).one_or_none():
                return False
            found = connection.execute(self.find_it, {"name": resource}).one()
            return is_repeated(resource, data, token, number, found)

    def claim(self, resource: str, token: int) -> None:
        self._store.claim(resource, fence=token)

    def read(self, resource: str) -> bytes | None:
        with self._engine.connect() as connection:
            found = connection.execute(self.find_it, {"name": resource}).one_or_none()
            return None if found is None else found.data


class Rows(Transactions):
    """Rows of a table that is protected per row; the transaction sets its token as in any other language."""

    write_it, find_it = (text(one.text.replace("things", "protected_things")) for one in (WRITE, FOUND))

    def _enter(self, connection: Connection, resource: str, token: int) -> Any:
        connection.execute(text("SELECT set_config('fenced_store.token', :token, true)"), {"token": str(token)})
        return connection.begin_nested()

    def claim(self, resource: str, token: int) -> None:
        self._store.claim(fenced_store.row("public.protected_things", resource), fence=token)
        # A claim does not check the token stored in the row. A claimant that may read the row can.
        with self._engine.connect() as connection:
            wrote = connection.execute(
                text("SELECT fence_token FROM protected_things WHERE name = :name"), {"name": resource}
            ).scalar_one_or_none()
        if wrote is not None and wrote > token:
            raise FenceAhead(resource, token, wrote)


class Objects:
    """Objects in any store."""

    def __init__(self, objects: FencedObjects) -> None:
        self._objects = objects

    def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
        if data is None:
            return self._objects.delete(resource, fence=token, write=number).repeated
        return self._objects.put(resource, data, fence=token, write=number).repeated

    def claim(self, resource: str, token: int) -> None:
        self._objects.claim(resource, fence=token)

    def read(self, resource: str) -> bytes | None:
        found = self._objects.get(resource)
        return None if found is None else found.data


class Service:
    """Things of tests.support.service, over HTTP; `folder` selects the kind of handler."""

    def __init__(self, address: str, folder: str) -> None:
        self._http = httpx.Client(base_url=f"{address}/{folder}", timeout=60)
        self.close = self._http.close

    def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
        auth = FencingAuth(Numbered(token, number))
        answer = self._http.request("DELETE" if data is None else "PUT", self._path(resource), content=data, auth=auth)
        return bool(answer.raise_for_status().json()["repeated"])

    def claim(self, resource: str, token: int) -> None:
        self._http.post(self._path(resource), auth=FencingAuth(token)).raise_for_status()

    def read(self, resource: str) -> bytes | None:
        answer = self._http.get(self._path(resource))
        return None if answer.status_code == 404 else answer.raise_for_status().content

    @staticmethod
    def _path(resource: str) -> str:
        return quote(resource, safe="")


class Numbered:
    """A token that stands for one write."""

    def __init__(self, token: int, write: int) -> None:
        self.token = token
        self.write = write
