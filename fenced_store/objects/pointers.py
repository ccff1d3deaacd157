"""The protocol for stores without conditional put, such as a file system: pointers in Postgres to immutable bodies.

Each body is written once, under a name of its own that contains the (token, write number) of its write. A fenced row in
Postgres points to the current body, and refuses stale writers. Readers follow the pointer.

Guarantee: a reader sees the old value or the new one, in full, whenever the writer dies. A body is on disk before the
pointer points to it. It is removed only after the pointer has moved past it, and a pointer never moves back.

The name of a body also contains its owner: an id that the pointers and the folder share. A folder with several users, a
link to another folder, or another spelling of a name can therefore not make a sweep remove a body of another owner.
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
    abbreviated,
)
from fenced_store.objects.fence_tag import FenceTag, is_repeated, value_of
from fenced_store.objects.flow import Effect, Flow, call
from fenced_store.objects.local_files import files_below, to_disk
from fenced_store.tokens import PresentedToken

MAX_NAME_BYTES = 160
"""The limit for the last part of a path: file systems allow 255 bytes, and the name of a body is longer."""

MAX_FOLLOWS = 20
"""How often a reader follows the pointer, if each body is swept before it can be read."""

_BODY = re.compile(
    r"(?P<path>.+)@(?P<token>[1-9][0-9]{0,18})-(?P<write>[1-9][0-9]{0,18})-(?P<owner>[0-9a-f]{16})-[0-9a-f]{16}",
    re.DOTALL,
)
_STAGED = re.compile(r"#[0-9]+$")
"""The suffix that obstore gives to the name of an incomplete file."""

_log = logging.getLogger("fenced_store")


class PointedObject(NamedTuple):
    """An object, read from its pointer and its body."""

    tag: FenceTag
    at: datetime
    by: str | None
    attributes: dict[str, Any]
    body: bytes


class PointerProtocol:
    """The protocol of stores that cannot compare, with pointers in Postgres."""

    def __init__(self, namespace: str, root: Path | None) -> None:
        if not isinstance(namespace, str) or not namespace or "/" in namespace:
            raise InvalidArgument(f"A namespace is one word, without a slash; got {namespace!r:.80}.")
        self._namespace = check_resource(namespace)
        self._root = root
        """The folder of a local store, whose files must be on disk before a pointer points to them."""
        self._id: str | None = None
        """The id that the pointers of this namespace share with this folder."""

    def key(self, path: str) -> str:
        """Return the key of an object's pointer."""
        return check_resource(f"{self._namespace}/{path}")

    def put(
        self, path: str, tag: FenceTag, data: bytes, attributes: dict[str, str], presented: PresentedToken
    ) -> Flow[bool]:
        """Store a value or a deletion; return whether it had been stored before."""
        key = self.key(path)
        yield from self._load_id()
        name = None if tag.deleted else self._body_name(path, tag)
        pointer: dict[str, Any] = {
            "object": name, "write": tag.write, "length": tag.length, "digest": tag.digest,
        }  # fmt: skip
        if attributes:
            pointer["attributes"] = attributes
        if name is not None:
            yield from self._put_body(path, tag, name, data, presented)
        # Here the body is stored, and no reader sees it yet.
        try:
            stored = yield Effect("pointers", "put", (key, pointer), {"fence": presented, "write": tag.write})
        except OutcomeUnknown:
            raise  # the pointer may point to the body
        except FencedStoreError:
            yield from self._discard(path, name)
            raise
        if stored.repeated:
            yield from self._discard(path, name)
        return bool(stored.repeated)

    def get(self, path: str) -> Flow[PointedObject | None]:
        """Return an object with its value, or None."""
        version = None
        for _ in range(MAX_FOLLOWS):
            found = yield Effect("pointers", "get", (self.key(path),))
            if found is None:
                return None
            name, tag, attributes = _decode_pointer(path, found)
            if name is None:
                return None
            try:
                reply = yield Effect("objects", "get", (name,))
                body = yield Effect("body", reply)
            except FileNotFoundError:
                if found.version == version:
                    self._id = None
                    yield from self._load_id()  # raises if this is another folder
                    raise ObjectDamaged(path, f"its body {abbreviated(name)} is missing.") from None
                version = found.version  # the body was swept, because the pointer has moved on
                continue
            return PointedObject(tag, found.stored_at, found.stored_by, attributes, value_of(path, tag, body))
        raise ObjectDamaged(
            path, f"its body was missing each of the {MAX_FOLLOWS} times that its pointer was followed."
        )

    def claim(self, paths: list[str], presented: PresentedToken, patience: float) -> Flow[None]:
        """Raise the fences of objects, all or none, and keep their values."""
        keys = tuple(self.key(path) for path in paths)
        yield Effect("pointers", "claim", keys, {"fence": presented, "patience": patience})

    def sweep(self, prefix: str, presented: PresentedToken | None, patience: float) -> Flow[list[str]]:
        """Remove bodies that no pointer will ever point to; return their names.

        A pointer only rises, so a body with a lower pair than its pointer is unused for good, even while writers run.
        A body with a higher pair may belong to a writer that is about to point to it. Such a body stays, unless a claim
        has excluded that writer.
        """
        yield from self._load_id()
        bodies: dict[str, list[str]] = defaultdict(list)
        for name in (yield from self._list_names(prefix)):
            found = _BODY.fullmatch(_STAGED.sub("", name))
            if found and found["owner"] == self._owner(found["path"]):
                bodies[found["path"]].append(name)
        removed: list[str] = []
        for path in sorted(bodies):
            try:
                removed += yield from self._sweep_object(path, sorted(bodies[path]), presented, patience)
            except ObjectDamaged as error:
                _log.warning("sweep skipped a damaged object: %s", error)
        return removed

    def _sweep_object(
        self, path: str, names: list[str], presented: PresentedToken | None, patience: float
    ) -> Flow[list[str]]:
        excluded_below = 0
        if presented is not None:
            try:
                yield from self.claim([path], presented, patience)
                excluded_below = presented.token  # from here on, every lower token is refused
            except (StaleTokenError, ClaimTimeout) as error:
                _log.warning("sweep could not claim an object; only bodies below its pointer are removed: %s", error)
        pointer = yield Effect("pointers", "get", (self.key(path),))
        current, pair = None, (0, 0)
        if pointer is not None:
            current, tag, _ = _decode_pointer(path, pointer)
            pair = tag.pair
        removed = []
        for name in names:
            written = _pair_of(name)
            is_unused = name != current and (written <= pair or written[0] < excluded_below)
            if is_unused and (yield from self._remove(name)):
                removed.append(name)
        return removed

    def high_water(self, prefix: str) -> Flow[int]:
        """Return the highest token that any body was written under, whether a pointer points to it or not."""
        names = yield from self._list_names(prefix)
        return max((_pair_of(name)[0] for name in names if _BODY.fullmatch(name)), default=0)

    def _put_body(self, path: str, tag: FenceTag, name: str, data: bytes, presented: PresentedToken) -> Flow[None]:
        """Store a body, and wait until a pointer may safely point to it."""
        try:
            yield from self._put_once(name, data)
            if self._root is not None:
                yield call(to_disk, self._root, name)
                self._check_folder((yield call(os.path.exists, self._root / _marker(str(self._id)))), str(self._id))
        except (BaseError, OSError):
            # A sweep may have removed the body, because this writer is stale. In that case raise StaleTokenError.
            found = yield Effect("pointers", "get", (self.key(path),))
            if found is None or not is_repeated(path, _decode_pointer(path, found)[1], tag, found.stored_at):
                yield Effect("pointers", "claim", (self.key(path),), {"fence": presented})
            raise

    def _put_once(self, name: str, data: bytes) -> Flow[None]:
        """Store a body, unless the same write has already stored it.

        A pointer may point to the existing body, so it is replaced only if its content is wrong.
        """
        try:
            yield Effect("objects", "put", (name, data), {"mode": "create"})
            return
        except (BaseError, OSError, NotImplementedError):
            pass  # the body exists, or the store has no create mode
        try:
            reply = yield Effect("objects", "get", (name,))
            if (yield Effect("body", reply)) == data:
                return
        except FileNotFoundError:
            pass
        yield Effect("objects", "put", (name, data))

    def _discard(self, path: str, name: str | None) -> Flow[None]:
        """Remove a body that was refused, or that was retried after it was superseded, unless the pointer points to it.

        If the removal fails, a sweep will do it.
        """
        if name is None:
            return
        try:
            found = yield Effect("pointers", "get", (self.key(path),))
            if found is None or _decode_pointer(path, found)[0] != name:
                yield from self._remove(name)
        except Exception as error:
            _log.debug("body %s was not removed and is left to a sweep: %s", name, error)

    def _remove(self, name: str) -> Flow[bool]:
        try:
            if self._root is not None:
                yield call(os.unlink, self._root / name)
            else:
                yield Effect("objects", "delete", (name,))
        except FileNotFoundError:
            return False  # another sweep was first
        return True

    def _list_names(self, prefix: str) -> Flow[list[str]]:
        if self._root is not None:
            return (yield call(files_below, self._root, prefix))  # type: ignore[no-any-return]
        return (yield Effect("objects", "list", (prefix or None,)))  # type: ignore[no-any-return]

    def _body_name(self, path: str, tag: FenceTag) -> str:
        """Return the name of a body. A retry of the same write gets the same name, and no other write does."""
        digest = hashlib.sha256(f"{tag.digest} {tag.attributes}".encode()).hexdigest()[:16]
        return f"{path}@{tag.token}-{tag.write}-{self._owner(path)}-{digest}"

    def _owner(self, path: str) -> str:
        return hashlib.sha256(f"{self._id} {path}".encode()).hexdigest()[:16]

    def _load_id(self) -> Flow[None]:
        """Load the id of this namespace, or create it. Raise if the id belongs to another folder."""
        if self._id is not None:
            return
        key = f"{self._namespace}/"  # not the key of any object
        found = yield Effect("pointers", "get", (key,))
        if found is None:
            created = uuid.uuid4().hex
            yield Effect("objects", "put", (_marker(created), self._namespace.encode()))
            if self._root is not None:
                yield call(to_disk, self._root, _marker(created))
            try:
                yield Effect("pointers", "put", (key, {"id": created}), {"if_version": 0})
            except VersionConflict:  # another process was first
                yield from self._remove(_marker(created))
            found = yield Effect("pointers", "get", (key,))
        known = found.value.get("id") if found is not None and isinstance(found.value, dict) else None
        if not isinstance(known, str):
            raise ObjectDamaged(self._namespace, "the key of its namespace does not hold an id.")
        try:
            yield Effect("objects", "get", (_marker(known),))
        except FileNotFoundError:
            self._check_folder(False, known)
        self._id = known

    def _check_folder(self, has_marker: bool, known: str) -> None:
        """Raise unless this is the folder of the pointers. It may be another one, or an empty mount point."""
        if not has_marker:
            raise InvalidArgument(
                f"The pointers of namespace {abbreviated(self._namespace)} belong to another folder or bucket: "
                f"{_marker(known)} is not in this one. Give each folder its own namespace=. If the folder was moved, "
                "move that file too. If it is a mount, check that it is mounted."
            )


def check_body_path(path: str) -> None:
    """Raise if bodies of this path could be mistaken for those of another path."""
    for part in path.split("/"):
        if _BODY.fullmatch(part) or _STAGED.search(part) or part.startswith(_marker("")):
            raise InvalidArgument(
                f"The path {abbreviated(path)} has a part that looks like the name of a stored or incomplete body. "
                "Choose another path."
            )
    if len(path.rsplit("/", 1)[-1].encode()) > MAX_NAME_BYTES:
        raise InvalidArgument(f"The last part of the path {abbreviated(path)} takes more than {MAX_NAME_BYTES} bytes.")


def _marker(namespace_id: str) -> str:
    """Return the name of the file that marks the folder of a namespace."""
    return f".fenced_store-{namespace_id}"


def _pair_of(name: str) -> tuple[int, int]:
    found = _BODY.fullmatch(_STAGED.sub("", name))
    assert found is not None
    return int(found["token"]), int(found["write"])


def _decode_pointer(path: str, found: Any) -> tuple[str | None, FenceTag, dict[str, Any]]:
    """Return the name of the current body, None for a deletion, with its tag and the user's attributes."""
    try:
        value = found.value
        name, attributes = value["object"], dict(value.get("attributes", {}))
        tag = replace(
            FenceTag.of(found.token, value["write"], None, found.stored_by or "", attributes),
            length=value["length"],
            digest=value["digest"],
            deleted=name is None,
        )
        is_valid = name is None or (
            isinstance(name, str) and _BODY.fullmatch(name) is not None and _pair_of(name) == tag.pair
        )
    except (TypeError, KeyError, AttributeError, ValueError):
        is_valid = False
    if not is_valid:
        raise ObjectDamaged(path, "its key in the fenced store does not hold a pointer to a body.")
    return name, tag, attributes
