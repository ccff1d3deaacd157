"""The mapping of psycopg errors to dblock errors where the SQLSTATE alone does not decide."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import errors
from psycopg.pq import DiagnosticField

import dblock
from dblock._core.listener_failures import ServerState
from dblock._runtime.error_mapping import server_states, translate


def internal_error(severity: bytes) -> errors.InternalError_:
    fields = {
        DiagnosticField.SEVERITY_NONLOCALIZED: severity,
        DiagnosticField.MESSAGE_PRIMARY: b"could not write to log",
    }
    return errors.InternalError_("could not write to log", info=fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("severity", [b"PANIC", b"FATAL"])
def test_server_that_gives_up_midway_leaves_the_outcome_unknown(severity: bytes) -> None:
    assert type(translate(internal_error(severity), "dblock")) is dblock.Unavailable


def test_message_that_ends_in_a_question_gets_no_full_stop() -> None:
    asked = errors.OperationalError("connection failed\nIs the server running?")
    assert str(translate(asked, "dblock")).endswith("Is the server running?")
    assert str(translate(errors.OperationalError("cut"), "dblock")).endswith(": cut.")


def test_statement_refused_by_a_running_server_is_refused() -> None:
    assert type(translate(internal_error(b"ERROR"), "dblock")) is dblock.DatabaseError


@pytest.mark.parametrize(
    ("message", "states"),
    [
        (
            "Multiple connection attempts failed. All failures were:\n"
            "- host: 'db', port: '5432', hostaddr: '10.0.0.1': connection failed: "
            'connection to server at "10.0.0.1", port 5432 failed: FATAL:  role "app" is not permitted to log in\n'
            "- host: 'db', port: '5432', hostaddr: '10.0.0.2': connection failed: "
            'connection to server at "10.0.0.2", port 5432 failed: FATAL:  the database system is starting up',
            {"10.0.0.2:5432": ServerState.STARTING},
        ),
        (
            'connection to server at "localhost" (::1), port 5433 failed: Connection refused\n\tIs it running?\n'
            'connection to server at "localhost" (127.0.0.1), port 5433 failed: '
            "FATAL:  the database system is shutting down",
            {"127.0.0.1:5433": ServerState.SHUTTING_DOWN},
        ),
        (
            'connection to server on socket "/tmp/.s.PGSQL.5432" failed: '
            "FATAL:  the database system is in recovery mode",
            {"/tmp/.s.PGSQL.5432": ServerState.STARTING},
        ),
        ("FATAL:  the database system is starting up", {}),
    ],
)
def test_state_of_a_server_is_known_by_its_address(message: str, states: dict[str, ServerState]) -> None:
    assert server_states(psycopg.OperationalError(message)) == states


REFUSES = "FATAL:  password authentication failed for user"
AWAY = "Connection refused"
STARTS = "FATAL:  the database system is starting up"
FULL = "FATAL:  too many connections for role"


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (("a", REFUSES), ("b", REFUSES), dblock.LoginRefused),
        (("a", REFUSES), ("b", AWAY), dblock.Unavailable),
        (("a", STARTS), ("b", REFUSES), dblock.Unavailable),
        (("a", REFUSES), ("a", AWAY), dblock.LoginRefused),
        (("a", REFUSES), ("a", FULL), dblock.Unavailable),
    ],
)
def test_login_is_refused_only_if_every_host_refuses_it(
    first: tuple[str, str], second: tuple[str, str], kind: type[dblock.DblockError]
) -> None:
    """A host's name may stand for several addresses. A server that listens at one of them is not away."""
    lines = [
        f"- host: '{host}', port: '5432', hostaddr: '10.0.0.{number}': connection failed: {said}"
        for number, (host, said) in enumerate((first, second))
    ]
    text = f"connection failed: {second[1]}\nMultiple connection attempts failed. All failures were:\n"
    assert type(translate(psycopg.OperationalError(text + "\n".join(lines)), "dblock")) is kind
