"""The options of a lock and their limits, checked before anything is sent.

The database checks the same limits again, because other clients call it too. The check here comes first, so that a bad
option is refused at once, by its name, and leaves nothing behind.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from dblock.errors import InvalidArgument

Seconds = float | int | timedelta
"""A duration: seconds, or a timedelta."""

NAME_BYTES = 512
META_BYTES = 8192
TTL_MIN = 0.1
TTL_MAX = 86_400.0
DEFAULT_TTL = 30.0
PRESENCE_MIN = 0.05
PRESENCE_MAX = 60.0
DEFAULT_PRESENCE = 0.15

_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


class Claimer(Protocol):
    """An object that claims resources outside the lock's database, such as `FencedStore.claims`."""

    def claim(self, token: int, patience: float) -> Any:
        """Raise the resources' fences to this token, or raise TimeoutError after `patience` seconds.

        For an AsyncClient this is a coroutine function.
        """


@dataclass(frozen=True)
class LockOptions:
    """One lock's name and options, checked."""

    name: str
    ttl: float
    timeout: float | None
    meta: str | None
    """The meta as JSON, ready to send."""
    interval: str
    """The ttl as Postgres reads it."""
    durable: bool = True
    keep_alive: bool = True
    fair: bool = True
    claims: tuple[str, ...] = ()
    """The resources whose fences the grant raises."""
    claimers: tuple[Claimer, ...] = ()
    """The objects that claim resources in other databases, right after the grant."""
    reentrant: bool = False
    """Whether a thread or task that holds the lock through such a lock shares its lease when it acquires again."""


def lock_options(
    name: str,
    ttl: Seconds,
    timeout: Seconds | None,
    meta: Any,
    durable: bool = True,
    keep_alive: bool = True,
    fair: bool = True,
    claims: Sequence[str | Claimer] = (),
    reentrant: bool = False,
) -> LockOptions:
    """Check all options against their limits, or raise InvalidArgument that names the bad one."""
    name = check_name(name)
    seconds = check_ttl(name, ttl)
    if not (type(durable) is type(keep_alive) is type(fair) is type(reentrant) is bool):
        switches = {"durable": durable, "keep_alive": keep_alive, "fair": fair, "reentrant": reentrant}
        option, value = next((option, value) for option, value in switches.items() if not isinstance(value, bool))
        raise InvalidArgument(f"The option {option} of lock {_shown(name)} is True or False; got {value!r}.")
    encoded = encode_meta(name, meta)
    here, elsewhere = check_claims(name, claims) if claims != () else ((), ())
    options = object.__new__(LockOptions)
    # The __init__ of a frozen dataclass sets the fields one by one, which takes three times as long.
    vars(options).update(
        name=name,
        ttl=seconds,
        timeout=check_timeout(name, timeout),
        meta=encoded,
        interval=interval(seconds),
        durable=durable,
        keep_alive=keep_alive,
        fair=fair,
        claims=here,
        claimers=elsewhere,
        reentrant=reentrant,
    )
    return options


def check_claims(name: str, claims: Sequence[str | Claimer]) -> tuple[tuple[str, ...], tuple[Claimer, ...]]:
    """Return the resources to claim in the lock's own database, and the claimers for other databases."""
    if isinstance(claims, str) or not isinstance(claims, Iterable):
        raise InvalidArgument(f"The claims of lock {_shown(name)} are a list of resources; got {brief(claims)}.")
    claims = list(claims)
    for one in claims:
        if not callable(getattr(one, "claim", None)) and not (is_text(one) and 1 <= len(str(one).encode()) <= 1024):
            raise InvalidArgument(
                f"A claim of lock {_shown(name)} is a resource's name, text of 1 to 1024 bytes without NUL, or an "
                f"object that claims elsewhere, such as store.claims(…); got {brief(one)}."
            )
    here = tuple(one for one in claims if isinstance(one, str))
    return here, tuple(one for one in claims if not isinstance(one, str))


@functools.lru_cache(maxsize=64)
def interval(seconds: float) -> str:
    """Return a duration as Postgres reads it. Most locks of a program have the same few ttls."""
    return f"{seconds:.6f} s"


def check_name(name: str, what: str = "A lock's name", most: int = NAME_BYTES) -> str:
    """Return the name if it is valid for a lock, or for what else the message names."""
    if not isinstance(name, str):
        raise InvalidArgument(f"{what} is text; got {type(name).__name__} {brief(name)}.")
    if "\0" in name:
        raise InvalidArgument(f"The name {_shown(name)} contains a NUL, which Postgres cannot store.")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(f"The name {_shown(name)} has half of a surrogate pair, which is not text.") from None
    if not 1 <= size <= most:
        raise InvalidArgument(f"{what} takes 1 to {most} bytes of UTF-8; {_shown(name)} has {size}.")
    return name


def check_ttl(name: str, ttl: Seconds) -> float:
    """Return the ttl in seconds if it is within its limits."""
    if type(ttl) is float and TTL_MIN <= ttl <= TTL_MAX:  # the usual case, without the cost of a message
        return ttl
    seconds = check_seconds(f"ttl of lock {_shown(name)}", ttl)
    if not TTL_MIN <= seconds <= TTL_MAX:
        raise InvalidArgument(
            f"The ttl of lock {_shown(name)} is {seconds} s; it must lie between 0.1 s and 24 h (86400 s)."
        )
    return seconds


def check_timeout(name: str, timeout: Seconds | None) -> float | None:
    """Return the timeout in seconds. None waits without end, 0 tries once."""
    if timeout is None:
        return None
    seconds = check_seconds(f"timeout of lock {_shown(name)}", timeout)
    if seconds < 0:
        raise InvalidArgument(
            f"The timeout of lock {_shown(name)} is {seconds:g} s; give 0 to try once, None to wait without end."
        )
    return None if seconds == math.inf else seconds


def check_presence(presence: Seconds) -> float:
    """Return the grace of a presence in seconds if it is within its limits."""
    seconds = check_seconds("presence", presence)
    if not PRESENCE_MIN <= seconds <= PRESENCE_MAX:
        raise InvalidArgument(
            f"The presence is from {PRESENCE_MIN:g} s to {PRESENCE_MAX:g} s, or None for none; got {seconds:g} s."
        )
    return seconds


def encode_meta(name: str, meta: Any, what: str = "meta of lock") -> str | None:
    """Return the meta as JSON that Postgres accepts, or None if there is none. `what` is for error messages."""
    if meta is None:
        return None
    where = f"The {what} {_shown(name)}"
    try:
        text = json.dumps(meta, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(f"{where} has half of a surrogate pair, which is not text.") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where} is not JSON: {error}.") from None
    if size > META_BYTES:
        raise InvalidArgument(f"{where} takes at most {META_BYTES} bytes of JSON; this one has {size}.")
    if _ESCAPED_NUL.search(text):
        raise InvalidArgument(f"{where} contains a NUL, which Postgres cannot store.")
    return text


def quoted(identifier: str) -> str:
    """Quote an identifier for SQL."""
    return '"' + identifier.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Quote text for SQL, whatever the session's setting for backslashes."""
    escaped = text.replace("'", "''").replace("\\", "\\\\")
    return f"E'{escaped}'" if "\\" in text else f"'{escaped}'"


def is_text(value: object) -> bool:
    """Return whether this is text that Postgres can store: a str without NUL and without halves of surrogate pairs."""
    return isinstance(value, str) and "\0" not in value and not _SURROGATE.search(value)


def check_seconds(what: str, value: Seconds) -> float:
    """Return a duration in seconds, or raise InvalidArgument that names the option."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:  # NaN is not itself
        raise InvalidArgument(f"The {what} is seconds or a timedelta; got {type(value).__name__} {brief(value)}.")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def brief(value: object) -> str:
    """Return a value as an error shows it: its repr, shortened if it is long."""
    try:
        text = repr(value)
    except Exception:
        return "(no repr)"
    return text if len(text) <= 80 else f"{text[:77]}…"


def _shown(name: str) -> str:
    """Return the name as an error shows it, shortened if it is long."""
    return ascii(name) if len(name) <= 60 else f"{name[:57]!a}…"
