"""What can go wrong, each with what is needed to act on it.

FencedStoreError
├── StaleTokenError     a newer holder has written, or claimed, the resource
│   └── FenceAhead      a claim found a fence above its token: another was granted the lock, or tokens have gone back
├── MissingToken        a strict fence met a transaction that carries no token
├── ClaimTimeout        a claim had to wait for too long for a transaction that is past the fence
├── VersionConflict     compare-and-set found another version
├── OutcomeUnknown      the answer was lost; the same write can be sent again
├── FenceBroken         the transaction ended inside its fence, and another was begun
├── ObjectBusy          others changed an object again and again; nothing was stored
├── ObjectDamaged       what is stored of an object is not what a fence has left there
├── AccessDenied        the role may not do this
├── NotInstalled        the schema is not there, or is of another revision
└── InvalidArgument     (also a ValueError) what was asked for cannot be
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

STALE, MISSING, NO_TOKEN, AHEAD = "FEN01", "FEN02", "FEN03", "FEN04"
"""The SQLSTATEs that are ours: a token too low, no token, what cannot be a token, a claim below the fence."""


class FencedStoreError(Exception):
    """The base of all errors of this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), str(self), self.__dict__)


def _rebuilt(kind: type[FencedStoreError], message: str, state: dict[str, Any]) -> FencedStoreError:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class StaleTokenError(FencedStoreError):
    """A token lower than the one that the resource has seen: its holder was superseded, and must not go on."""

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
            # The lease may be as good as ever: its own writes have overtaken each other.
            which = "another write under the same number" if numbers[0] == numbers[1] else "a later write"
            said = (
                f"refuses write {numbers[0]} under token {offered}: {which} of the same holder was stored{when}{by}. "
                "Let one thread or task write a key under one lease."
            )
        else:
            said = (
                f"refuses token {offered}: token {stored} was stored{when}{by}. The lease that token {offered} came "
                "with is over: acquire the lock anew and do the work again from the start."
            )
        super().__init__(f"Resource {shown(resource)} {said}")
        self.resource = resource
        self.offered = offered
        self.stored = stored
        self.stored_at = stored_at
        self.stored_by = stored_by
        self.numbers = numbers
        """The write numbers, offered and stored, where the tokens are the same."""


class MissingToken(FencedStoreError):
    """A transaction without a token wrote to a resource with a strict fence."""

    def __init__(self, resource: str) -> None:
        super().__init__(
            f"Resource {shown(resource)} refuses a transaction that carries no fencing token. Write inside fence(...), "
            "or execute SET LOCAL fenced_store.token = '…' first."
        )
        self.resource = resource


class FenceAhead(StaleTokenError):
    """A claim found a fence above its token: another was granted the lock since, or tokens have gone back."""

    def __init__(self, resource: str, offered: int, stored: int) -> None:
        FencedStoreError.__init__(
            self,
            f"Resource {shown(resource)} refuses to be claimed with token {offered}: its fence stands at token "
            f"{stored}. If "
            "another was granted the lock since, acquire it anew. If not, tokens have gone back, by a restore "
            "perhaps: raise "
            f"them above, with dblock by: dblock token raise --above {stored}",
        )
        self.resource, self.offered, self.stored = resource, offered, stored
        self.stored_at = self.stored_by = self.numbers = None


class ClaimTimeout(FencedStoreError, TimeoutError):
    """A transaction that is past a fence has kept a claim waiting for too long; nothing was claimed."""


class VersionConflict(FencedStoreError):
    """Another version is stored than the one that the write was to replace."""

    def __init__(self, key: str, expected: int, version: int) -> None:
        now = f"it is at version {version}" if version else "it is not there"
        was = f"at version {expected}" if expected else "absent"
        super().__init__(f"Key {shown(key)} was expected {was}, and {now}. Read it again and decide anew.")
        self.key = key
        self.expected = expected
        self.version = version


class OutcomeUnknown(FencedStoreError):
    """The database did not answer; the write may have been stored or not. `write` sends the very same one again."""

    def __init__(self, key: str, write: int, said: str) -> None:
        super().__init__(
            f"Whether key {shown(key)} was written is not known: {said} Send the same again with write={write}; if it "
            "was stored, it will be answered as done."
        )
        self.key = key
        self.write = write


class FenceBroken(FencedStoreError):
    """The transaction that a fence was taken in has ended inside its body, and another one was begun there."""


class ObjectBusy(FencedStoreError, TimeoutError):
    """Others have changed an object each time before the write could; nothing was stored."""

    def __init__(self, path: str, tries: int) -> None:
        super().__init__(
            f"Object {shown(path)} was changed by others each of {tries} times before this write could be done; "
            f"nothing "
            "was stored. Write it under one lock."
        )
        self.path = path


class ObjectDamaged(FencedStoreError):
    """What is stored of an object is not what a fence has left there: somebody has gone around it, or it was lost."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"Object {shown(path)} is damaged: {what}")
        self.path = path


class AccessDenied(FencedStoreError):
    """The database refused: the role may not do this. The message says what it needs."""


class NotInstalled(FencedStoreError):
    """The schema of fenced_store is missing in this database, or is of another revision than this version needs."""


class InvalidArgument(FencedStoreError, ValueError):
    """Something that no resource, token, value or table can be."""


def sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of a driver's error, or of what SQLAlchemy has wrapped around one."""
    original = getattr(error, "orig", None) or error
    # asyncpg's is the cause of what SQLAlchemy shows of it.
    for each in (original, original.__cause__):
        state = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
        if isinstance(state, str):
            return state
    return None


def translated(error: BaseException) -> FencedStoreError | None:
    """Return the counterpart of a database's error that carries one of our SQLSTATEs; None for any other."""
    state = sqlstate(error)
    if state not in (STALE, MISSING, NO_TOKEN, AHEAD):
        return None
    said, detail, _ = said_by(error)
    try:
        found = json.loads(detail) if detail else {}
    except ValueError:
        return None
    if state != NO_TOKEN and "resource" not in found:
        return None  # somebody else's
    if state == STALE:
        at = found["stored_at"]
        return StaleTokenError(
            found["resource"],
            found["offered"],
            found["stored"],
            datetime.fromisoformat(at) if at else None,
            found["stored_by"],
        )
    if state == MISSING:
        return MissingToken(found["resource"])
    if state == AHEAD:
        return FenceAhead(found["resource"], found["offered"], found["stored"])
    return InvalidArgument(said)


def said_by(error: BaseException) -> tuple[str, str, str]:
    """Return the message of a database's error, its detail and its hint."""
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


def shown(name: str) -> str:
    """Return a name as an error shows it: whole when short."""
    return ascii(name) if len(name) <= 60 else f"{name[:57]!a}…"
