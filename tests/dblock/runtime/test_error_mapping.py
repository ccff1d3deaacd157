"""The mapping of psycopg errors to dblock errors where the SQLSTATE alone does not decide."""

from __future__ import annotations

import pytest
from psycopg import errors
from psycopg.pq import DiagnosticField

import dblock
from dblock._runtime.error_mapping import translate


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
