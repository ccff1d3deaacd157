"""Where the database is: a DSN, a SQLAlchemy engine, the embedded server, or what the environment names.

A target knows how to open connections and how to describe itself without the password. Nothing is opened, started or
even imported before the first connection is requested.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dblock._core.options import is_text
from dblock._core.timings import Timings, chosen
from dblock._runtime.isolation import Remedy, is_option_refused, set_isolation, set_isolation_async, with_option
from dblock.errors import ConfigurationError, DblockError, InvalidArgument, Unavailable

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    Where = str | Engine | AsyncEngine | None
    """A DSN (URL or keywords), an Engine or AsyncEngine, or nothing: then the environment names the database."""

logger = logging.getLogger("dblock")

DSN_VARIABLE = "DBLOCK_DSN"
EMBEDDED_VARIABLE = "DBLOCK_EMBEDDED"
FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_NAME_SESSION = "SET application_name TO 'dblock'"
_SPEAK_UTF8 = "SET client_encoding TO 'UTF8'"


class Target:
    """A database named by a DSN; the base of the other kinds."""

    embedded = False
    takes_option = True
    """Whether connections are opened with the option that makes them READ COMMITTED."""
    needs_transactions = False
    """Whether each call needs a transaction of its own to be READ COMMITTED."""
    closes_with_loop = True
    """Whether an AsyncClient closes its connections by itself when it finds its event loop closed."""

    def __init__(self, dsn: str, timings: Timings | None = None) -> None:
        self._parameters = _parse(dsn)
        self._connect_timeout = chosen(timings).connect_timeout

    @property
    def is_one_host(self) -> bool:
        """Whether every connection leads to the same server, as far as the DSN says."""
        given = self._parameters
        hosts = str(given.get("host") or given.get("hostaddr") or os.environ.get("PGHOST") or "")
        return "," not in hosts and not given.get("service")

    def conninfo(self) -> str:
        """Return the connection string for libpq, including the password."""
        from psycopg.conninfo import make_conninfo

        return make_conninfo("", **_with_defaults(self._parameters, self._connect_timeout))

    def connect(self) -> psycopg.Connection[Any]:
        """Open a connection of its own, in autocommit."""
        import psycopg

        from dblock._runtime.fork_safe_connection import ForkSafeConnection

        if self.takes_option:
            try:
                return ForkSafeConnection.connect(self._conninfo_with_option(), autocommit=True)
            except psycopg.OperationalError as error:
                if not is_option_refused(error):
                    raise
                self.takes_option = False
        return self._read_committed(ForkSafeConnection.connect(self.conninfo(), autocommit=True))

    def _conninfo_with_option(self) -> str:
        from psycopg.conninfo import conninfo_to_dict, make_conninfo

        return make_conninfo("", **with_option(dict(conninfo_to_dict(self.conninfo()))))

    def _read_committed(self, connection: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
        self.needs_transactions |= set_isolation(connection) is Remedy.BEGIN
        return connection

    async def connect_async(self) -> psycopg.AsyncConnection[Any]:
        """Open an asynchronous connection of its own, in autocommit."""
        import psycopg

        from dblock._runtime.fork_safe_connection import AsyncForkSafeConnection

        if self.takes_option:
            try:
                return await AsyncForkSafeConnection.connect(self._conninfo_with_option(), autocommit=True)
            except psycopg.OperationalError as error:
                if not is_option_refused(error):
                    raise
                self.takes_option = False
        connection = await AsyncForkSafeConnection.connect(self.conninfo(), autocommit=True)
        return await self._read_committed_async(connection)

    async def _read_committed_async(self, connection: psycopg.AsyncConnection[Any]) -> psycopg.AsyncConnection[Any]:
        self.needs_transactions |= await set_isolation_async(connection) is Remedy.BEGIN
        return connection

    def for_threads(self) -> Target:
        """Return the target that threads of an AsyncClient use to reach the same database in the same way."""
        return self

    def __str__(self) -> str:
        """Name the database, without the password."""
        parameters = self._parameters
        host, port = (str(parameters.get(key) or "") for key in ("host", "port"))
        where = ",".join(f"{h or 'local'}{':' + p if p else ''}" for h, p in _paired(host.split(","), port.split(",")))
        user = f"{parameters['user']}@" if parameters.get("user") else ""
        return f"postgresql://{user}{where}/{parameters.get('dbname') or ''}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


class EngineTarget(Target):
    """The database of a SQLAlchemy engine.

    With the psycopg driver the engine itself makes the connections, so that its connect_args, creator and events apply.
    They are made beside its pool, which a lock never uses. If the engine cannot make them (a synchronous engine for an
    AsyncClient, or the other way round, or another driver), dblock uses its URL and connect_args instead. If the engine
    connects in any other way, it is refused, so that the client cannot reach another database than the application.
    """

    def __init__(self, engine: Engine, is_async: bool, timings: Timings | None = None) -> None:
        from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
        from sqlalchemy.pool import NullPool

        if engine.dialect.name != "postgresql":
            raise InvalidArgument(
                f"The engine speaks to {engine.dialect.name}; dblock needs one for postgresql, "
                "such as create_engine('postgresql+psycopg://…')."
            )
        dialect: Any = PGDialect_psycopg
        _, parameters = dialect().create_connect_args(engine.url)
        self._parameters = _conninfo_only(parameters)
        self._given = _connect_arguments(engine)
        self._pool: Any = None
        if engine.dialect.driver in ("psycopg", "psycopg_async"):
            # The same creator and events, but none of the application's connections, and no limit.
            pool: Any = engine.pool
            self._pool = NullPool(pool._creator, _dispatch=pool.dispatch, dialect=engine.dialect)
        elif self._given is not None and self._given == engine.dialect.create_connect_args(engine.url)[1]:
            self._given = self._parameters  # another driver's spelling of the same parameters
        else:
            self._given = None
        self._is_async = is_async
        self._connect_timeout = chosen(timings).connect_timeout

    def conninfo(self) -> str:
        from psycopg.conninfo import make_conninfo

        if self._given is None:
            raise InvalidArgument(
                "This engine connects in a way of its own (a creator, connect_args, a do_connect event) that this "
                "client cannot take over. Give Client an Engine, or AsyncClient an AsyncEngine, with the psycopg "
                "driver; or give a DSN."
            )
        return make_conninfo("", **_with_defaults(_conninfo_only(self._given), self._connect_timeout))

    def connect(self) -> psycopg.Connection[Any]:
        if self._pool is None or self._is_async:
            return super().connect()
        from psycopg.pq import TransactionStatus

        with _told_as_ours():
            connection: psycopg.Connection[Any] = _detached(self._pool)
        try:
            # Usually this sends nothing, so that there is no reply to wait for.
            if connection.info.transaction_status != TransactionStatus.IDLE:
                connection.rollback()
            connection.autocommit = True
            if connection.info.encoding != "utf-8":
                connection.execute(_SPEAK_UTF8)
            if not connection.info.parameter_status("application_name"):
                connection.execute(_NAME_SESSION)
        except BaseException:
            connection.close()
            raise
        return self._read_committed(connection)

    async def connect_async(self) -> psycopg.AsyncConnection[Any]:
        if self._pool is None or not self._is_async:
            return await super().connect_async()
        from psycopg.pq import TransactionStatus
        from sqlalchemy.util import greenlet_spawn

        with _told_as_ours():
            connection: psycopg.AsyncConnection[Any] = await greenlet_spawn(_detached, self._pool)
        try:
            if connection.info.transaction_status != TransactionStatus.IDLE:
                await connection.rollback()
            await connection.set_autocommit(True)
            if connection.info.encoding != "utf-8":
                await connection.execute(_SPEAK_UTF8)
            if not connection.info.parameter_status("application_name"):
                await connection.execute(_NAME_SESSION)
        except BaseException:
            await connection.close()
            raise
        return await self._read_committed_async(connection)

    def for_threads(self) -> Target:
        return _AsyncEngineTarget(self) if self._pool is not None and self._is_async else self


class _AsyncEngineTarget(Target):
    """The database of an AsyncEngine, for threads.

    Each connection is made by the engine, so that its creator and events apply, in an event loop of its own that ends
    with the attempt. The application's event loop may be blocked.
    """

    def __init__(self, engine: EngineTarget) -> None:
        self._engine = engine
        self._parameters = engine._parameters

    def conninfo(self) -> str:
        return self._engine.conninfo()

    def connect(self) -> psycopg.Connection[Any]:
        import psycopg

        from dblock._runtime.own_loop import run_in_own_loop

        made = run_in_own_loop(self._engine.connect_async)
        self.needs_transactions = self._engine.needs_transactions
        connection: psycopg.Connection[Any] = psycopg.Connection(made.pgconn)
        connection.autocommit = True
        # Kept, because psycopg warns of an object that is dropped before it is closed.
        connection.made_by = made  # type: ignore[attr-defined]
        return connection


class EmbeddedTarget(Target):
    """The embedded Postgres of this user, started by the first connection and shared by all processes."""

    embedded = True
    is_one_host = True

    def __init__(self) -> None:
        self._dsn: str | None = None

    def conninfo(self) -> str:
        if self._dsn is None:
            from dblock import embedded

            server = embedded.start()
            logger.info("Using the embedded Postgres in %s. No other machine or user shares its locks.", server.folder)
            self._dsn = server.url
        return self._dsn

    def __str__(self) -> str:
        return "the embedded Postgres"


def resolve(where: Where | Target = None, *, embedded: bool = False, timings: Timings | None = None) -> Target:
    """Return the target for a DSN, an engine, the embedded server or the environment; or raise InvalidArgument.

    On two hosts the embedded server is two databases, so a missing DSN never selects it: it must be asked for.
    """
    if embedded:
        if where is not None:
            raise InvalidArgument("embedded=True chooses the embedded Postgres. Do not name another database with it.")
        return EmbeddedTarget()
    if isinstance(where, Target):
        return where
    if where is None:
        dsn = os.environ.get(DSN_VARIABLE)
        if dsn is not None:
            if not dsn.strip():
                # A variable that is set but empty is a mistake, such as a missing secret.
                raise ConfigurationError(
                    f"The DSN is empty: {DSN_VARIABLE} is set, but has no value. Give it one like "
                    "postgresql://user@host/database, or unset it."
                )
            return Target(dsn, timings)
        if is_on(os.environ.get(EMBEDDED_VARIABLE, "0"), "environment"):
            return EmbeddedTarget()
        raise ConfigurationError(
            "No database is named. Pass a DSN or an engine, or set DBLOCK_DSN. For a Postgres of your own on this "
            "machine alone, pass embedded=True or set DBLOCK_EMBEDDED=1."
        )
    if isinstance(where, str):
        return Target(where, timings)
    # A caller with an engine has imported SQLAlchemy. Other callers should not pay for the import.
    if "sqlalchemy" in sys.modules:
        from sqlalchemy import Engine

        if isinstance(where, Engine):
            return EngineTarget(where, is_async=False, timings=timings)
        sync_engine = getattr(where, "sync_engine", None)
        if isinstance(sync_engine, Engine):
            return EngineTarget(sync_engine, is_async=True, timings=timings)
    raise InvalidArgument(f"A database is named by a DSN, an Engine or an AsyncEngine; got {type(where).__name__}.")


def is_on(value: str, source: str) -> bool:
    """Return whether the setting `embedded` is on; raise ConfigurationError if its value says neither."""
    on = FLAGS.get(value.strip().lower())
    if on is None:
        raise ConfigurationError(f"{EMBEDDED_VARIABLE} is 1 or 0; got {value!r} (named by: {source}).")
    return on


def _parse(dsn: str) -> dict[str, Any]:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    if not is_text(dsn):
        raise InvalidArgument(
            "The DSN is not text that Postgres can take (it is not shown, because it may contain a password)."
        )
    if not dsn.strip():
        raise InvalidArgument("The DSN is empty. Give one like postgresql://user@host/database.")
    parameters: dict[str, Any] | None = None
    with contextlib.suppress(psycopg.Error):
        # SQLAlchemy's spelling names a driver too.
        parameters = dict(conninfo_to_dict(re.sub(r"^(postgres(?:ql)?)\+\w+://", r"\1://", dsn)))
    if parameters is None:
        if re.match(r"(?!postgres(ql)?(\+\w+)?:)[\w+.-]+://", dsn):
            raise InvalidArgument("The DSN is a URL of another kind. Give one that begins with postgresql://.")
        # libpq's message is left out, and is no context of this error, because it quotes the DSN.
        raise InvalidArgument(
            "The DSN cannot be read (it is not shown here, because it may contain a password): it has a keyword that "
            "libpq does not know, or a character that a URL writes as %XX. Give a URL like "
            "postgresql://user@host/database, or keywords like: host=localhost dbname=database."
        )
    if "@" in str(parameters.get("host") or ""):
        raise InvalidArgument(
            "The DSN's host contains an @ (it is not shown here, because it may be part of a password). "
            "In a URL like postgresql://user:password@host/database, write an @ of the password as %40."
        )
    if ("://" in dsn and "@" in str(parameters.get("dbname") or "")) or not _is_ports(parameters.get("port")):
        raise InvalidArgument(
            "The DSN's port is no number, or its database has an @ (they are not shown here, because they may be part "
            "of a password). In a URL like postgresql://user:password@host:5432/database, write a / of the password as "
            "%2F."
        )
    return parameters


def _is_ports(ports: object) -> bool:
    return re.fullmatch(r"[0-9,]*", str(ports or "")) is not None


def _connect_arguments(engine: Engine) -> dict[str, Any] | None:
    """Return the engine's parameters, including its connect_args. None if it connects in a way of its own."""
    pool: Any = engine.pool
    dispatch: Any = engine.dialect.dispatch
    creator = pool._creator
    if len(dispatch.do_connect) or getattr(creator, "__module__", "") != "sqlalchemy.engine.create":
        return None
    arguments = inspect.getclosurevars(creator).nonlocals.get("cparams")
    return None if arguments is None else dict(arguments)


def _conninfo_only(arguments: dict[str, Any]) -> dict[str, Any]:
    """Leave out the parameters of psycopg that libpq does not know."""
    ours = ("autocommit", "prepare_threshold", "context", "row_factory", "cursor_factory")
    return {key: value for key, value in arguments.items() if key not in ours}


def _with_defaults(given: dict[str, Any], connect_timeout: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "connect_timeout": connect_timeout,
        "fallback_application_name": "dblock",
    }
    if "," in str(given.get("host") or given.get("hostaddr") or ""):
        # Of several hosts, only the one that accepts writes can grant.
        defaults["target_session_attrs"] = "read-write"
    return defaults | given | {"client_encoding": "UTF8"}


@contextlib.contextmanager
def _told_as_ours() -> Iterator[None]:
    """Raise Unavailable for errors that an engine's own creator or events raise."""
    import psycopg

    try:
        yield
    except (psycopg.Error, DblockError):
        raise
    except Exception as error:
        if isinstance(getattr(error, "orig", None), psycopg.Error):
            raise
        raise Unavailable(f"The engine could not connect: {type(error).__name__}: {error}") from error


def _detached(pool: Any) -> Any:
    fairy = pool.connect()
    connection = fairy.driver_connection
    fairy.detach()
    return connection


def _paired(hosts: list[str], ports: list[str]) -> list[tuple[str, str]]:
    return [(host, ports[i] if len(ports) == len(hosts) else ports[0]) for i, host in enumerate(hosts)]
