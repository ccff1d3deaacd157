"""Refuse an env.py whose connection is in a transaction already, and name the line that began it.

Alembic leaves a transaction that it finds at `configure` to env.py. A statement before `configure` begins one without
saying so. No code commits that transaction, and the migrations would be rolled back silently. A transaction that env.py
begins itself (`engine.begin()`) is committed by env.py, and works as long as no statement has been sent: this replica
would otherwise wait for the others while it holds locks.
"""

from __future__ import annotations

import ast
import linecache
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from dblock.errors import InvalidArgument
from dblock.integrations.alembic.drivers import is_autocommit, is_in_transaction

SENDING = {"execute", "exec_driver_sql", "scalar", "scalars", "create_all", "reflect", "inspect"}
"""Calls that send a statement."""

FOLDER = str(Path(__file__).parent)


def check_style(migrations: Any) -> None:
    """Raise InvalidArgument if statements have been sent in a transaction that is still open."""
    connection = migrations.connection
    if not connection.in_transaction() or is_autocommit(connection) or not is_in_transaction(connection):
        return
    where = _line_to_move()
    external = migrations._in_external_transaction
    result = (
        "Alembic does not commit a transaction that has begun before context.configure(), so the migrations would be "
        "rolled back silently"
        if external
        else "That transaction would stay open while this replica waits for the others"
    )
    raise InvalidArgument(
        f"Nothing was migrated: Alembic's connection was in a transaction before migration_gate. {result}. "
        f"Move {where} into `with context.begin_transaction():`, or call connection.commit() after it."
    )


def _line_to_move() -> str:
    """Return the statement of env.py that has begun the transaction, as far as its source shows it."""
    frames = _frames()
    if not frames:
        return "the statement that began it"
    file = frames[0].f_code.co_filename
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        tree = ast.Module([], [])
    lines = [line for frame in frames for line in _sent_before(tree, frame)]
    if not lines:
        return f"the statement that began it, before line {frames[0].f_lineno} of {file} runs,"
    return f"line {lines[0]} of {file} (`{linecache.getline(file, lines[0]).strip()}`)"


def _sent_before(tree: ast.Module, frame: FrameType) -> list[int]:
    """Return the lines of a function, up to where it is now, that send statements."""
    first, here = frame.f_code.co_firstlineno, frame.f_lineno
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) in SENDING]
    inner = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.lineno > first
    ]
    found = (call.lineno for call in calls if first <= call.lineno < here)
    return sorted(line for line in found if not any(line in lines for lines in inner))


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _frames() -> list[FrameType]:
    """Return the frames of env.py, the innermost first."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        is_ours = file.startswith(FOLDER) or Path(file).name == "contextlib.py"
        if not is_ours and (not frames or file == frames[0].f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    return frames
