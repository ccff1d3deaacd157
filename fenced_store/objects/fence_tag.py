"""The fence that an object carries in one attribute: the highest (token, write number) that it has accepted.

The attribute is JSON, so that an operator can read it with any tool of the store. It is a single attribute, because
stores differ in the names that they allow.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from fenced_store.errors import FenceAhead, InvalidArgument, ObjectDamaged, StaleTokenError, abbreviated
from fenced_store.refusals import reported
from fenced_store.tokens import MAX_BIGINT

ATTRIBUTE = "fence"
ATTRIBUTE_NAMES = re.compile("[a-z0-9][a-z0-9_-]*")
AZURE_ATTRIBUTE_NAMES = re.compile("[a-z_][a-z0-9_]*")
"""The names of attributes that a store returns unchanged."""

SEAL_BYTES = 127
"""The length of a seal."""

_SEAL = re.compile(rb"\n[ \t]{126}")
_MAX_WRITER_BYTES = 300
_MAX_ATTRIBUTE_BYTES = 1000
"""The limit for the user's attributes: S3 allows 2 KB for all attributes, the fence included."""
_PRINTABLE = re.compile("[ -~]*")
_HEADERS = {
    "cache-control", "content-disposition", "content-encoding", "content-language", "content-type", "storage-class",
}  # fmt: skip


@dataclass(frozen=True)
class FenceTag:
    """The fence of an object, and a description of the value in its body."""

    token: int
    write: int
    length: int
    digest: str
    by: str
    deleted: bool = False
    value_token: int | None = None
    """The token under which the value was written, if the fence has been claimed above it since."""
    value_write: int | None = None
    value_by: str | None = None
    value_at: str | None = None
    """In the same case: the value's write number, its writer, and when it was written."""
    attributes: str | None = None
    """A digest of the user's attributes, if there are any."""

    @classmethod
    def of(
        cls, token: int, write: int, data: bytes | None, by: str, attributes: Mapping[str, str] | None = None
    ) -> FenceTag:
        """Return the tag for a value; None stands for a deletion."""
        value = data or b""
        encoded = json.dumps(dict(attributes), sort_keys=True).encode() if attributes else None
        return cls(
            token,
            write,
            len(value),
            hashlib.sha256(value).hexdigest(),
            _as_header(by),
            data is None,
            attributes=None if encoded is None else hashlib.sha256(encoded).hexdigest()[:16],
        )

    @property
    def pair(self) -> tuple[int, int]:
        """The (token, write number) that is compared."""
        return self.token, self.write

    @property
    def value_pair(self) -> tuple[int, int]:
        """The pair under which the value was written: the fence's own pair, unless it was claimed since."""
        if self.value_token is None or self.value_write is None:
            return self.pair
        return self.value_token, self.value_write

    def claimed(self, token: int, by: str, at: datetime | None) -> FenceTag:
        """Return the tag of the same value, stored `at`, with its fence raised to a token."""
        value_token, value_write = self.value_pair
        return replace(
            self,
            token=token,
            write=0,
            by=_as_header(by),
            value_token=value_token,
            value_write=value_write,
            value_by=self.by if self.value_token is None else self.value_by,
            value_at=self.value_at or (None if at is None else at.isoformat()),
        )

    def is_same_write(self, other: FenceTag) -> bool:
        """Return whether both tags describe the value of the same write."""
        return self._value_identity == other._value_identity

    @property
    def _value_identity(self) -> tuple[object, ...]:
        return self.value_pair, self.digest, self.deleted, self.attributes

    def to_json(self) -> str:
        """Return the tag as the attribute holds it: ASCII without line breaks, as a header must be."""
        kept = {name: value for name, value in asdict(self).items() if value is not None and value is not False}
        return json.dumps(kept, separators=(",", ":"))


def tag_in(path: str, attributes: Mapping[str, Any]) -> FenceTag | None:
    """Return the tag among an object's attributes; None for an object that was never written through a fence."""
    text = attributes.get(ATTRIBUTE)
    if text is None:
        return None
    try:
        tag = FenceTag(**json.loads(text))
        numbers = (tag.token, tag.write, tag.length, *tag.value_pair)
        is_valid = (
            all(type(number) is int and 0 <= number <= MAX_BIGINT for number in numbers)
            and tag.token >= 1
            and isinstance(tag.digest, str)
            and isinstance(tag.by, str)
            and type(tag.deleted) is bool
            and (tag.value_by is None or isinstance(tag.value_by, str))
            and (tag.value_at is None or datetime.fromisoformat(tag.value_at).tzinfo is not None)
        )
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid:
        # Treating it as no fence would let every writer in.
        raise ObjectDamaged(
            path,
            f"its attribute {ATTRIBUTE!r} cannot be read: {text!a:.200}. Find the program that wrote it, and restore "
            "the attribute.",
        )
    return tag


def is_repeated(path: str, stored: FenceTag | None, offered: FenceTag, at: datetime | None) -> bool:
    """Return whether a write was accepted before; raise StaleTokenError if it comes too late."""
    if stored is None or offered.pair > stored.pair:
        return False
    if offered.is_same_write(stored):
        return True  # a claim may have raised the fence since, while the reply was lost
    numbers = (offered.write, stored.write)
    raise reported(StaleTokenError(path, offered.token, stored.token, at, stored.by, numbers=numbers))


def is_claimed(path: str, stored: FenceTag | None, token: int) -> bool:
    """Return whether a fence already stands at this token; raise FenceAhead if it stands above."""
    if stored is not None and stored.token > token:
        raise FenceAhead(path, token, stored.token)
    return stored is not None and stored.token == token


def value_of(path: str, tag: FenceTag, stored: bytes) -> bytes:
    """Return the value in a stored body, if the tag describes it."""
    value = stored[: tag.length]
    if len(value) != tag.length or hashlib.sha256(value).hexdigest() != tag.digest:
        raise ObjectDamaged(path, f"its body is not the one that was written under token {tag.value_pair[0]}.")
    return value


def seal(tag: FenceTag) -> bytes:
    """Return the bytes that make a body unique: the pair, written in blanks and tabs.

    S3's ETag is a digest of the body. If the same bytes were stored under a higher token, the ETag would not change,
    and a writer that had read the object before would be accepted after. JSON, XML and HTML ignore trailing blanks.
    Formats that count lines do not.
    """
    bits = format(tag.token << 63 | tag.write, "0126b")
    return b"\n" + bits.translate({ord("0"): " ", ord("1"): "\t"}).encode()


def sealed_pair(body: bytes) -> tuple[int, int] | None:
    """Return the pair in the seal at the end of a body, or None if there is no seal."""
    end = body[-SEAL_BYTES:]
    if not _SEAL.fullmatch(end):
        return None
    bits = int(end[1:].translate(bytes.maketrans(b" \t", b"01")), 2)
    return bits >> 63, bits & MAX_BIGINT


def check_attributes(attributes: Mapping[str, str] | None, names: re.Pattern[str]) -> dict[str, str]:
    """Return the user's attributes, if the store keeps them unchanged and none is the fence's."""
    given = dict(attributes or {})
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidArgument(f"Attributes of an object are text; got {name!r:.80}: {value!r:.80}.")
        if name.lower() == ATTRIBUTE:
            raise InvalidArgument(f"The attribute {abbreviated(name)} holds the fence; give yours another name.")
        if name.lower() not in _HEADERS and not names.fullmatch(name):
            raise InvalidArgument(
                f"The attribute {abbreviated(name)} has a name that this store would change or refuse. Use a name that "
                f"matches {names.pattern}, or a header such as Content-Type."
            )
        if not _PRINTABLE.fullmatch(value) or value != value.strip():
            raise InvalidArgument(
                f"The attribute {abbreviated(name)} has the value {abbreviated(value)}. Stores keep printable ASCII "
                "without blanks at either end; encode the value."
            )
    size = sum(len(name) + len(value) for name, value in given.items() if name.lower() not in _HEADERS)
    if size > _MAX_ATTRIBUTE_BYTES:
        raise InvalidArgument(f"The attributes take {size} bytes together; the limit is {_MAX_ATTRIBUTE_BYTES}.")
    return given


def _as_header(writer: str) -> str:
    """Return a writer's description as one line of printable ASCII, which every HTTP client leaves unchanged."""
    line = " ".join(writer.encode("ascii", "backslashreplace").decode().split())
    while len(json.dumps(line)) > _MAX_WRITER_BYTES:
        line = line[:-10]
    return line
