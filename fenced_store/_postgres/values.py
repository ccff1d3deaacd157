"""What is stored, and what of it is stored how."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fenced_store.errors import InvalidArgument, shown

VALUE_BYTES = 64 * 2**20
_ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


@dataclass(frozen=True)
class Stored:
    """A write that was accepted."""

    key: str
    version: int
    """Counts the writes of this key, deletions included."""
    token: int
    write: int
    stored_at: datetime
    repeated: bool
    """Whether it had been accepted before, and this was the same one again."""


@dataclass(frozen=True)
class Value:
    """One version of a key."""

    value: Any
    """What was stored, JSON or bytes; None for a deletion."""
    version: int
    token: int
    """The token that its writer carried; 0 if none ever did."""
    stored_at: datetime
    stored_by: str | None
    deleted: bool = False


def encoded(key: str, value: Any) -> str:
    """Return a value as JSON that Postgres takes."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"The value of key {shown(key)} holds half of a surrogate pair; it is not text."
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"The value of key {shown(key)} is neither bytes nor JSON: {error}.") from None
    _check_size(key, size)
    if _ESCAPED_NUL.search(text):
        raise InvalidArgument(f"The value of key {shown(key)} contains a NUL, which Postgres cannot store in JSON.")
    return text


def bounded(key: str, data: bytes) -> bytes:
    """Return bytes, if they are not too many."""
    _check_size(key, len(data))
    return data


def _check_size(key: str, size: int) -> None:
    if size > VALUE_BYTES:
        raise InvalidArgument(f"The value of key {shown(key)} takes {size} bytes; {VALUE_BYTES} (64 MiB) are the most.")


def decoded(text: str | None, data: Any) -> Any:
    """Return what was stored as JSON or bytes."""
    if data is not None:
        return bytes(data)
    return None if text is None else json.loads(text)
