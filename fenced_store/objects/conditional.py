"""The protocol for stores with conditional put: the fence travels with the object.

Guarantee: an object accepts a write only if its (token, write number) is greater than the pair that the object carries.
The store compares and replaces atomically: a write names the version that it has read, and every accepted write changes
the version. A version never recurs. Where it is a digest of the body, as on S3, the pair is sealed into the body
(`fence_tag.seal`).

Reading and writing are two requests. Any write between them changes the version, so that the later write is refused and
its writer reads again: a stale writer then gets an error, a newer one retries.
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

from fenced_store.errors import ClaimTimeout, InvalidArgument, ObjectBusy, ObjectDamaged, OutcomeUnknown, abbreviated
from fenced_store.objects.fence_tag import (
    ATTRIBUTE,
    SEAL_BYTES,
    FenceTag,
    is_claimed,
    is_repeated,
    seal,
    sealed_pair,
    tag_in,
    value_of,
)
from fenced_store.objects.flow import Effect, Flow
from fenced_store.tokens import PresentedToken

_log = logging.getLogger("fenced_store")

TRIES = 4
"""How often a write without a reply is retried before OutcomeUnknown is raised."""

PAUSE = 0.2
"""Seconds before the first retry, doubled before each further one."""

MAX_CONFLICTS = 200
"""How often a write may be overtaken by other writers."""

REFUSALS = (NotSupportedError, NotImplementedError, PermissionDeniedError, UnauthenticatedError, PermissionError)
"""Replies after which nothing was stored."""

CONFLICTS = (AlreadyExistsError, PreconditionError)
"""Replies after which the object has another version than the one that was read."""


class Replacement(NamedTuple):
    """What to store in place of the current object."""

    tag: FenceTag
    data: bytes
    attributes: dict[str, Any]


class FoundObject(NamedTuple):
    """An object as it was read."""

    tag: FenceTag | None
    meta: Any
    attributes: dict[str, Any]
    body: bytes

    @property
    def version(self) -> dict[str, Any]:
        """The version that a write names in order to replace exactly this object."""
        return _version(self.meta)


class ConditionalProtocol:
    """The protocol of stores that can compare: S3, Google Cloud Storage, Azure, and memory."""

    def __init__(self, sealed: bool, probe: bool) -> None:
        self._sealed = sealed
        self._needs_probe = probe

    def put(
        self, path: str, tag: FenceTag, data: bytes, attributes: dict[str, str], presented: PresentedToken
    ) -> Flow[bool]:
        """Store a value or a deletion; return whether it had been stored before."""
        replacement = Replacement(tag, data, attributes)

        def decide(current: FoundObject | None) -> Replacement | None:
            stored = current and current.tag
            return None if is_repeated(path, stored, tag, current and current.meta["last_modified"]) else replacement

        return (yield from self._replace(path, tag.write, False, decide))

    def claim(self, paths: list[str], presented: PresentedToken, patience: float) -> Flow[None]:
        """Raise the fences of objects, one after the other, and keep their values."""
        deadline = time.monotonic() + patience
        for path in paths:
            yield from self._claim(path, presented, deadline)

    def _claim(self, path: str, presented: PresentedToken, deadline: float) -> Flow[None]:
        def decide(current: FoundObject | None) -> Replacement | None:
            if is_claimed(path, current and current.tag, presented.token):
                return None
            if time.monotonic() > deadline:
                raise ClaimTimeout(
                    f"Claim timed out: other writers changed object {abbreviated(path)} every time. It was not claimed."
                )
            if current is None:
                return Replacement(FenceTag.of(presented.token, 0, None, presented.writer), b"", {})
            before = current.tag or FenceTag.of(0, 0, current.body, "")
            tag = before.claimed(presented.token, presented.writer, current.meta["last_modified"])
            return Replacement(tag, value_of(path, before, current.body), current.attributes)

        yield from self._replace(path, None, True, decide)

    def get(self, path: str) -> Flow[FoundObject | None]:
        """Return an object with its value, or None."""
        found = yield from self._fetch(path, True)
        if found is None or found.tag is None:
            return found
        return None if found.tag.deleted else found._replace(body=value_of(path, found.tag, found.body))

    def sweep(self, prefix: str, presented: PresentedToken | None, patience: float) -> Flow[list[str]]:
        """Return an empty list: an object is replaced in place, so nothing is left behind."""
        yield from ()
        return []

    def high_water(self, prefix: str) -> Flow[int]:
        """Return the highest token that any object carries."""
        highest = 0
        for path in (yield Effect("objects", "list", (prefix or None,))):
            found = yield from self._fetch(path, False)
            if found is not None and found.tag is not None:
                highest = max(highest, found.tag.token)
        return highest

    def _replace(
        self,
        path: str,
        number: int | None,
        with_body: bool,
        decide: Callable[[FoundObject | None], Replacement | None],
    ) -> Flow[bool]:
        """Read, decide and replace until stored or refused; return whether the first read left nothing to do.

        A lost reply does no harm: the next read shows whether the object was stored. If it was, and another write has
        followed, the error says that this write is stale. `number` is the write number.
        """
        yield from self._probe_once(path)
        sent, unanswered = False, 0
        for tries in range(MAX_CONFLICTS):
            try:
                current = yield from self._fetch(path, with_body)
                replacement = decide(current)
                if replacement is None:
                    return tries == 0
                sent = True
                yield self._put(path, current, replacement)
                return False
            except CONFLICTS:
                # Wait longer each time, up to half a second: in each round only one of the writers can be first.
                yield Effect("sleep", random.uniform(0, 0.008 * 2.0 ** min(tries, 6)))
            except REFUSALS as error:
                if unanswered and number is not None:
                    raise OutcomeUnknown(path, number, f"{_first_line(error)}.") from error
                raise
            except FileNotFoundError:
                if current is None:
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
            raise OutcomeUnknown(path, number, "A reply was lost, and other writers came first ever since.")
        raise ObjectBusy(path, MAX_CONFLICTS)

    def _fetch(self, path: str, with_body: bool) -> Flow[FoundObject | None]:
        try:
            found = yield Effect("objects", "get", (path,), {"options": {"head": not with_body}})
            body = (yield Effect("body", found)) if with_body else b""
            tag = tag_in(path, found.attributes)
            if tag is None and self._sealed:
                yield from self._check_unsealed(path, found.meta["size"], body)
        except FileNotFoundError:
            return None
        kept = {name: value for name, value in found.attributes.items() if name != ATTRIBUTE}
        return FoundObject(tag, found.meta, kept, body)

    def _check_unsealed(self, path: str, size: int, body: bytes) -> Flow[None]:
        """Raise if an object without a fence has a seal: it lost its attributes, perhaps when it was copied."""
        if size < SEAL_BYTES:
            return
        if not body:
            end = yield Effect("objects", "get", (path,), {"options": {"range": {"suffix": SEAL_BYTES}}})
            body = yield Effect("body", end)
        pair = sealed_pair(body)
        if pair is not None:
            raise ObjectDamaged(
                path,
                f"it was written under token {pair[0]}, and its attribute {ATTRIBUTE!r} was removed since. Delete the "
                "object, or put the attribute back.",
            )

    def _put(self, path: str, current: FoundObject | None, replacement: Replacement) -> Effect:
        body = replacement.data + seal(replacement.tag) if self._sealed else replacement.data
        return Effect(
            "objects",
            "put",
            (path, body),
            {
                "mode": "create" if current is None else current.version,
                "attributes": {**replacement.attributes, ATTRIBUTE: replacement.tag.to_json()},
                "use_multipart": False,
            },
        )

    def _probe_once(self, path: str) -> Flow[None]:
        """Check once that the store can hold a fence. A store that cannot would accept every writer silently."""
        if not self._needs_probe:
            return
        for tries in range(1, TRIES + 1):
            try:
                yield from self._probe(f"{path}.fence-probe-{uuid.uuid4().hex}")
                break
            except CONFLICTS:
                # No other writer knows this name: a reply was lost, and obstore has sent the request again.
                if tries == TRIES:
                    raise
        self._needs_probe = False

    def _probe(self, probe_path: str) -> Flow[None]:
        fault: Exception | None = None
        try:
            shortcoming = yield from _shortcoming(probe_path, self._sealed)
            if shortcoming is not None:
                fault = InvalidArgument(
                    f"This store {shortcoming}, so it cannot hold a fence. Give pointers=FencedStore(...) to keep the "
                    "fence in Postgres."
                )
        except (NotSupportedError, NotImplementedError):
            fault = InvalidArgument(
                "This store has no conditional put. Give pointers=FencedStore(...) to keep the fence in Postgres."
            )
        except Exception as error:
            fault = error
        try:
            yield Effect("objects", "delete", (probe_path,))
        except (BaseError, OSError) as error:
            _log.debug("probe object %s was not deleted: %s", probe_path, _first_line(error))
        if fault is not None:
            raise fault


def _shortcoming(probe_path: str, sealed: bool) -> Flow[str | None]:
    """Return why a store cannot hold a fence, or None if it can.

    It must keep attributes, give each write a new version, and honour conditions.
    """
    attributes = {ATTRIBUTE: FenceTag.of(1, 1, b"1", "probe").to_json()}
    first = yield Effect("objects", "put", (probe_path, b"1"), {"mode": "create", "attributes": attributes})
    found = yield Effect("objects", "get", (probe_path,), {"options": {"head": True}})
    if found.attributes.get(ATTRIBUTE) != attributes[ATTRIBUTE]:
        return f"does not keep the attribute {ATTRIBUTE!r} of an object, which would hold its fence"
    # The same bytes again, unless bodies are sealed.
    second = yield Effect("objects", "put", (probe_path, b"2" if sealed else b"1"), {"mode": _version(first)})
    if _version(second) == _version(first):
        return "gives the same version to an object that was stored again"
    for mode in ("create", _version(first)):
        try:
            yield Effect("objects", "put", (probe_path, b"3"), {"mode": mode})
        except CONFLICTS:
            continue
        return "does not honour conditions: it has replaced an object against the condition of the put"
    return None


def _version(meta: Any) -> dict[str, str]:
    version = {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}
    if not version:
        raise InvalidArgument(
            "This store reports no version of its objects, so it has no conditional put. Give "
            "pointers=FencedStore(...) to keep the fence in Postgres."
        )
    return version


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
