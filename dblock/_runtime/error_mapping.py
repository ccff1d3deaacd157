"""psycopg's errors, said in dblock's words.

Every error of the layer below has its counterpart here, so that nobody who uses dblock needs to know psycopg's
tree. The original stays attached as the cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import errors as pg

from dblock.errors import (
    AccessDenied,
    ClaimBusy,
    DatabaseError,
    DblockError,
    InvalidArgument,
    NotWritable,
    SchemaError,
    SchemaMissing,
    Unavailable,
)


class Overdue(psycopg.OperationalError):
    """An answer did not come within the time that it was given."""


def cleaned(error: BaseException) -> BaseException:
    """Return the error without the connection that it may carry, for that knows the password."""
    if isinstance(error, psycopg.Error) and error.pgconn is not None:
        # In the error itself, which is also the context of whatever is raised while it is handled.
        error._pgconn = None
    return error


@contextmanager
def translated(schema: str) -> Iterator[None]:
    """Raise dblock's counterpart of whatever psycopg (or SQLAlchemy around it) raises inside."""
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
    """Return the counterpart of one error of psycopg's."""
    # libpq explains over several lines.
    said = error.diag.message_primary or "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    said = said or type(error).__name__
    if isinstance(error, pg.ReadOnlySqlTransaction):
        return NotWritable()
    if isinstance(error, pg.LockNotAvailable) and "claim(" in (error.diag.context or ""):
        return ClaimBusy(said)
    if error.sqlstate == "FEN04":
        return DatabaseError(
            f"The lock was not granted, for what it claims cannot be had: {said} {error.diag.message_hint}"
        )
    if "fenced_store" in said and isinstance(
        error, (pg.UndefinedFunction, pg.InvalidSchemaName, pg.InsufficientPrivilege)
    ):
        return SchemaError(
            f"A claim needs fenced_store in the lock's own database, and the right to use it: {said}. As its owner "
            "run: dblock fence setup, and for each role: dblock fence grant ROLE."
        )
    if isinstance(error, pg.InsufficientPrivilege):
        return AccessDenied(
            f"The database refused: {said}. To lock and unlock, a role needs what the schema's owner gives it by: "
            "dblock grant ROLE. To install, it needs CREATE on the database, or an empty schema of its own. "
            "All else is for the owner."
        )
    if isinstance(error, (pg.UndefinedFunction, pg.InvalidSchemaName, pg.UndefinedTable)):
        return SchemaMissing(schema)
    if isinstance(error, psycopg.DataError):
        return InvalidArgument(said)
    # A server that gives up in the middle, because its log cannot be written say, has not refused anything: what was
    # sent may have been done.
    ended = error.diag.severity_nonlocalized in ("FATAL", "PANIC")
    if ended or isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
        return Unavailable(f"The database could not be asked: {said.rstrip('.')}.")
    return DatabaseError(f"The database refused: {said}")


def is_broken(error: psycopg.Error) -> bool:
    """Tell whether the connection is gone, so that a fresh one is worth trying."""
    return isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)) and (
        error.sqlstate is None or isinstance(error, (pg.AdminShutdown, pg.CrashShutdown, pg.IdleSessionTimeout))
    )


def is_overdue(error: BaseException) -> bool:
    """Tell whether the answer did not come in time; the statement may still run."""
    return isinstance(error, Overdue)


def is_passing(error: psycopg.Error) -> bool:
    """Tell whether the same call may well succeed at once: two transactions got into each other's way."""
    return isinstance(error, (pg.SerializationFailure, pg.DeadlockDetected))
