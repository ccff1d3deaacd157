"""What an object carries of its fence, in one attribute: the highest (token, write number) that it has accepted.

The attribute is JSON, so that a person sees it with any tool of the store's, and one for everything, because stores
differ in what names they allow.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from fenced_store.errors import FenceAhead, InvalidArgument, ObjectDamaged, StaleTokenError, shown
from fenced_store.tokens import MOST

ATTRIBUTE = "fence"
NAMES = re.compile("[a-z0-9][a-z0-9_-]*")
AZURE_NAMES = re.compile("[a-z_][a-z0-9_]*")
"""The names that attributes may have: those that come back as they were."""

SEAL = 127
"""How many bytes a seal takes."""

_SEAL = re.compile(rb"\n[ \t]{126}")
_BY_BYTES = 300
_ATTRIBUTE_BYTES = 1000
"""What the user's attributes may take: S3 has 2 KB for all of them, and ours is among them."""
_PLAIN = re.compile("[ -~]*")
_HEADERS = {
    "cache-control", "content-disposition", "content-encoding", "content-language", "content-type", "storage-class",
}  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """The fence of an object, and what of its body is the value."""

    token: int
    write: int
    length: int
    digest: str
    by: str
    deleted: bool = False
    value_token: int | None = None
    """The token under which the value was written, where the fence has been claimed above it since."""
    value_write: int | None = None
    value_by: str | None = None
    value_at: str | None = None
    """Its number, who wrote it and when, likewise."""
    attributes: str | None = None
    """A digest of the user's attributes, if there are any."""

    @classmethod
    def of(
        cls, token: int, write: int, data: bytes | None, by: str, attributes: Mapping[str, str] | None = None
    ) -> Mark:
        """Return the mark for a value; None stands for a deletion."""
        value = data or b""
        said = json.dumps(dict(attributes), sort_keys=True).encode() if attributes else None
        return cls(
            token,
            write,
            len(value),
            hashlib.sha256(value).hexdigest(),
            _plain(by),
            data is None,
            attributes=None if said is None else hashlib.sha256(said).hexdigest()[:16],
        )

    @property
    def pair(self) -> tuple[int, int]:
        """What is compared."""
        return self.token, self.write

    @property
    def value_pair(self) -> tuple[int, int]:
        """What the value was written under, which is the fence unless that was claimed since."""
        if self.value_token is None or self.value_write is None:
            return self.pair
        return self.value_token, self.value_write

    def claimed(self, token: int, by: str, at: datetime | None) -> Mark:
        """Return the mark of the same value, which was stored `at`, with its fence raised."""
        wrote, number = self.value_pair
        return replace(
            self,
            token=token,
            write=0,
            by=_plain(by),
            value_token=wrote,
            value_write=number,
            value_by=self.by if self.value_token is None else self.value_by,
            value_at=self.value_at or (None if at is None else at.isoformat()),
        )

    def is_same_write(self, other: Mark) -> bool:
        """Tell whether what is there was written by the very same write."""
        return self._written == other._written

    @property
    def _written(self) -> tuple[object, ...]:
        return self.value_pair, self.digest, self.deleted, self.attributes

    def text(self) -> str:
        """Return it as the attribute holds it: ASCII without line breaks, as a header must be."""
        kept = {name: value for name, value in asdict(self).items() if value is not None and value is not False}
        return json.dumps(kept, separators=(",", ":"))


def mark_in(path: str, attributes: Mapping[str, Any]) -> Mark | None:
    """Return the mark among an object's attributes; None for an object that nobody has written through a fence."""
    text = attributes.get(ATTRIBUTE)
    if text is None:
        return None
    try:
        found = Mark(**json.loads(text))
        numbers = (found.token, found.write, found.length, *found.value_pair)
        sound = (
            all(type(number) is int and 0 <= number <= MOST for number in numbers)
            and found.token >= 1
            and isinstance(found.digest, str)
            and isinstance(found.by, str)
            and type(found.deleted) is bool
            and (found.value_by is None or isinstance(found.value_by, str))
            and (found.value_at is None or datetime.fromisoformat(found.value_at).tzinfo is not None)
        )
    except (TypeError, ValueError):
        sound = False
    if not sound:
        # To take it for no fence at all would let everybody in.
        raise ObjectDamaged(
            path, f"its attribute {ATTRIBUTE!r} cannot be read: {text!a:.200}. Put right what wrote there."
        )
    return found


def is_repeated(path: str, stored: Mark | None, offered: Mark, at: datetime | None) -> bool:
    """Tell whether a write was accepted before; raise StaleTokenError if it comes too late."""
    if stored is None or offered.pair > stored.pair:
        return False
    if offered.is_same_write(stored):
        return True  # perhaps with a claim since, which came while the answer was lost
    raise StaleTokenError(path, offered.token, stored.token, at, stored.by, numbers=(offered.write, stored.write))


def is_claimed(path: str, stored: Mark | None, token: int) -> bool:
    """Tell whether a fence stands at this token already; raise FenceAhead if it is past it."""
    if stored is not None and stored.token > token:
        raise FenceAhead(path, token, stored.token)
    return stored is not None and stored.token == token


def value_of(path: str, mark: Mark, stored: bytes) -> bytes:
    """Return the value in what is stored, if it is what the mark was made for."""
    value = stored[: mark.length]
    if len(value) != mark.length or hashlib.sha256(value).hexdigest() != mark.digest:
        raise ObjectDamaged(path, f"its body is not the one that was written under token {mark.value_pair[0]}.")
    return value


def seal(mark: Mark) -> bytes:
    """Return what makes a body unlike every other: the pair, written in blanks and tabs.

    S3's ETag is a digest of the body. Were the same bytes stored under a higher token, it would be as it was, and a
    writer that had looked before would be let in after. Blanks at its end leave most kinds of text as good as they
    were.
    """
    bits = format(mark.token << 63 | mark.write, "0126b")
    return b"\n" + bits.translate({ord("0"): " ", ord("1"): "\t"}).encode()


def sealed_pair(body: bytes) -> tuple[int, int] | None:
    """Return the pair that is sealed into the end of a body, if there is one."""
    end = body[-SEAL:]
    if not _SEAL.fullmatch(end):
        return None
    bits = int(end[1:].translate(bytes.maketrans(b" \t", b"01")), 2)
    return bits >> 63, bits & MOST


def check_attributes(attributes: Mapping[str, str] | None, names: re.Pattern[str]) -> dict[str, str]:
    """Return a user's attributes, if the store can keep them as they are and they leave ours alone."""
    given = dict(attributes or {})
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidArgument(f"Attributes of an object are text; got {name!r:.80}: {value!r:.80}.")
        if name.lower() == ATTRIBUTE:
            raise InvalidArgument(f"The attribute {shown(name)} is where the fence is; give yours another name.")
        if name.lower() not in _HEADERS and not names.fullmatch(name):
            raise InvalidArgument(
                f"The attribute {shown(name)} has a name that this store would change or refuse. Take one of "
                f"{names.pattern}, or a header such as Content-Type."
            )
        if not _PLAIN.fullmatch(value) or value != value.strip():
            raise InvalidArgument(
                f"The attribute {shown(name)} has the value {shown(value)}. Stores keep printable ASCII without "
                f"blanks at "
                "either end; encode it."
            )
    size = sum(len(name) + len(value) for name, value in given.items() if name.lower() not in _HEADERS)
    if size > _ATTRIBUTE_BYTES:
        raise InvalidArgument(f"The attributes take {size} bytes together; {_ATTRIBUTE_BYTES} are the most.")
    return given


def _plain(by: str) -> str:
    """Return who wrote it as one line of printable ASCII that no header's reader will change."""
    said = " ".join(by.encode("ascii", "backslashreplace").decode().split())
    while len(json.dumps(said)) > _BY_BYTES:
        said = said[:-10]
    return said
