"""Objects in a store with conditional put: the token rides on the object, and a write replaces the version it looked
at.

Guarantee: an object accepts a write only if its (token, write number) is greater than the pair that the object carries;
the store compares and replaces in one act, because every accepted write changes what the condition is about. A version
never comes back: where it is a digest of the body, as on S3, the pair is sealed into the body (`marks.seal`).

Looking and writing are two requests. Whatever happens between them changes the version, so that the write is turned
down and its writer looks again: a stale one is then told so, a newer one goes on.
"""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from fenced_store.errors import ClaimTimeout, InvalidArgument, ObjectBusy, ObjectDamaged, OutcomeUnknown
from fenced_store.errors import shown as _shown
from fenced_store.objects.fence_tag import (
    ATTRIBUTE,
    SEAL,
    Mark,
    is_claimed,
    is_repeated,
    mark_in,
    seal,
    sealed_pair,
    value_of,
)
from fenced_store.objects.flow import Effect, Flow
from fenced_store.tokens import Shown

_log = logging.getLogger("fenced_store")

TRIES = 4
"""How often a write without an answer is looked for and sent again before its outcome is called unknown."""

PAUSE = 0.2
"""Seconds before the second sending, twice as long before each further one."""

RACES = 200
"""How often a write may be overtaken by others."""

REFUSED = (NotSupportedError, NotImplementedError, PermissionDeniedError, UnauthenticatedError, PermissionError)
"""Answers after which nothing was stored."""


OTHERS_FIRST = (AlreadyExistsError, PreconditionError)
"""Answers that say that the version is another by now."""


class Wanted(NamedTuple):
    """What is to be put in the place of what was found."""

    mark: Mark
    data: bytes
    attributes: dict[str, Any]


class Found(NamedTuple):
    """An object as it was looked at."""

    mark: Mark | None
    meta: Any
    attributes: dict[str, Any]
    body: bytes

    @property
    def version(self) -> dict[str, Any]:
        """What a write names in order to replace this and nothing else."""
        return _version(self.meta)


class Conditional:
    """The way of stores that can compare: S3, Google Cloud Storage, Azure, and memory."""

    def __init__(self, sealed: bool, probe: bool) -> None:
        self._sealed = sealed
        self._unproved = probe

    def put(self, path: str, mark: Mark, data: bytes, attributes: dict[str, str], shown: Shown) -> Flow[bool]:
        """Store a value or a deletion; return whether it had been stored before."""
        wanted = Wanted(mark, data, attributes)

        def decide(there: Found | None) -> Wanted | None:
            stored = there and there.mark
            return None if is_repeated(path, stored, mark, there and there.meta["last_modified"]) else wanted

        return (yield from self._replace(path, mark.write, False, decide))

    def claim(self, paths: list[str], shown: Shown, patience: float) -> Flow[None]:
        """Raise the fences of objects, one after the other, and leave their values as they are."""
        gives_up = time.monotonic() + patience
        for path in paths:
            yield from self._claim(path, shown, gives_up)

    def _claim(self, path: str, shown: Shown, gives_up: float) -> Flow[None]:
        def decide(there: Found | None) -> Wanted | None:
            if is_claimed(path, there and there.mark, shown.token):
                return None
            if time.monotonic() > gives_up:
                raise ClaimTimeout(f"Others have changed object {_shown(path)} again and again; it was not claimed.")
            if there is None:
                return Wanted(Mark.of(shown.token, 0, None, shown.who), b"", {})
            before = there.mark or Mark.of(0, 0, there.body, "")
            mark = before.claimed(shown.token, shown.who, there.meta["last_modified"])
            return Wanted(mark, value_of(path, before, there.body), there.attributes)

        yield from self._replace(path, None, True, decide)

    def get(self, path: str) -> Flow[Found | None]:
        """Return an object with its value, or None."""
        found = yield from self._look(path, True)
        if found is None or found.mark is None:
            return found
        return None if found.mark.deleted else found._replace(body=value_of(path, found.mark, found.body))

    def sweep(self, prefix: str, shown: Shown | None, patience: float) -> Flow[list[str]]:
        """Return that there is nothing to sweep: an object is replaced where it is."""
        yield from ()
        return []

    def high_water(self, prefix: str) -> Flow[int]:
        """Return the highest token that any object carries."""
        highest = 0
        for path in (yield Effect("objects", "list", (prefix or None,))):
            found = yield from self._look(path, False)
            if found is not None and found.mark is not None:
                highest = max(highest, found.mark.token)
        return highest

    def _replace(
        self, path: str, number: int | None, whole: bool, decide: Callable[[Found | None], Wanted | None]
    ) -> Flow[bool]:
        """Look, decide and replace, until it is done or refused; return whether nothing was left to do at first look.

        A lost answer is no harm: the next look shows whether it is there. If it was, and another write has come since,
        what is said is that this one is stale. `number` is that of the write.
        """
        yield from self._prove(path)
        sent, unanswered = False, 0
        for tries in range(RACES):
            try:
                there = yield from self._look(path, whole)
                wanted = decide(there)
                if wanted is None:
                    return tries == 0
                sent = True
                yield self._put(path, there, wanted)
                return False
            except OTHERS_FIRST:
                # Longer and longer, up to half a second: each time but one of the many can be first.
                yield Effect("sleep", random.uniform(0, 0.008 * 2.0 ** min(tries, 6)))
            except REFUSED as error:
                if unanswered and number is not None:
                    raise OutcomeUnknown(path, number, f"{_first_line(error)}.") from error
                raise
            except FileNotFoundError:
                if there is None:
                    raise  # there is no bucket
            except (BaseError, OSError) as error:
                unanswered += 1
                if not sent or (unanswered == TRIES and number is None):
                    raise
                if unanswered == TRIES:
                    assert number is not None
                    raise OutcomeUnknown(path, number, f"{_first_line(error)}.") from error
                yield Effect("sleep", PAUSE * 2.0 ** (unanswered - 1))
        if unanswered and number is not None:
            raise OutcomeUnknown(path, number, "An answer was lost, and others came first ever since.")
        raise ObjectBusy(path, RACES)

    def _look(self, path: str, whole: bool) -> Flow[Found | None]:
        try:
            found = yield Effect("objects", "get", (path,), {"options": {"head": not whole}})
            body = (yield Effect("body", found)) if whole else b""
            mark = mark_in(path, found.attributes)
            if mark is None and self._sealed:
                yield from self._check_unsealed(path, found.meta["size"], body)
        except FileNotFoundError:
            return None
        kept = {name: value for name, value in found.attributes.items() if name != ATTRIBUTE}
        return Found(mark, found.meta, kept, body)

    def _check_unsealed(self, path: str, size: int, body: bytes) -> Flow[None]:
        """Tell an object that never had a fence from one whose attributes were taken away, by a copy perhaps."""
        if size < SEAL:
            return
        if not body:
            end = yield Effect("objects", "get", (path,), {"options": {"range": {"suffix": SEAL}}})
            body = yield Effect("body", end)
        pair = sealed_pair(body)
        if pair is not None:
            raise ObjectDamaged(
                path,
                f"it was written under token {pair[0]}, and its attribute {ATTRIBUTE!r} was taken away since. Delete "
                f"it, or "
                "put the attribute back.",
            )

    def _put(self, path: str, there: Found | None, wanted: Wanted) -> Effect:
        body = wanted.data + seal(wanted.mark) if self._sealed else wanted.data
        return Effect(
            "objects",
            "put",
            (path, body),
            {
                "mode": "create" if there is None else there.version,
                "attributes": {**wanted.attributes, ATTRIBUTE: wanted.mark.text()},
                "use_multipart": False,
            },
        )

    def _prove(self, path: str) -> Flow[None]:
        """Try once whether the store can hold a fence: one that cannot would let everybody in, and say nothing."""
        if not self._unproved:
            return
        for tries in range(1, TRIES + 1):
            try:
                yield from self._try_out(f"{path}.fence-probe-{uuid.uuid4().hex}")
                break
            except OTHERS_FIRST:
                # Nobody else knows the name: an answer was lost, and obstore has sent the same again.
                if tries == TRIES:
                    raise
        self._unproved = False

    def _try_out(self, beside: str) -> Flow[None]:
        fault: Exception | None = None
        try:
            lack = yield from _lack(beside, self._sealed)
            if lack is not None:
                fault = InvalidArgument(
                    f"This store {lack}. No fence can hold there; give pointers=FencedStore(...) to keep the fence in "
                    "Postgres."
                )
        except (NotSupportedError, NotImplementedError):
            fault = InvalidArgument(
                "This store has no conditional put. Give pointers=FencedStore(...) to keep the fence in Postgres."
            )
        except Exception as error:
            fault = error
        try:
            yield Effect("objects", "delete", (beside,))
        except (BaseError, OSError) as error:
            _log.debug("The probe %s was left behind: %s", beside, _first_line(error))
        if fault is not None:
            raise fault


def _lack(beside: str, sealed: bool) -> Flow[str | None]:
    """Return what a store lacks, None if nothing: attributes that come back, a version that never does, and conditions
    that are heeded.
    """
    attributes = {ATTRIBUTE: Mark.of(1, 1, b"1", "probe").text()}
    first = yield Effect("objects", "put", (beside, b"1"), {"mode": "create", "attributes": attributes})
    found = yield Effect("objects", "get", (beside,), {"options": {"head": True}})
    if found.attributes.get(ATTRIBUTE) != attributes[ATTRIBUTE]:
        return f"does not keep the attribute {ATTRIBUTE!r} of an object, where its fence would be"
    # The same bytes, unless bodies are sealed.
    second = yield Effect("objects", "put", (beside, b"2" if sealed else b"1"), {"mode": _version(first)})
    if _version(second) == _version(first):
        return "gives the same version to what was stored anew"
    for mode in ("create", _version(first)):
        try:
            yield Effect("objects", "put", (beside, b"3"), {"mode": mode})
        except OTHERS_FIRST:
            continue
        return "does not heed conditions: it has replaced an object that it was told to leave as it is"
    return None


def _version(meta: Any) -> dict[str, str]:
    version = {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}
    if not version:
        raise InvalidArgument("This store tells no version of its objects, so none can be compared.")
    return version


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
