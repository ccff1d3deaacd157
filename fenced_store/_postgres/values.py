"""Values of the store: the results of a write and a read, and how a value is encoded for Postgres."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from fenced_store.errors import InvalidArgument, abbreviated

MAX_VALUE_BYTES = 64 * 2**20
_ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


MICROSECONDS = "CAST(date_part('epoch', {}) * 1e6 AS bigint)"
"""SQL for a moment as microseconds since 1970: psycopg does not read a timestamp in every DateStyle."""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def moment(microseconds: int | None) -> datetime | None:
    """Return the moment for a number of microseconds since 1970; None for NULL."""
    return None if microseconds is None else _EPOCH + timedelta(microseconds=microseconds)


@dataclass(frozen=True)
class Stored:
    """A write that was accepted."""

    key: str
    version: int
    """The number of writes of this key so far, deletions included."""
    token: int
    write: int
    stored_at: datetime
    repeated: bool
    """Whether the same write had been accepted before, so that this one changed nothing."""


@dataclass(frozen=True)
class Value:
    """One version of a key."""

    value: Any
    """The value, JSON or bytes; None for a deletion."""
    version: int
    token: int
    """The token that its writer carried; 0 if no write of this key ever carried one."""
    stored_at: datetime
    stored_by: str | None
    deleted: bool = False


def encoded(key: str, value: Any) -> str:
    """Return a value as JSON text that Postgres can store."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"The value of key {abbreviated(key)} holds half of a surrogate pair; it is not text."
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"The value of key {abbreviated(key)} is neither bytes nor JSON: {error}.") from None
    _check_size(key, size)
    if _ESCAPED_NUL.search(text):
        raise InvalidArgument(
            f"The value of key {abbreviated(key)} contains a NUL, which Postgres cannot store in JSON."
        )
    return text


def checked_bytes(key: str, data: bytes) -> bytes:
    """Return the bytes of a value if they are not too many."""
    _check_size(key, len(data))
    return data


def _check_size(key: str, size: int) -> None:
    if size > MAX_VALUE_BYTES:
        raise InvalidArgument(
            f"The value of key {abbreviated(key)} takes {size} bytes; the limit is {MAX_VALUE_BYTES} (64 MiB)."
        )


def decoded(text: str | None, data: Any) -> Any:
    """Return the value from its JSON text or its bytes."""
    if data is not None:
        return bytes(data)
    return None if text is None else json.loads(text)
