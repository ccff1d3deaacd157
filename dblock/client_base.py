"""What both kinds of client do: check their settings, and belong to one process."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dblock._core.acquire import LockFlows
from dblock._core.options import DEFAULT_PRESENCE, Seconds, brief, check_presence, check_seconds, is_text
from dblock._core.shared_acquire import SharedFlows
from dblock._runtime.forks import importing
from dblock._runtime.runtime import Settings, TaskRuntime, ThreadRuntime
from dblock._runtime.target import Target, resolve
from dblock.errors import InvalidArgument

if TYPE_CHECKING:
    from dblock._core.observation import Observer
    from dblock._core.timings import Timings
    from dblock._runtime.target import Where

MOST_PATIENT = 86_400.0
HOLDER_BYTES = 512


class ClientBase:
    """A client of either kind."""

    _runtime: ThreadRuntime | TaskRuntime

    def __init__(
        self,
        where: Where = None,
        *,
        schema: str = "dblock",
        holder: str | None = None,
        pool_size: int = 4,
        patience: Seconds = 5.0,
        listen_dsn: str | None = None,
        presence: Seconds | None = DEFAULT_PRESENCE,
        embedded: bool = False,
        fences: str | None = None,
        observers: Sequence[Observer] = (),
        timings: Timings | None = None,
    ) -> None:
        """Name the database. Nothing is opened yet.

        `where` is a DSN (several hosts are fine), or a SQLAlchemy Engine or AsyncEngine. Without it, $DBLOCK_DSN names
        the database. With `embedded=True` it is the embedded Postgres of this user, and without a DSN also if
        DBLOCK_EMBEDDED=1 is set. Otherwise ConfigurationError is raised. `holder` is the name of this client that
        others see, by default the machine and process. `patience` limits the wait for a free connection, and then the
        wait for the database's reply, but never to less than one second.

        `listen_dsn` leads to the same database past a pooler, for the one connection over which waiters are woken.
        `presence` is the grace: how long other clients wait, once that connection has ended, before they take the locks
        that this process holds. With None they wait until the leases expire. `fences` is the schema of fenced_store in
        which `claims` are names. It is needed only if the database has several. `observers` are told of every wait,
        hold and renewal of this client: see `dblock.observability`. `timings` are the intervals and patiences of the
        runtime; tests change them.
        """
        with importing:
            from dblock._core.schema_version import check_name

        holder_name = check_holder(holder)
        if isinstance(pool_size, bool) or not isinstance(pool_size, int) or pool_size < 1:
            raise InvalidArgument(f"pool_size is a number of connections from 1; got {brief(pool_size)}.")
        with importing:  # psycopg, which reads a DSN
            target = resolve(where, embedded=embedded, timings=timings)
        flows = SharedFlows(
            check_name(schema),
            holder_name,
            fences=None if fences is None else check_name(fences),
            timings=timings,
        )
        observe(flows, observers)
        seconds = check_seconds("patience", patience)
        if not 0 <= seconds <= MOST_PATIENT:
            raise InvalidArgument(f"The patience is from 0 s to a day; got {seconds:g} s.")
        listen_target = target if listen_dsn is None else _listen_target(listen_dsn, timings)
        grace = None if presence is None else check_presence(presence)
        self._open(Settings(target, listen_target, schema, pool_size, seconds, grace, _install), flows)

    def _open(self, settings: Settings, flows: LockFlows) -> None:
        raise NotImplementedError

    def __reduce__(self) -> tuple[object, ...]:
        return self._runtime.__reduce__()

    def __repr__(self) -> str:
        runtime = self._runtime
        return f"<{type(self).__name__} {runtime.settings.target}{' closed' if runtime.closed else ''}>"


def recipe(module: str, name: str) -> Any:
    """Import a recipe when it is first used. Recipes are built on clients, so this module does not import them."""
    with importing:
        return getattr(import_module(f"dblock.recipes.{module}"), name)


def check_holder(holder: str | None) -> str | Callable[[], str]:
    """Return the name of a client that others see, or a function that returns the default name."""
    if holder is None:
        return _default_holder()
    if not is_text(holder) or len(holder.encode()) > HOLDER_BYTES:
        raise InvalidArgument(f"A holder is text of at most {HOLDER_BYTES} bytes without NUL; got {brief(holder)}.")
    return holder


def observe(flows: LockFlows, observers: Sequence[Observer]) -> None:
    """Report every wait, hold and renewal of a client to these observers."""
    if observers:
        with importing:
            from dblock._core.observation import Observation
        flows.observation = Observation(observers, flows.holder_name, flows.clock)


def _default_holder() -> Callable[[], str]:
    host = socket.gethostname()
    # For this process, and after a fork for its children.
    named = functools.lru_cache(maxsize=4)(lambda process: f"{host} pid {process}")
    return lambda: named(os.getpid())


def _listen_target(listen_dsn: str, timings: Timings | None) -> Target:
    try:
        return resolve(listen_dsn, timings=timings)
    except InvalidArgument as error:
        raise InvalidArgument(f"listen_dsn: {error}") from None


def _install(target: Target, schema: str) -> None:
    with importing:
        from dblock.admin.schema import install
    install(target, schema)
