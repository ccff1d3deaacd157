"""Objects in a store that cannot compare, such as a file system: a body is written once and never changed.

The body goes to a name of its own, which says the (token, write number) it was written under. A fenced row in Postgres
points to the body that counts, and is what refuses a stale writer. Readers follow the pointer.

Guarantee: a reader sees the old value or the new one, whole, whenever the writer dies. What is pointed to was on the
disk before; what was pointed to is removed only once the pointer is past it, and a pointer never goes back.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from obstore.exceptions import BaseError

from fenced_store.errors import InvalidArgument, ObjectDamaged, StaleTokenError, shown
from fenced_store.marks import Mark, is_repeated, value_of
from fenced_store.names import check_resource
from fenced_store.steps import Ask, Steps, call
from fenced_store.tokens import HasToken, token_of

NAME_BYTES = 190
"""The last part of a path may have so many: file systems allow 255, and the name of a body is longer."""

_BODY = re.compile(r"(?P<path>.+)@(?P<token>[1-9][0-9]{0,18})-(?P<write>[1-9][0-9]{0,18})-(?P<digest>[0-9a-f]{16})")
_STAGED = re.compile(r"#[0-9]+$")
"""What obstore appends to the name of a file that it has not written to its end."""

LOOKS = 20
"""How often a reader follows the pointer, should each body be swept before it gets there."""


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
        self._namespace = check_resource(namespace)
        self._root = root
        """The folder of a local store, whose files must be on the disk before they are pointed to."""

    def key(self, path: str) -> str:
        """Return the resource that stands for an object."""
        return check_resource(f"{self._namespace}/{path}")

    def put(self, path: str, mark: Mark, data: bytes, attributes: dict[str, str], fence: Any) -> Steps[bool]:
        """Store a value or a deletion; return whether it had been stored before."""
        name = None if mark.deleted else body_name(path, mark, attributes)
        pointer: dict[str, Any] = {"object": name, "write": mark.write, "length": mark.length, "digest": mark.digest}
        if attributes:
            pointer["attributes"] = attributes
        if name is not None and (yield from self._put_body(path, mark, name, data, fence)):
            return True
        # Here the body is there, and nobody sees it.
        try:
            stored = yield Ask("pointers", "put", (self.key(path), pointer), {"fence": fence, "write": mark.write})
        except StaleTokenError:
            if name is not None:
                yield from self._discard(path, name)
            raise
        return bool(stored.repeated)

    def get(self, path: str) -> Steps[Read | None]:
        """Return an object with its value, or None."""
        version = None
        for _ in range(LOOKS):
            found = yield Ask("pointers", "get", (self.key(path),))
            if found is None:
                return None
            name, mark, attributes = _pointer(path, found)
            if name is None:
                return None
            try:
                answer = yield Ask("objects", "get", (name,))
                body = yield Ask("body", answer)
            except FileNotFoundError:
                if found.version == version:
                    raise ObjectDamaged(path, f"its body {shown(name)} is not there.") from None
                version = found.version  # swept, because the pointer has moved on
                continue
            return Read(mark, found.stored_at, found.stored_by, attributes, value_of(path, mark, body))
        raise ObjectDamaged(path, f"its body was gone each of the {LOOKS} times that its pointer was followed.")

    def claim(self, path: str, fence: int | HasToken, by: str, patience: float) -> Steps[None]:
        """Raise the fence of an object, and leave its value as it is."""
        yield Ask("pointers", "claim", (self.key(path),), {"fence": fence, "patience": patience})

    def sweep(self, prefix: str, fence: int | HasToken | None, by: str, patience: float) -> Steps[list[str]]:
        """Remove bodies that nobody will ever point to; return their names.

        A pointer only rises, so a body with a lower pair than its pointer's is past all use, whoever is at work. One
        with a higher pair may be a writer's that is about to point to it, and stays; unless a claim has shut that
        writer out.
        """
        bodies: dict[str, list[str]] = defaultdict(list)
        names = yield Ask("objects", "list", (prefix or None,))
        if self._root is not None:
            names += yield call(staged, self._root, prefix)
        for name in names:
            found = _BODY.fullmatch(_STAGED.sub("", name))
            if found:
                bodies[found["path"]].append(name)
        removed = []
        for path in sorted(bodies):
            if fence is not None:
                yield from self.claim(path, fence, by, patience)
            pointer = yield Ask("pointers", "get", (self.key(path),))
            current, pair = None, (0, 0)
            if pointer is not None:
                current, mark, _ = _pointer(path, pointer)
                pair = mark.pair
            for name in sorted(bodies[path]):
                written = _pair_of(name)
                if name != current and (written <= pair or (fence is not None and written[0] < token_of(fence))):
                    yield from self._remove(name)
                    removed.append(name)
        return removed

    def high_water(self, prefix: str) -> Steps[int]:
        """Return the highest token that any body was written under, whether it is pointed to or not."""
        names = yield Ask("objects", "list", (prefix or None,))
        return max((_pair_of(name)[0] for name in names if _BODY.fullmatch(name)), default=0)

    def _put_body(self, path: str, mark: Mark, name: str, data: bytes, fence: Any) -> Steps[bool]:
        """Store a body; return whether that is needless, because the same write was accepted before."""
        try:
            yield Ask("objects", "put", (name, data))
            if self._root is not None:
                yield call(to_disk, self._root, name)
        except (BaseError, OSError):
            # A sweep may have taken it away, because this writer is too late. If so, that is what to say.
            found = yield Ask("pointers", "get", (self.key(path),))
            if found is not None and is_repeated(path, _pointer(path, found)[1], mark, found.stored_at):
                return True
            yield Ask("pointers", "claim", (self.key(path),), {"fence": fence})
            raise
        return False

    def _discard(self, path: str, name: str) -> Steps[None]:
        """Remove a body that was refused. Not if it is pointed to: then the same write was accepted before, and the
        fence has risen since.
        """
        found = yield Ask("pointers", "get", (self.key(path),))
        if found is None or _pointer(path, found)[0] != name:
            yield from self._remove(name)

    def _remove(self, name: str) -> Steps[None]:
        try:
            if self._root is not None:
                yield call(os.unlink, self._root / name)
            else:
                yield Ask("objects", "delete", (name,))
        except FileNotFoundError:
            pass  # another sweep was first


def check_body_path(path: str) -> None:
    """Refuse a path whose bodies could be taken for another's."""
    for part in path.split("/"):
        if _BODY.fullmatch(part) or _STAGED.search(part):
            raise InvalidArgument(
                f"The path {shown(path)} has a part that looks like the name of a stored body or of one that is being "
                "written; choose another."
            )
    if len(path.rsplit("/", 1)[-1].encode()) > NAME_BYTES:
        raise InvalidArgument(f"The last part of the path {shown(path)} takes more than {NAME_BYTES} bytes.")


def body_name(path: str, mark: Mark, attributes: dict[str, str]) -> str:
    """Return the name of a body: the same for the same write sent twice, and for no other."""
    digest = hashlib.sha256(f"{mark.digest} {json.dumps(attributes, sort_keys=True)}".encode()).hexdigest()[:16]
    return f"{path}@{mark.token}-{mark.write}-{digest}"


def to_disk(root: Path, name: str) -> None:
    """Wait until a file, and the folders that it is found through, are on the disk."""
    path = root / name
    for one in (path, *path.parents):
        number = os.open(one, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
        if one == root:
            return


def staged(root: Path, prefix: str) -> list[str]:
    """Return the files that were not written to their end, which obstore does not list."""
    found = []
    for folder, _, files in os.walk(root / prefix if prefix else root):
        for file in files:
            if _STAGED.search(file):
                found.append((Path(folder) / file).relative_to(root).as_posix())
    return found


def _pair_of(name: str) -> tuple[int, int]:
    found = _BODY.fullmatch(_STAGED.sub("", name))
    assert found is not None
    return int(found["token"]), int(found["write"])


def _pointer(path: str, found: Any) -> tuple[str | None, Mark, dict[str, Any]]:
    """Return the name of the body that counts, None for a deletion, with its mark and the user's attributes."""
    try:
        value = found.value
        name = value["object"]
        mark = Mark(found.token, value["write"], value["length"], value["digest"], found.stored_by or "", name is None)
        sound = name is None or (isinstance(name, str) and _pair_of(name) == mark.pair)
        attributes = dict(value.get("attributes", {}))
    except (TypeError, KeyError, AttributeError, AssertionError, ValueError):
        sound = False
    if not sound:
        raise ObjectDamaged(path, "its key in the fenced store holds something else than a pointer to a body.")
    return name, mark, attributes
