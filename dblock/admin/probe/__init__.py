"""Try with two sessions what dblock relies on: behaviour decides whether a server can be used, not its name or version.

Guarantee: an install creates nothing on a server that only pretends. Some servers accept Postgres' statements and do
something else, for example reply `true` to every advisory lock. The probe takes a lock in one session and tries it in
another, and so on for each behaviour in dblock.admin.probe.behaviours. It needs no more privileges than an install,
takes a fraction of a second, and removes what it has created.

Behind a pooler in transaction mode a session is one only while its transaction is open. There, what outlasts a
transaction cannot be tried, and is reported as unknown.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dblock._core.schema_version import DEFAULT_SCHEMA, check_name
from dblock._runtime.error_mapping import is_broken, translated
from dblock.admin.probe.behaviours import BEHAVIOURS, INSTALL, Behaviour
from dblock.admin.probe.session_pair import NoSecondSession, SessionPair, Unknown
from dblock.errors import UnsuitableServer

if TYPE_CHECKING:
    from dblock._runtime.target import Target

__all__ = ["BEHAVIOURS", "Behaviour", "Outcome", "probe", "require"]

logger = logging.getLogger("dblock")


@dataclass(frozen=True)
class Outcome:
    """What the probe saw of one behaviour."""

    id: str
    what: str
    """The behaviour, as a sentence that is true where it holds."""
    holds: bool | None
    """None if it could not be tried."""
    seen: str
    """What happened instead, or why it could not be tried; empty if it holds."""
    without: str
    """What follows where it does not hold."""
    required: bool
    """Whether nothing can be installed without it."""
    seconds: float
    """How long the trial took."""


def probe(
    target: Target,
    schema: str = DEFAULT_SCHEMA,
    *,
    read_only: bool = False,
    on_trial: Callable[[str], object] = lambda trial: None,
) -> list[Outcome]:
    """Try every behaviour and return the outcomes.

    With `read_only` only the behaviours whose trial writes nothing are tried. `schema` is where an install would create
    its objects: if the role may not create a schema, the probe creates its own tables in there for a moment.
    """
    check_name(schema)
    wanted = [one for one in BEHAVIOURS if not (read_only and one.writes)]
    try:
        with translated(schema), SessionPair(target, schema, read_only) as pair:
            return list(_try_all(pair, wanted, on_trial))
    except NoSecondSession as error:
        return [_outcome(one, None, str(error), 0.0) for one in wanted]


def require(target: Target, schema: str = DEFAULT_SCHEMA) -> list[Outcome]:
    """Raise UnsuitableServer unless the server behaves as an install needs; log what else does not hold here."""
    outcomes = probe(target, schema)
    failed = [one for one in outcomes if one.required and one.holds is False]
    if failed:
        raise UnsuitableServer([(one.id, one.seen, one.without) for one in failed])
    for one in outcomes:
        if one.holds is False:
            logger.warning("probe: %s: %s. %s", one.id, one.seen, one.without)
    untried = [one for one in outcomes if one.holds is None]
    if any(one.required for one in untried):
        logger.warning("probe: the server's behaviour could not be tried: %s. Run dblock certify.", untried[0].seen)
    elif untried:
        logger.info("probe: could not be tried through a pooler: %s", ", ".join(one.id for one in untried))
    return outcomes


def _try_all(
    pair: SessionPair, behaviours: Iterable[Behaviour], on_trial: Callable[[str], object]
) -> Iterator[Outcome]:
    import psycopg

    for one in behaviours:
        on_trial(one.id)
        started = time.perf_counter()
        holds: bool | None
        try:
            seen = one.find(pair)
            holds = not seen
        except Unknown as reason:
            seen, holds = str(reason), None
        except psycopg.Error as error:
            if is_broken(error):
                raise
            said = (error.diag.message_primary or type(error).__name__).rstrip(".")
            seen, holds = f"the server refused: {said} ({error.sqlstate})", False
        finally:
            pair.end_transactions()
        seconds = time.perf_counter() - started
        yield _outcome(one, holds, seen or "", seconds)


def _outcome(one: Behaviour, holds: bool | None, seen: str, seconds: float) -> Outcome:
    return Outcome(one.id, one.what, holds, seen, one.without, one.needed_by == INSTALL, seconds)
