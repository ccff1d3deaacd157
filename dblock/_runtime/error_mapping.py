"""Translate psycopg's errors into dblock's.

Every error of psycopg has its counterpart here, so that users of dblock need not know psycopg's tree. The original
stays attached as the cause.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import errors as pg

from dblock._core.listener_failures import ServerState
from dblock.errors import (
    AccessDenied,
    ClaimBusy,
    CountsDiffer,
    DatabaseError,
    DblockError,
    InvalidArgument,
    LoginRefused,
    NotWritable,
    PermitsDiffer,
    SchemaError,
    SchemaMissing,
    Unavailable,
    WrongKind,
)

ENDS_SESSION = ("FATAL", "PANIC")
"""The severities of a server's last message."""

SHUTDOWN = ("57P01", "57P02", "57P05")
"""The states of such a message, for a pooler that does not say how severe it is."""


class Overdue(psycopg.OperationalError):
    """A reply did not come in time."""

    undone = False
    """Whether the server has said that it cancelled the statement, so that the statement had no effect."""


def cleaned(error: BaseException) -> BaseException:
    """Remove from the error the connection that it may carry, because that knows the password."""
    if isinstance(error, psycopg.Error) and error.pgconn is not None:
        # In the error itself, which is also the context of whatever is raised while it is handled.
        error._pgconn = None
    return error


@contextmanager
def translated(schema: str) -> Iterator[None]:
    """Raise dblock's counterpart of every error that psycopg (or SQLAlchemy around it) raises in the body."""
    try:
        yield
    except DblockError:
        raise
    except psycopg.Error as error:
        raise translate(error, schema) from cleaned(error)
    except UnicodeError as error:
        raise InvalidArgument(f"The host's name cannot be looked up: {error}.") from None
    except Exception as error:
        original = getattr(error, "orig", None)
        if isinstance(original, psycopg.Error):
            raise translate(original, schema) from cleaned(original)
        raise


def translate(error: psycopg.Error, schema: str) -> DblockError:
    """Return the counterpart of a psycopg error."""
    # libpq explains over several lines.
    said = error.diag.message_primary or "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    said = said or type(error).__name__
    if isinstance(error, pg.ReadOnlySqlTransaction):
        return NotWritable()
    if isinstance(error, pg.LockNotAvailable) and "claim(" in (error.diag.context or ""):
        return ClaimBusy(said)
    if error.sqlstate == "DBL10":
        hint = error.diag.message_hint or ""
        return WrongKind(said, hint) if hint.startswith("Delete ") else WrongKind(said)
    if error.sqlstate == "DBL11":
        return PermitsDiffer(**json.loads(error.diag.message_detail or ""))
    if error.sqlstate == "FEN04":
        return DatabaseError(f"Lock not granted: its claims failed. {said} {error.diag.message_hint}")
    if error.sqlstate == "DBL12" and error.diag.message_detail:
        told = json.loads(error.diag.message_detail)
        return CountsDiffer(told["kind"], told["name"], told["size"], told["asked"])
    is_about_fences = "fenced_store" in said or "claim" in said or (" schema " in f" {said}" and schema not in said)
    if is_about_fences and isinstance(error, (pg.UndefinedFunction, pg.InvalidSchemaName, pg.InsufficientPrivilege)):
        return SchemaError(
            f"A claim needs fenced_store in the lock's own database, and the privilege to use it: {said}. As its owner "
            "run: dblock fence setup, and for each role: dblock fence grant ROLE."
        )
    if is_login_refused(error):
        return LoginRefused(
            f"The server refused the login, and a retry does not help: {said.rstrip('.')}. "
            "Check the role, its password, the database and the role's CONNECT privilege on it."
        )
    if isinstance(error, pg.InsufficientPrivilege):
        return AccessDenied(
            f"The database refused: {said}. To lock and unlock, a role needs what the schema's owner gives it by: "
            "dblock grant ROLE. To install, it needs CREATE on the database, or an empty schema of its own. "
            "To look, it needs: dblock grant ROLE --may see. All else is for the owner."
        )
    if isinstance(error, (pg.UndefinedFunction, pg.InvalidSchemaName, pg.UndefinedTable)):
        return SchemaMissing(schema)
    if isinstance(error, psycopg.DataError):
        return InvalidArgument(said)
    if is_broken(error) or isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
        # libpq's last line may be a question.
        return Unavailable(f"The database could not be asked: {said}{'' if said.endswith(('.', '?')) else '.'}")
    return DatabaseError(f"The database refused: {said}")


_LOGIN_REFUSED = re.compile(
    r"authentication failed|no password supplied|(role|user|database) \".*\" does not exist|no such (user|database)"
    r"|is not permitted to log in|no pg_hba\.conf entry|permission denied for database"
)
_REFUSED_FOR_NOW = re.compile(
    r"too many|slots are reserved|the database system is|accepting connections|no more connections"
)


def is_login_refused(error: psycopg.Error) -> bool:
    """Return whether a connection was refused for a reason that does not pass by itself.

    Of several hosts, each must have refused it: one that is away or busy may accept the login later. libpq does not say
    which SQLSTATE a refused connection has. In a server with translated messages such a refusal looks like any other.
    """
    text = str(error)
    if type(error) is not psycopg.OperationalError or _REFUSED_FOR_NOW.search(text):
        return False
    # psycopg lists the failures if there were several, one for each address of a host.
    hosts: dict[str, str] = {}
    for failure in text.split("\n- host: ")[1:]:
        host, _, said = failure.partition(", hostaddr: ")
        hosts[host] = hosts.get(host, "") + said
    return all(_LOGIN_REFUSED.search(said) for said in list(hosts.values()) or [text])


def is_broken(error: psycopg.Error) -> bool:
    """Return whether the connection is gone, so that a new one is worth trying.

    The error is then not that of the called function, so it does not say whether the function was executed. A pooler
    reports the end of its connection to the server as a protocol violation.
    """
    state = error.sqlstate
    if state is None:
        return isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
    severity = error.diag.severity_nonlocalized or error.diag.severity
    return state[:2] == "08" or state in SHUTDOWN or severity in ENDS_SESSION


def is_overdue(error: BaseException | None) -> bool:
    """Return whether the reply did not come in time. The statement may still run."""
    return isinstance(error, Overdue)


def is_undone(error: BaseException) -> bool:
    """Return whether the statement was cancelled and had no effect."""
    return error.undone if isinstance(error, Overdue) else isinstance(error, pg.QueryCanceled)


def is_passing(error: psycopg.Error) -> bool:
    """Return whether an immediate retry may well succeed: two transactions conflicted."""
    return isinstance(error, (pg.SerializationFailure, pg.DeadlockDetected))


STATES = {
    "the database system is shutting down": ServerState.SHUTTING_DOWN,
    "the database system is starting up": ServerState.STARTING,
    "the database system is in recovery mode": ServerState.STARTING,
    "the database system is not yet accepting connections": ServerState.STARTING,
}
"""What a server replies to a new connection that it cannot accept now. libpq passes on the text, not the code 57P03."""


_ATTEMPT = re.compile(
    r'connection to server (?:at "([^"]*)"(?: \(([^)]*)\))?, port (\d+)|on socket "([^"]*)") failed:'
    r"(.*?)(?=connection to server |\Z)",
    re.DOTALL,
)


def server_states(error: BaseException | None) -> dict[str, ServerState]:
    """Return the states for which servers refused a new connection, by their addresses as server_address names them.

    An error may tell of several attempts, because one name may lead to several servers. Before libpq 14, it names no
    server.
    """
    found = {}
    for host, resolved, port, path, said in _ATTEMPT.findall(str(error)):
        state = next((state for words, state in STATES.items() if words in said), None)
        if state is not None:
            found[path or f"{resolved or host}:{port}"] = state
    return found


def server_address(host: str, hostaddr: str, port: int) -> str:
    """Return the address of a server: that of its socket, or its IP address and port."""
    return f"{hostaddr}:{port}" if hostaddr else f"{host}/.s.PGSQL.{port}"


def is_refusal_for_now(error: BaseException | None) -> bool:
    """Return whether a server refused a new connection because it ends or starts."""
    return any(words in str(error) for words in STATES)
