"""Objects in a store that cannot compare, such as a file system: a body is written once and never changed.

The body goes to a name of its own, which says the (token, write number) it was written under. A fenced row in Postgres
points to the body that counts, and is what refuses a stale writer. Readers follow the pointer.

Guarantee: a reader sees the old value or the new one, whole, whenever the writer dies. What is pointed to was on the
disk before; what was pointed to is removed only once the pointer is past it, and a pointer never goes back.

Whose a body is, is in its name too: an id that the pointers and the folder share. A folder that several use, a link to
another folder or a name spelled otherwise cannot make a sweep take what is not its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import uuid
from collections import defaultdict
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from obstore.exceptions import BaseError

from fenced_store._postgres.identifiers import check_resource
from fenced_store.errors import (
    ClaimTimeout,
    FencedStoreError,
    InvalidArgument,
    ObjectDamaged,
    OutcomeUnknown,
    StaleTokenError,
    VersionConflict,
    shown,
)
from fenced_store.objects.fence_tag import Mark, is_repeated, value_of
from fenced_store.objects.flow import Effect, Flow, call
from fenced_store.objects.local_files import files_below, to_disk
from fenced_store.tokens import Shown

NAME_BYTES = 160
"""The last part of a path may have so many: file systems allow 255, and the name of a body is longer."""

LOOKS = 20
"""How often a reader follows the pointer, should each body be swept before it gets there."""

_BODY = re.compile(
    r"(?P<path>.+)@(?P<token>[1-9][0-9]{0,18})-(?P<write>[1-9][0-9]{0,18})-(?P<owner>[0-9a-f]{16})-[0-9a-f]{16}",
    re.DOTALL,
)
_STAGED = re.compile(r"#[0-9]+$")
"""What obstore appends to the name of a file that it has not written to its end."""

_log = logging.getLogger("fenced_store")


class Read(NamedTuple):
    """An object as its pointer and body have it."""

    mark: Mark
    at: datetime
    by: str | None
    attributes: dict[str, Any]
    body: bytes


class Pointed:
    """The way of stores that cannot compare, with pointers in Postgres."""

    def __init__(self, namespace: str, root: Path | None) -> None:
        if not isinstance(namespace, str) or not namespace or "/" in namespace:
            raise InvalidArgument(f"A namespace is one word, without a slash; got {namespace!r:.80}.")
        self._namespace = check_resource(namespace)
        self._root = root
        """The folder of a local store, whose files must be on the disk before they are pointed to."""
        self._id: str | None = None
        """What the pointers of this namespace and this folder know each other by."""

    def key(self, path: str) -> str:
        """Return the resource that stands for an object."""
        return check_resource(f"{self._namespace}/{path}")

    def put(self, path: str, mark: Mark, data: bytes, attributes: dict[str, str], who: Shown) -> Flow[bool]:
        """Store a value or a deletion; return whether it had been stored before."""
        key = self.key(path)
        yield from self._know()
        name = None if mark.deleted else self._body_name(path, mark)
        pointer: dict[str, Any] = {
            "object": name, "write": mark.write, "length": mark.length, "digest": mark.digest,
        }  # fmt: skip
        if attributes:
            pointer["attributes"] = attributes
        if name is not None:
            yield from self._put_body(path, mark, name, data, who)
        # Here the body is there, and nobody sees it.
        try:
            stored = yield Effect("pointers", "put", (key, pointer), {"fence": who, "write": mark.write})
        except OutcomeUnknown:
            raise  # it may be pointed to
        except FencedStoreError:
            yield from self._discard(path, name)
            raise
        if stored.repeated:
            yield from self._discard(path, name)
        return bool(stored.repeated)

    def get(self, path: str) -> Flow[Read | None]:
        """Return an object with its value, or None."""
        version = None
        for _ in range(LOOKS):
            found = yield Effect("pointers", "get", (self.key(path),))
            if found is None:
                return None
            name, mark, attributes = _pointer(path, found)
            if name is None:
                return None
            try:
                answer = yield Effect("objects", "get", (name,))
                body = yield Effect("body", answer)
            except FileNotFoundError:
                if found.version == version:
                    self._id = None
                    yield from self._know()  # it may be another folder altogether
                    raise ObjectDamaged(path, f"its body {shown(name)} is not there.") from None
                version = found.version  # swept, because the pointer has moved on
                continue
            return Read(mark, found.stored_at, found.stored_by, attributes, value_of(path, mark, body))
        raise ObjectDamaged(path, f"its body was gone each of the {LOOKS} times that its pointer was followed.")

    def claim(self, paths: list[str], who: Shown, patience: float) -> Flow[None]:
        """Raise the fences of objects, all or none, and leave their values as they are."""
        keys = tuple(self.key(path) for path in paths)
        yield Effect("pointers", "claim", keys, {"fence": who, "patience": patience})

    def sweep(self, prefix: str, who: Shown | None, patience: float) -> Flow[list[str]]:
        """Remove bodies that nobody will ever point to; return their names.

        A pointer only rises, so a body with a lower pair than its pointer's is past all use, whoever is at work. One
        with a higher pair may be a writer's that is about to point to it, and stays; unless a claim has shut that
        writer out.
        """
        yield from self._know()
        bodies: dict[str, list[str]] = defaultdict(list)
        for name in (yield from self._names(prefix)):
            found = _BODY.fullmatch(_STAGED.sub("", name))
            if found and found["owner"] == self._owner(found["path"]):
                bodies[found["path"]].append(name)
        removed: list[str] = []
        for path in sorted(bodies):
            try:
                removed += yield from self._sweep_one(path, sorted(bodies[path]), who, patience)
            except ObjectDamaged as error:
                _log.warning("Nothing was swept of one object: %s", error)
        return removed

    def _sweep_one(self, path: str, names: list[str], who: Shown | None, patience: float) -> Flow[list[str]]:
        shut_out = 0
        if who is not None:
            try:
                yield from self.claim([path], who, patience)
                shut_out = who.token  # everything lower, from here on
            except (StaleTokenError, ClaimTimeout) as error:
                _log.warning("Of one object only what is below its pointer was swept: %s", error)
        pointer = yield Effect("pointers", "get", (self.key(path),))
        current, pair = None, (0, 0)
        if pointer is not None:
            current, mark, _ = _pointer(path, pointer)
            pair = mark.pair
        removed = []
        for name in names:
            written = _pair_of(name)
            if name != current and (written <= pair or written[0] < shut_out) and (yield from self._remove(name)):
                removed.append(name)
        return removed

    def high_water(self, prefix: str) -> Flow[int]:
        """Return the highest token that any body was written under, whether it is pointed to or not."""
        names = yield from self._names(prefix)
        return max((_pair_of(name)[0] for name in names if _BODY.fullmatch(name)), default=0)

    def _put_body(self, path: str, mark: Mark, name: str, data: bytes, who: Shown) -> Flow[None]:
        """Store a body, and wait until it is safe to point to."""
        try:
            yield from self._put_once(name, data)
            if self._root is not None:
                yield call(to_disk, self._root, name)
                self._check_here((yield call(os.path.exists, self._root / _marker(str(self._id)))), str(self._id))
        except (BaseError, OSError):
            # A sweep may have taken it away, because this writer is too late. If so, that is what to say.
            found = yield Effect("pointers", "get", (self.key(path),))
            if found is None or not is_repeated(path, _pointer(path, found)[1], mark, found.stored_at):
                yield Effect("pointers", "claim", (self.key(path),), {"fence": who})
            raise

    def _put_once(self, name: str, data: bytes) -> Flow[None]:
        """Put a body where there is none. One that is there was put by the same write, sent before: it is not touched,
        for it may be pointed to, unless it is not what it should be.
        """
        try:
            yield Effect("objects", "put", (name, data), {"mode": "create"})
            return
        except (BaseError, OSError, NotImplementedError):
            pass  # it is there, or the store cannot tell
        try:
            answer = yield Effect("objects", "get", (name,))
            if (yield Effect("body", answer)) == data:
                return
        except FileNotFoundError:
            pass
        yield Effect("objects", "put", (name, data))

    def _discard(self, path: str, name: str | None) -> Flow[None]:
        """Remove a body that nobody points to: one that was refused, or sent again after it was superseded. If that
        fails, it is left to the sweep.
        """
        if name is None:
            return
        try:
            found = yield Effect("pointers", "get", (self.key(path),))
            if found is None or _pointer(path, found)[0] != name:
                yield from self._remove(name)
        except Exception as error:
            _log.debug("The body %s was left behind: %s", name, error)

    def _remove(self, name: str) -> Flow[bool]:
        try:
            if self._root is not None:
                yield call(os.unlink, self._root / name)
            else:
                yield Effect("objects", "delete", (name,))
        except FileNotFoundError:
            return False  # another sweep was first
        return True

    def _names(self, prefix: str) -> Flow[list[str]]:
        if self._root is not None:
            return (yield call(files_below, self._root, prefix))  # type: ignore[no-any-return]
        return (yield Effect("objects", "list", (prefix or None,)))  # type: ignore[no-any-return]

    def _body_name(self, path: str, mark: Mark) -> str:
        """Return the name of a body: the same for the same write sent twice, and for no other."""
        digest = hashlib.sha256(f"{mark.digest} {mark.attributes}".encode()).hexdigest()[:16]
        return f"{path}@{mark.token}-{mark.write}-{self._owner(path)}-{digest}"

    def _owner(self, path: str) -> str:
        return hashlib.sha256(f"{self._id} {path}".encode()).hexdigest()[:16]

    def _know(self) -> Flow[None]:
        """Learn the id of this namespace, or give it one; refuse a folder that it was not given to."""
        if self._id is not None:
            return
        key = f"{self._namespace}/"  # which is no object's
        found = yield Effect("pointers", "get", (key,))
        if found is None:
            made = uuid.uuid4().hex
            yield Effect("objects", "put", (_marker(made), self._namespace.encode()))
            if self._root is not None:
                yield call(to_disk, self._root, _marker(made))
            try:
                yield Effect("pointers", "put", (key, {"id": made}), {"if_version": 0})
            except VersionConflict:  # another was first
                yield from self._remove(_marker(made))
            found = yield Effect("pointers", "get", (key,))
        known = found.value.get("id") if found is not None and isinstance(found.value, dict) else None
        if not isinstance(known, str):
            raise ObjectDamaged(self._namespace, "the key of its namespace holds something else than an id.")
        try:
            yield Effect("objects", "get", (_marker(known),))
        except FileNotFoundError:
            self._check_here(False, known)
        self._id = known

    def _check_here(self, is_here: bool, known: str) -> None:
        """Refuse a folder that is not the one the pointers belong to: another, or the empty place of a lost mount."""
        if not is_here:
            raise InvalidArgument(
                f"The pointers of namespace {shown(self._namespace)} belong to another folder or bucket than this one: "
                f"{_marker(known)} is not here. Give each its own, with namespace=. If this one was moved, that file "
                f"is "
                "to be moved with it; if it is a mount, see whether it is there."
            )


def check_body_path(path: str) -> None:
    """Refuse a path whose bodies could be taken for another's."""
    for part in path.split("/"):
        if _BODY.fullmatch(part) or _STAGED.search(part) or part.startswith(_marker("")):
            raise InvalidArgument(
                f"The path {shown(path)} has a part that looks like the name of a stored body or of one that is being "
                "written; choose another."
            )
    if len(path.rsplit("/", 1)[-1].encode()) > NAME_BYTES:
        raise InvalidArgument(f"The last part of the path {shown(path)} takes more than {NAME_BYTES} bytes.")


def _marker(known: str) -> str:
    return f".fenced_store-{known}"


def _pair_of(name: str) -> tuple[int, int]:
    found = _BODY.fullmatch(_STAGED.sub("", name))
    assert found is not None
    return int(found["token"]), int(found["write"])


def _pointer(path: str, found: Any) -> tuple[str | None, Mark, dict[str, Any]]:
    """Return the name of the body that counts, None for a deletion, with its mark and the user's attributes."""
    try:
        value = found.value
        name, attributes = value["object"], dict(value.get("attributes", {}))
        mark = replace(
            Mark.of(found.token, value["write"], None, found.stored_by or "", attributes),
            length=value["length"],
            digest=value["digest"],
            deleted=name is None,
        )
        sound = name is None or (
            isinstance(name, str) and _BODY.fullmatch(name) is not None and _pair_of(name) == mark.pair
        )
    except (TypeError, KeyError, AttributeError, ValueError):
        sound = False
    if not sound:
        raise ObjectDamaged(path, "its key in the fenced store holds something else than a pointer to a body.")
    return name, mark, attributes
