"""Fixtures for the tests of objects and HTTP services: object stores of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from obstore.store import LocalStore, MemoryStore, S3Store

from fenced_store import FencedStore, _calls, store
from fenced_store._postgres import connections, rejection_log
from fenced_store.http import middleware
from fenced_store.objects import FencedObjects
from tests.support import isolation
from tests.support.s3 import bucket, new_bucket, running_s3
from tests.support.stages import stage_of


@pytest.fixture(autouse=True)
def _patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first stage, let stores, services and the log of rejections wait for a server that stands still."""
    if stage_of(request.node) != "1":
        return
    for module in (_calls, store, middleware):
        monkeypatch.setattr(module, "REPLY_MARGIN", 60.0)
    monkeypatch.setattr(connections, "CONNECT_TIMEOUT", 60)
    monkeypatch.setattr(rejection_log, "RECORD_TIMEOUT", 60)


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    with ExitStack() as stack:
        with isolation.kept():
            address = stack.enter_context(running_s3())
        yield address


@pytest.fixture
def s3(s3_address: str) -> S3Store:
    """A bucket for this test alone."""
    return bucket(s3_address, new_bucket(s3_address))


class Place:
    """A store of objects that several FencedObjects of one test share."""

    def __init__(self, kind: str, store: Any, dsn: str | None) -> None:
        self.kind = kind
        self.store = store
        self._dsn = dsn
        self._opened: list[FencedStore] = []

    def objects(self, **options: Any) -> FencedObjects:
        if self._dsn is None:
            return FencedObjects(self.store, **options)
        self._opened.append(FencedStore(self._dsn))
        return FencedObjects(self.store, pointers=self._opened[-1], **options)

    def close(self) -> None:
        for opened in self._opened:
            opened.close()


@pytest.fixture(params=["s3", "memory", "files"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "s3":
        made = Place("s3", request.getfixturevalue("s3"), None)
    elif request.param == "memory":
        made = Place("memory", MemoryStore(), None)
    else:
        made = Place("files", LocalStore(tmp_path), request.getfixturevalue("dsn"))
    yield made
    made.close()


@pytest.fixture
def objects(place: Place) -> FencedObjects:
    return place.objects()
