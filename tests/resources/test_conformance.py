"""Every fenced resource keeps the promise of fenced_store.conformance; and those that do not are found out."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from obstore.store import LocalStore, MemoryStore
from sqlalchemy import Engine, create_engine, text

import fenced_store
from fenced_store import FencedStore, StaleTokenError, conformance
from fenced_store.conformance import Open
from fenced_store.objects import FencedObjects
from tests.fences.conftest import url
from tests.support.backends import TABLE, Keys, Objects, Rows, Service, Transactions
from tests.support.service import running_service

CHECKS = pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
KINDS = ["key", "transaction", "row", "s3", "memory", "files", "service that shows it again", "service that holds it"]


@pytest.fixture(scope="module")
def shared(server: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Engine, Path]]:
    """A database for all of them, which use names of their own; and an engine on it, and a folder."""
    from tests.conftest import _database

    with _database(server, "dblock_test_conformance", template) as dsn:
        engine = create_engine(url(dsn), pool_size=20)
        fenced_store.raise_ours(engine)
        with engine.begin() as connection:
            connection.execute(text(TABLE.format("things")))
            connection.execute(text(TABLE.format("protected_things")))
        fenced_store.protect(engine, "protected_things")
        yield dsn, engine, tmp_path_factory.mktemp("files")
        engine.dispose()


@pytest.fixture(scope="module")
def service(shared: tuple[str, Engine, Path]) -> Iterator[str]:
    with running_service(shared[0]) as address:
        yield address


@pytest.fixture(params=KINDS)
def opens(request: pytest.FixtureRequest, shared: tuple[str, Engine, Path]) -> Iterator[Open]:
    dsn, engine, folder = shared
    kind = request.param
    memory = MemoryStore()
    opened: list[FencedStore] = []
    bucket = request.getfixturevalue("s3") if kind == "s3" else None
    address = request.getfixturevalue("service") if "service" in kind else ""

    def files() -> Objects:
        opened.append(FencedStore(dsn))
        return Objects(FencedObjects(LocalStore(folder), pointers=opened[-1]))

    makes: dict[str, Callable[[], Any]] = {
        "key": lambda: Keys(dsn),
        "transaction": lambda: Transactions(engine, dsn),
        "row": lambda: Rows(engine, dsn),
        "memory": lambda: Objects(FencedObjects(memory)),
        "files": files,
        "s3": lambda: Objects(FencedObjects(bucket)),
        "service that shows it again": lambda: Service(address, "stored"),
        "service that holds it": lambda: Service(address, "held"),
    }
    yield makes[kind]
    for store in opened:
        store.close()


@CHECKS
def test_it_keeps_the_promise(opens: Open, check: Callable[[Open], None]) -> None:
    check(opens)


class Kept(dict[str, tuple[tuple[int, int], bytes | None]]):
    """What a resource in this process remembers: for each name the fence and the value."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()


class Honest:
    """A resource in this process that keeps the promise."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept

    def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
        with self.kept.lock:
            fence, value = self.look(resource)
            if (token, number) == fence and data == value and number:
                return True
            self.compare(resource, (token, number), fence)
            self.store(resource, (token, number), data)
            return False

    def claim(self, resource: str, token: int) -> None:
        with self.kept.lock:
            fence, value = self.look(resource)
            if token < fence[0]:
                raise StaleTokenError(resource, token, fence[0], None)
            if token > fence[0]:
                self.store(resource, (token, 0), value)

    def read(self, resource: str) -> bytes | None:
        return self.look(resource)[1]

    def look(self, resource: str) -> tuple[tuple[int, int], bytes | None]:
        return self.kept.get(resource, ((0, 0), None))

    def compare(self, resource: str, pair: tuple[int, int], fence: tuple[int, int]) -> None:
        if pair <= fence:
            raise StaleTokenError(resource, pair[0], fence[0], None)

    def store(self, resource: str, pair: tuple[int, int], data: bytes | None) -> None:
        self.kept[resource] = (pair, data)


class ComparesTokensAlone(Honest):
    def compare(self, resource: str, pair: tuple[int, int], fence: tuple[int, int]) -> None:
        super().compare(resource, (pair[0], 1), (fence[0], 0))


class ComparesNumbersAlone(Honest):
    def compare(self, resource: str, pair: tuple[int, int], fence: tuple[int, int]) -> None:
        super().compare(resource, (1, pair[1]), (1, fence[1]))


class RefusesWhatComesTwice(Honest):
    def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
        if self.look(resource)[0] == (token, number):
            raise StaleTokenError(resource, token, token, None)
        return super().write(resource, data, token, number)


class TakesAnythingUnderANumberForTheSame(Honest):
    def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
        return self.look(resource)[0] == (token, number) or super().write(resource, data, token, number)


class ForgetsWhatWasDeleted(Honest):
    def store(self, resource: str, pair: tuple[int, int], data: bytes | None) -> None:
        super().store(resource, pair, data)
        if data is None:
            del self.kept[resource]


class RemembersForItselfAlone(Honest):
    def __init__(self, kept: Kept) -> None:
        super().__init__(kept)
        self.mine = Kept()

    def look(self, resource: str) -> tuple[tuple[int, int], bytes | None]:
        return self.mine.get(resource, ((0, 0), None))[0], self.kept.get(resource, ((0, 0), None))[1]

    def store(self, resource: str, pair: tuple[int, int], data: bytes | None) -> None:
        self.mine[resource] = self.kept[resource] = (pair, data)


class ClaimsNothing(Honest):
    def claim(self, resource: str, token: int) -> None:
        pass


class ClaimsAwayTheValue(Honest):
    def claim(self, resource: str, token: int) -> None:
        if token > self.look(resource)[0][0]:
            self.write(resource, b"", token, 1)


class LowersByAClaim(Honest):
    def claim(self, resource: str, token: int) -> None:
        fence, value = self.look(resource)
        if token < fence[0]:
            raise StaleTokenError(resource, token, fence[0], None)
        self.store(resource, (token, 0), value)


class MixesNamesUp(Honest):
    def look(self, resource: str) -> tuple[tuple[int, int], bytes | None]:
        return super().look(resource.lower())

    def store(self, resource: str, pair: tuple[int, int], data: bytes | None) -> None:
        super().store(resource.lower(), pair, data)


class LooksFirstAndWritesThen(Honest):
    """Nothing holds between the comparison and the write."""

    def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
        fence, _ = self.look(resource)
        self.compare(resource, (token, number), fence)
        time.sleep(random.uniform(0, 0.004))
        self.store(resource, (token, number), data)
        return False


class WatchesTheValue(Honest):
    """Replaces only the value that it looked at; which may have been written again since, by somebody newer."""

    def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
        while True:
            fence, before = self.look(resource)
            self.compare(resource, (token, number), fence)
            time.sleep(random.uniform(0, 0.004))
            with self.kept.lock:
                if self.look(resource)[1] == before:
                    self.store(resource, (token, number), data)
                    return False


BROKEN = {
    ComparesTokensAlone: conformance.refuses_a_lower_number_of_the_same_token,
    ComparesNumbersAlone: conformance.refuses_a_lower_token,
    RefusesWhatComesTwice: conformance.knows_the_same_write_sent_twice,
    TakesAnythingUnderANumberForTheSame: conformance.knows_the_same_write_sent_twice,
    ForgetsWhatWasDeleted: conformance.keeps_its_fence_when_deleted,
    RemembersForItselfAlone: conformance.refuses_a_lower_token,
    ClaimsNothing: conformance.a_claim_refuses_before_anything_is_written,
    ClaimsAwayTheValue: conformance.a_claim_refuses_before_anything_is_written,
    LowersByAClaim: conformance.a_claim_refuses_before_anything_is_written,
    MixesNamesUp: conformance.keeps_resources_apart,
    LooksFirstAndWritesThen: conformance.many_writers_are_accepted_in_order,
    WatchesTheValue: conformance.many_writers_of_the_same_bytes_too,
}


@CHECKS
def test_an_honest_one_passes(check: Callable[[Open], None]) -> None:
    kept = Kept()
    check(lambda: Honest(kept))


@pytest.mark.parametrize(("kind", "check"), BROKEN.items(), ids=lambda one: one.__name__)
def test_one_that_breaks_it_is_found_out(kind: type[Honest], check: Callable[[Open], None]) -> None:
    kept = Kept()
    with pytest.raises(AssertionError):
        check(lambda: kind(kept))


def test_a_write_under_way_past_a_claim_is_found_out() -> None:
    kept = Kept()
    with pytest.raises(AssertionError, match="In round"):
        conformance.a_claim_holds_against_a_write_under_way(lambda: LooksFirstAndWritesThen(kept))


def test_every_check_finds_something_out() -> None:
    trivial = {conformance.accepts_what_rises, conformance.a_claim_holds_against_a_write_under_way}
    assert set(BROKEN.values()) == set(conformance.CHECKS) - trivial


def test_only_one_resource_is_enough_to_see_it_hold_nothing() -> None:
    class Blank(Honest):
        def store(self, resource: str, pair: tuple[int, int], data: bytes | None) -> None:
            super().store(resource, pair, b"")

    kept = Kept()
    with pytest.raises(AssertionError, match=r"read back; expected b'a', got b''"):
        conformance.accepts_what_rises(lambda: Blank(kept))
