"""The errors of fenced_store. Each carries the values that a caller needs to act on it.

FencedStoreError
├── StaleTokenError     a newer holder has written or claimed the resource
│   └── FenceAhead      a claim found the fence above its token: the lock was granted again, or tokens have gone back
├── MissingToken        a strict fence refused a transaction that carries no token
├── ClaimTimeout        a claim waited too long for a transaction that has passed the fence
├── WriteTimeout        a write waited too long for a transaction that has passed the fence
├── TransactionConflict the transaction conflicts with another one; run it again from the start
├── VersionConflict     compare-and-set found another version
├── OutcomeUnknown      the reply was lost; retry the same write
├── Unavailable         the database cannot be reached, or does not answer
├── LoginRefused        the server refuses the role, the password or the database
├── StoreClosed         the store was closed
├── FenceBroken         the transaction ended inside its fence, or rolled back past it
├── ObjectBusy          other writers changed an object every time; nothing was stored
├── ObjectDamaged       the stored object is not what a fenced write has left there
├── AccessDenied        the role lacks a privilege
├── NotInstalled        the schema is missing, or has another revision
└── InvalidArgument     (also a ValueError) an argument is invalid
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

from fenced_store.refusals import reported

STALE, MISSING, INVALID_TOKEN, AHEAD = "FEN01", "FEN02", "FEN03", "FEN04"
"""The SQLSTATEs of fenced_store: a token too low, no token, an invalid token, a claim below the fence."""


class FencedStoreError(Exception):
    """The base class of all errors of this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.__dict__)


def _rebuild(kind: type[FencedStoreError], message: str, state: dict[str, Any]) -> FencedStoreError:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class StaleTokenError(FencedStoreError):
    """The token is lower than one that the resource has seen. Its holder was superseded, and must stop writing."""

    def __init__(
        self,
        resource: str,
        offered: int,
        stored: int,
        stored_at: datetime | None,
        stored_by: str | None = None,
        *,
        numbers: tuple[int, int] | None = None,
    ) -> None:
        when = f" at {stored_at.isoformat(sep=' ', timespec='milliseconds')}" if stored_at else ""
        by = f" by {stored_by}" if stored_by else ""
        if offered == stored and numbers is not None:
            # The lease may still be valid: its own writes have overtaken each other.
            which = "another write under the same number" if numbers[0] == numbers[1] else "a later write"
            refusal = (
                f"refuses write {numbers[0]} under token {offered}: {which} of the same holder was stored{when}{by}. "
                "Under one lease, let only one thread or task write a key."
            )
        else:
            refusal = (
                f"refuses token {offered}: token {stored} was stored{when}{by}. The lease of token {offered} is over. "
                "Acquire the lock again and redo the work from the start."
            )
        super().__init__(f"Resource {abbreviated(resource)} {refusal}")
        self.resource = resource
        self.offered = offered
        self.stored = stored
        self.stored_at = stored_at
        self.stored_by = stored_by
        self.numbers = numbers
        """The write numbers, offered and stored, if the tokens are equal."""


class MissingToken(FencedStoreError):
    """A transaction without a token wrote to a resource with a strict fence."""

    def __init__(self, resource: str) -> None:
        super().__init__(
            f"Resource {abbreviated(resource)} refuses a transaction that carries no fencing token. Write inside "
            "fence(...), or execute SET LOCAL fenced_store.token = '…' first."
        )
        self.resource = resource


class FenceAhead(StaleTokenError):
    """A claim found the fence above its token: the lock was granted again since, or tokens have gone back."""

    def __init__(self, resource: str, offered: int, stored: int) -> None:
        FencedStoreError.__init__(
            self,
            f"Resource {abbreviated(resource)} refuses to be claimed with token {offered}: its fence stands at token "
            f"{stored}. If the lock was granted again since, acquire it again. If not, tokens have gone back, perhaps "
            f"because of a restore. Raise them; with dblock, run: dblock token raise --above {stored}",
        )
        self.resource, self.offered, self.stored = resource, offered, stored
        self.stored_at = self.stored_by = self.numbers = None


class ClaimTimeout(FencedStoreError, TimeoutError):
    """A claim waited too long for a transaction that has passed the fence. Nothing was claimed."""


class WriteTimeout(FencedStoreError, TimeoutError):
    """A write waited too long for a transaction that has passed the fence of its key. Nothing was stored."""

    def __init__(self, key: str, patience: float) -> None:
        super().__init__(
            f"Key {abbreviated(key)} was not written: another transaction has held its fence for {patience:g} s. "
            "Nothing was stored. Try again, or give the store more patience."
        )
        self.key = key
        self.patience = patience


class TransactionConflict(FencedStoreError):
    """The transaction conflicts with another one, so the database has failed it. Run it again from the start.

    Postgres reports this as a serialization failure or as a deadlock. The first only happens in transactions that are
    stricter than READ COMMITTED. The driver's error is the cause of this one.
    """

    def __init__(self, resource: str, state: str) -> None:
        what = "a deadlock" if state == "40P01" else "a serialization failure"
        super().__init__(
            f"Resource {abbreviated(resource)}: the transaction conflicts with another one ({what}). Nothing was "
            "stored. Roll back, and run the transaction again from the start."
        )
        self.resource = resource
        self.sqlstate = state
        """40001 for a serialization failure, 40P01 for a deadlock: for helpers that retry by SQLSTATE."""


class VersionConflict(FencedStoreError):
    """The stored version is not the version that the write expected to replace."""

    def __init__(self, key: str, expected: int, version: int) -> None:
        actual = f"is at version {version}" if version else "does not exist"
        wanted = f"at version {expected}" if expected else "not to exist"
        super().__init__(
            f"Key {abbreviated(key)} {actual}; the write expected it {wanted}. Read the key and decide again."
        )
        self.key = key
        self.expected = expected
        self.version = version


class OutcomeUnknown(FencedStoreError):
    """The reply was lost, so the write may or may not have been stored. To retry the same write, pass `write`."""

    def __init__(self, key: str, write: int, cause: str) -> None:
        super().__init__(
            f"The outcome of writing key {abbreviated(key)} is unknown: {cause} Send the same write again with "
            f"write={write}. If it was stored, the retry succeeds and changes nothing."
        )
        self.key = key
        self.write = write


class Unavailable(FencedStoreError):
    """The database cannot be reached, or has not answered in time. A write that was sent raises OutcomeUnknown."""


class LoginRefused(FencedStoreError):
    """The server refuses the role, the password or the database. A retry does not help.

    A write that was sent before the refusal raises OutcomeUnknown.
    """


class StoreClosed(FencedStoreError):
    """The store was closed and cannot be used again. No write was sent."""

    def __init__(self, kind: str, schema: str) -> None:
        super().__init__(f"This {kind} on schema {schema!r} is closed. No write was sent. Create a new one.")


class FenceBroken(FencedStoreError):
    """Inside the body of `fence`, its transaction ended or rolled back past the fence, so its work is unprotected."""


class ObjectBusy(FencedStoreError, TimeoutError):
    """Other writers changed the object before each attempt of this write. Nothing was stored."""

    def __init__(self, path: str, tries: int) -> None:
        super().__init__(
            f"Object {abbreviated(path)} was changed by other writers before each of {tries} attempts; nothing was "
            "stored. Let one lock guard all writes of this object."
        )
        self.path = path


class ObjectDamaged(FencedStoreError):
    """The stored object is not what a fenced write has left: a writer bypassed the fence, or data was lost."""

    def __init__(self, path: str, damage: str) -> None:
        super().__init__(f"Object {abbreviated(path)} is damaged: {damage}")
        self.path = path


class AccessDenied(FencedStoreError):
    """The database refused: the role lacks a privilege. The message says which."""


class NotInstalled(FencedStoreError):
    """The schema of fenced_store is missing in this database, or has another revision than this version needs."""


class InvalidArgument(FencedStoreError, ValueError):
    """An argument that is no valid resource, token, value or table."""


def sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of a driver's error, also if SQLAlchemy has wrapped it."""
    return _driver_error(error)[1]


def _driver_error(error: BaseException) -> tuple[BaseException, str | None]:
    """Return the driver's own error and its SQLSTATE."""
    original = getattr(error, "orig", None) or error
    # SQLAlchemy wraps asyncpg's error twice: the original is the cause of `orig`.
    for each in (original, original.__cause__):
        state = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
        if each is not None and isinstance(state, str):
            return each, state
    return error, None


def translated(error: BaseException) -> FencedStoreError | None:
    """Return the fenced_store error for a database error with one of the SQLSTATEs above; None for any other."""
    cause, state = _driver_error(error)
    if state not in (STALE, MISSING, INVALID_TOKEN, AHEAD):
        return None
    message, detail, _ = diagnostics_of(error)
    try:
        found = json.loads(detail) if detail else {}
    except ValueError:
        return None
    if state != INVALID_TOKEN and "resource" not in found:
        return None  # another program's error with the same SQLSTATE
    if state == STALE:
        at = found["stored_at"]
        stored_at = _moment(at) if at else None
        stale = StaleTokenError(found["resource"], found["offered"], found["stored"], stored_at, found["stored_by"])
        return reported(stale, cause)
    if state == MISSING:
        return MissingToken(found["resource"])
    if state == AHEAD:
        return FenceAhead(found["resource"], found["offered"], found["stored"])
    return InvalidArgument(message)


def _moment(text: str) -> datetime:
    """Return the moment that Postgres has written as JSON. Python 3.10 reads a fraction of three or six digits only."""
    return datetime.fromisoformat(re.sub(r"\.(\d+)", lambda found: f".{found[1]:0<6}", text))


def diagnostics_of(error: BaseException) -> tuple[str, str, str]:
    """Return the message, the detail and the hint of a database error."""
    original = getattr(error, "orig", None) or error
    diag = getattr(original, "diag", None)
    if diag is not None:
        return str(diag.message_primary), str(diag.message_detail or ""), str(diag.message_hint or "")
    cause: Any = original.__cause__ or original
    return (
        str(getattr(cause, "message", cause)),
        str(getattr(cause, "detail", "") or ""),
        str(getattr(cause, "hint", "") or ""),
    )


def abbreviated(name: str) -> str:
    """Return a name for an error message: in full if short, else cut off."""
    return ascii(name) if len(name) <= 60 else f"{name[:57]!a}…"
