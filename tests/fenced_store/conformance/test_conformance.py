"""Every fenced resource keeps the promise of fenced_store.conformance, and the checks detect resources that do not."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from obstore.store import GCSStore, LocalStore, MemoryStore
from sqlalchemy import Engine, NullPool, create_engine, text

import fenced_store
from fenced_store import FencedStore, ObjectBusy, StaleTokenError, conformance
from fenced_store.conformance import Open, checks
from fenced_store.objects import FencedObjects
from tests.fenced_store.postgres.conftest import url
from tests.support import isolation
from tests.support.backends import TABLE, Keys, Objects, Rows, Service, Transactions
from tests.support.databases import Databases
from tests.support.gcs import running_gcs
from tests.support.service import running_service

CHECKS = pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
KINDS = [
    "key", "transaction", "row", "s3", "gcs", "memory", "files", "service that presents it again",
    "service that holds it",
]  # fmt: skip
SLOW = {"transaction", "s3", "gcs", "files", "service that presents it again", "service that holds it"}
MANY = ("concurrent_", "a_claim_holds_against_a_write_in_flight")
"""The first words of the names of checks that load a resource heavily."""


def _promises() -> Iterator[Any]:
    """Pair every kind of resource with every check. The second stage runs the heavy checks of slow kinds.

    It also runs every check with two kinds that are like another one: gcs differs from s3 only in the header of a
    conditional write, and the two services only in what they do with the token.
    """
    for kind in KINDS:
        for check in conformance.CHECKS:
            later = kind in ("gcs", "service that holds it") or (kind in SLOW and check.__name__.startswith(MANY))
            marks = [pytest.mark.second_stage] if later else []
            yield pytest.param(kind, check, id=f"{kind}-{check.__name__}", marks=marks)


PROMISES = list(_promises())


@pytest.fixture(scope="module")
def shared(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Engine, Path]]:
    """A database, an engine and a folder for all tests; each check uses its own resource names."""
    with databases.taken(waiters_stay=True) as dsn:
        engine = create_engine(url(dsn), poolclass=NullPool)
        fenced_store.translate_errors(engine)
        with engine.begin() as connection:
            connection.execute(text(TABLE.format("things")))
            connection.execute(text(TABLE.format("protected_things")))
        fenced_store.protect(engine, "protected_things")
        yield dsn, engine, tmp_path_factory.mktemp("files")
        engine.dispose()


@pytest.fixture(scope="module")
def service(shared: tuple[str, Engine, Path]) -> Iterator[str]:
    with ExitStack() as stack:
        with isolation.kept():
            address = stack.enter_context(running_service(shared[0]))
        yield address


@pytest.fixture
def gcs() -> Iterator[GCSStore]:
    with running_gcs() as bucket:
        yield bucket


@pytest.fixture
def opens(request: pytest.FixtureRequest, shared: tuple[str, Engine, Path]) -> Iterator[Open]:
    dsn, engine, folder = shared
    kind = request.param
    memory = MemoryStore()
    opened: list[FencedStore] = []
    bucket = request.getfixturevalue(kind) if kind in ("s3", "gcs") else None
    address = request.getfixturevalue("service") if "service" in kind else ""

    def files() -> Objects:
        opened.append(FencedStore(dsn, patience=60))
        return Objects(FencedObjects(LocalStore(folder), pointers=opened[-1]))

    makes: dict[str, Callable[[], Any]] = {
        "key": lambda: Keys(dsn),
        "transaction": lambda: Transactions(engine, dsn),
        "row": lambda: Rows(engine, dsn),
        "memory": lambda: Objects(FencedObjects(memory)),
        "files": files,
        "s3": lambda: Objects(FencedObjects(bucket)),
        "gcs": lambda: Objects(FencedObjects(bucket)),
        "service that presents it again": lambda: Service(address, "stored"),
        "service that holds it": lambda: Service(address, "held"),
    }
    yield makes[kind]
    for store in opened:
        store.close()


@pytest.mark.parametrize(("opens", "check"), PROMISES, indirect=["opens"])
def test_resource_keeps_the_promise(
    request: pytest.FixtureRequest, opens: Open, check: Callable[[Open], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not request.config.getoption("--nightly"):
        monkeypatch.setattr(checks, "WRITES", 64)
    check(opens)


class Kept(dict[str, tuple[tuple[int, int], bytes | None]]):
    """The state of a resource in this process: the fence and the value of each name."""

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
        super().claim(resource, token)
        fence, _ = self.look(resource)
        if fence[1] == 0:
            self.store(resource, fence, b"")


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
    """Compares and writes without a lock in between."""

    def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
        fence, _ = self.look(resource)
        self.compare(resource, (token, number), fence)
        time.sleep(random.uniform(0, 0.004))
        self.store(resource, (token, number), data)
        return False


class ComparesText(Honest):
    def compare(self, resource: str, pair: tuple[int, int], fence: tuple[int, int]) -> None:
        if (pair[0], str(pair[1])) <= (fence[0], str(fence[1])):
            raise StaleTokenError(resource, pair[0], fence[0], None)


class ComparesFloating(Honest):
    def compare(self, resource: str, pair: tuple[int, int], fence: tuple[int, int]) -> None:
        if (float(pair[0]), float(pair[1])) <= (float(fence[0]), float(fence[1])):
            raise StaleTokenError(resource, pair[0], fence[0], None)


class ComparesThirtyTwoBits(Honest):
    def compare(self, resource: str, pair: tuple[int, int], fence: tuple[int, int]) -> None:
        most = 2**31 - 1
        super().compare(resource, (min(pair[0], most), min(pair[1], most)), (min(fence[0], most), min(fence[1], most)))


class BringsBackWhatCameBefore(Honest):
    """Recognises every write that it has accepted, and performs it again."""

    def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
        key = f"accepted {token} {number} {data!r} {resource}"
        if key in self.kept:
            self.store(resource, self.look(resource)[0], data)
            return True
        repeated = super().write(resource, data, token, number)
        self.kept[key] = ((0, 0), None)
        return repeated


class TakesTheSameLettersForTheSame(Honest):
    def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
        fence, value = self.look(resource)
        if fence == (token, number) and sorted(value or b"") == sorted(data or b""):
            return True
        return super().write(resource, data, token, number)


class ClaimsInTwoSteps(Honest):
    def claim(self, resource: str, token: int) -> None:
        fence, value = self.look(resource)
        if token < fence[0]:
            raise StaleTokenError(resource, token, fence[0], None)
        time.sleep(random.uniform(0, 0.004))
        if token > fence[0]:
            self.store(resource, (token, 0), value)


class DeletesInTwoSteps(Honest):
    def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
        if data is not None:
            return super().write(resource, data, token, number)
        fence, value = self.look(resource)
        if fence == (token, number) and value is None:
            return True
        self.compare(resource, (token, number), fence)
        time.sleep(random.uniform(0, 0.004))
        self.store(resource, (token, number), None)
        return False


class HasNoLock(Honest):
    def __init__(self, kept: Kept) -> None:
        super().__init__(kept)
        self.kept = Kept()
        self.kept.update(kept)
        self.shared = kept

    def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
        fence, _ = self.shared.get(resource, ((0, 0), None))
        if (token, number) <= fence:
            raise StaleTokenError(resource, token, fence[0], None)
        for _ in range(200):  # a little work
            pass
        self.shared[resource] = ((token, number), data)
        return False

    def read(self, resource: str) -> bytes | None:
        return self.shared.get(resource, ((0, 0), None))[1]


class WatchesTheValue(Honest):
    """Replaces only the value that it read, which a newer writer may have written again since."""

    def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
        while True:
            fence, before = self.look(resource)
            self.compare(resource, (token, number), fence)
            time.sleep(random.uniform(0, 0.004))
            with self.kept.lock:
                if self.look(resource)[1] == before:
                    self.store(resource, (token, number), data)
                    return False


BROKEN: list[tuple[type[Honest], Callable[[Open], None], str]] = [
    (ComparesTokensAlone, checks.refuses_a_lower_write_number, "write.*8, 1.*was accepted"),
    (ComparesNumbersAlone, checks.refuses_a_lower_token, r"and the stored one; expected \(7, 8\)|was accepted"),
    (RefusesWhatComesTwice, checks.recognises_a_repeated_write, "was refused, although it is not stale"),
    (TakesAnythingUnderANumberForTheSame, checks.recognises_a_repeated_write, "b'other'.*was accepted"),
    (TakesTheSameLettersForTheSame, checks.recognises_a_repeated_write, "b'cone'.*was accepted"),
    (BringsBackWhatCameBefore, checks.a_late_repeat_changes_nothing, "changes nothing; expected"),
    (ComparesText, checks.compares_tokens_as_integers, "1, 10.*was refused"),
    (ComparesFloating, checks.compares_tokens_as_integers, "was refused"),
    (ComparesThirtyTwoBits, checks.compares_tokens_as_integers, "was refused"),
    (ForgetsWhatWasDeleted, checks.a_deletion_keeps_the_fence, "b'back'.*was accepted"),
    (RemembersForItselfAlone, checks.refuses_a_lower_token, "was accepted"),
    (ClaimsNothing, checks.a_claim_refuses_lower_tokens_at_once, "b'late'.*was accepted"),
    (ClaimsAwayTheValue, checks.a_claim_refuses_lower_tokens_at_once, "keeps the value"),
    (LowersByAClaim, checks.a_claim_refuses_lower_tokens_at_once, "b'x'.*was accepted"),
    (MixesNamesUp, checks.keeps_resources_separate, "was refused"),
    (LooksFirstAndWritesThen, checks.concurrent_writes_are_accepted_in_order, "accepted pairs must rise|In the end"),
    (HasNoLock, checks.concurrent_writes_are_accepted_in_order, "accepted pairs must rise|In the end"),
    (
        WatchesTheValue,
        checks.concurrent_writes_of_the_same_bytes_are_accepted_in_order,
        "accepted pairs must rise|was accepted",
    ),
    (
        ClaimsInTwoSteps,
        checks.concurrent_claims_and_deletions_are_accepted_in_order,
        "accepted pairs must rise|In the end",
    ),
    (
        DeletesInTwoSteps,
        checks.concurrent_claims_and_deletions_are_accepted_in_order,
        "accepted pairs must rise|In the end",
    ),
    (LooksFirstAndWritesThen, checks.a_claim_holds_against_a_write_in_flight, "In round"),
]


@CHECKS
def test_honest_backend_passes(check: Callable[[Open], None]) -> None:
    kept = Kept()
    check(lambda: Honest(kept))


@pytest.mark.parametrize(("takes", "rounds"), [(0.25, 4), (1.5, 1)])
def test_quick_backend_gets_several_storms(monkeypatch: pytest.MonkeyPatch, takes: float, rounds: int) -> None:
    storms: list[object] = []
    monkeypatch.setattr(checks, "_storm_once", lambda *args: storms.append(args))
    monkeypatch.setattr(checks, "time", SimpleNamespace(monotonic=lambda: len(storms) * takes))
    monkeypatch.setattr(checks, "STORM_SECONDS", 1.0)
    checks.concurrent_writes_are_accepted_in_order(lambda: Honest(Kept()))
    assert len(storms) == rounds


@pytest.mark.parametrize(("kind", "check", "says"), BROKEN, ids=lambda one: getattr(one, "__name__", ""))
def test_check_detects_a_broken_backend(kind: type[Honest], check: Callable[[Open], None], says: str) -> None:
    """At once, or within a few runs if detection depends on a race."""
    for _ in range(10):
        kept = Kept()
        try:
            check(lambda kept=kept: kind(kept))  # type: ignore[misc]
        except AssertionError as error:
            assert re.search(says, str(error)), error
            return
    pytest.fail("it passed ten times")


def test_every_check_detects_a_broken_backend() -> None:
    assert {check for _, check, _ in BROKEN} == set(conformance.CHECKS) - {checks.accepts_rising_pairs}


@pytest.mark.second_stage
def test_checks_do_not_depend_on_asserts() -> None:
    """They also work in an interpreter that ignores assert statements."""
    script = """
from fenced_store.conformance import checks
from tests.fenced_store.conformance.test_conformance import Honest, Kept
class Blank(Honest):
    def store(self, resource, pair, data):
        super().store(resource, pair, b"")
kept = Kept()
try:
    checks.accepts_rising_pairs(lambda: Blank(kept))
except AssertionError as error:
    print(error)
"""
    root = Path(__file__).parents[3]
    said = subprocess.check_output([sys.executable, "-O", "-c", script], text=True, cwd=root)
    assert "read back; expected b'a', got b''" in said


def test_backend_that_cannot_be_opened_fails_at_once() -> None:
    kept, opened = Kept(), iter(range(100))

    def opens() -> Honest:
        if next(opened) == 5:
            raise OSError("no more of them")
        return Honest(kept)

    with pytest.raises(OSError, match="no more of them"):
        checks.concurrent_writes_are_accepted_in_order(opens)


def test_backend_that_is_busy_at_times_passes() -> None:
    class Busy(Honest):
        def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
            if number == 2 and token < 30:
                raise ObjectBusy(resource, 1)
            return super().write(resource, data, token, number)

    kept = Kept()
    checks.concurrent_writes_are_accepted_in_order(lambda: Busy(kept))


def test_backend_that_stores_nothing_is_detected_with_one_resource() -> None:
    class Blank(Honest):
        def store(self, resource: str, pair: tuple[int, int], data: bytes | None) -> None:
            super().store(resource, pair, b"")

    kept = Kept()
    with pytest.raises(AssertionError, match=r"read back; expected b'a', got b''"):
        checks.accepts_rising_pairs(lambda: Blank(kept))
