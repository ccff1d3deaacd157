"""Draw the wait-for graph as a tree of text, and warn of its cycles.

A line is a list of parts, each with a style for the terminal. Joined, the parts are plain text. Names are escaped, so
that no name can move the cursor or start a new line.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, NamedTuple

from dblock.admin.graph.labels import lock_details, participant_name
from dblock.admin.graph.waits import Graph, roots
from dblock.cli.output import duration, printable

if TYPE_CHECKING:
    from dblock.admin.inspect import Wait, Waiter


class Part(NamedTuple):
    """A piece of a line with its style at a terminal."""

    text: str
    style: str = ""


Line = list[Part]

ALARM = "bold red"


def plain_text(lines: list[Line]) -> str:
    """Return lines as plain text."""
    return "".join("".join(part.text for part in line).rstrip() + "\n" for line in lines)


def cycle_warnings(graph: Graph) -> list[Line]:
    """Return a warning for each cycle: its participants, and how to end the deadlock."""
    lines = _deadlocks(graph)
    for cycle in graph.cycles:
        if graph.found_by_the_database.issuperset(cycle):
            continue
        lines.append([Part("Deadlock: these holders wait for each other.", ALARM)])
        for before, step in zip([cycle[-1], *cycle], cycle, strict=False):
            wait = Part(f" holds {printable(before.lock)} and waits for {printable(step.lock)}")
            lines.append([Part("  "), Part(participant_name(step.waiter), ALARM), wait])
        locks = [step.lock for step in cycle if printable(step.lock) == step.lock]
        example = shlex.quote(locks[0]) if locks else "NAME"
        lines.append(
            [Part("Their leases are renewed, so this ends only when one of them stops waiting, or when you take")]
        )
        lines.append([Part("a lock from its holder: "), Part(f"dblock force-release {example}", "bold")])
        lines.append([Part("(If threads of one process share a name, this may be a false alarm.)", "dim")])
        lines.append([])
    return lines


def _deadlocks(graph: Graph) -> list[Line]:
    """Describe the deadlocks that the database has found, and the other waits between sessions."""
    lines: list[Line] = []
    for deadlock in graph.deadlocks:
        lines.append([Part("Deadlock: each of these waits for the next. dblock ends one of the waits.", ALARM)])
        lines += [_wait_line(wait, ALARM) for wait in deadlock]
        lines.append([])
    others = [wait for wait in graph.session_waits if wait.cycle is None]
    if others:
        lines.append([Part("Sessions that work under a lease and wait for another session:")])
        lines += [_wait_line(wait, "cyan") for wait in others]
        lines.append([])
    return lines


def _wait_line(wait: Wait, style: str) -> Line:
    holder = participant_name(wait.holder or "")
    under = f" under token {wait.token}" if wait.token else ""
    if wait.lock is not None:
        text = f" waits for {printable(wait.lock)}, which {holder} holds{under}"
    else:
        text = f" waits in session {wait.session} for session {wait.blocker}"
        if wait.holder != f"session {wait.blocker}":  # which is not bound to a lease
            text += f", in which {holder} works{under}"
    return [Part("  "), Part(participant_name(wait.waiter), style), Part(text)]


def wait_tree(graph: Graph) -> list[Line]:
    """Draw a tree for each cycle and for each holder that waits for no other: its locks and their queues."""
    lines: list[Line] = []
    drawn: set[str] = set()
    for participant, name in roots(graph):
        if participant in drawn:
            continue
        if lines:
            lines.append([])
        if participant is None:
            lock = Part(printable(name), "bold")
            lines.append([Part("free", "dim"), Part("  "), lock])
            lines += _queue_lines(graph, name, "", drawn)
            continue
        drawn.add(participant)
        held = graph.holds[participant]
        if len(held) == 1:
            lines.append([_participant_part(graph, participant), Part("  "), *_held_part(graph, held[0])])
            lines += _queue_lines(graph, held[0], "", drawn)
            continue
        lines.append([_participant_part(graph, participant)])
        for held_name in held:
            lines.append([Part("  "), *_held_part(graph, held_name)])
            lines += _queue_lines(graph, held_name, "  ", drawn)
    return lines


def _participant_part(graph: Graph, participant: str) -> Part:
    return Part(participant_name(participant), ALARM if graph.is_stuck(participant=participant) else "cyan")


def _held_part(graph: Graph, name: str) -> Line:
    lock = graph.locks[name]
    style = ALARM if graph.is_stuck(lock=name) else "bold"
    faint = "yellow" if lock.state == "forced" else "dim"
    return [Part("holds "), Part(printable(name), style), Part(f" ({lock_details(lock)})", faint)]


def _queue_lines(graph: Graph, name: str, indent: str, drawn: set[str]) -> list[Line]:
    """Draw a lock's queue, and below each waiter the locks that it holds."""
    lines: list[Line] = []
    # A stack instead of recursion, so that a chain may have any length.
    stack: list[Line | tuple[str, Waiter, bool]] = [*_queue_entries(graph, name, indent)]
    while stack:
        entry = stack.pop()
        if isinstance(entry, list):
            lines.append(entry)
            continue
        before, waiter, last = entry
        number = f"{waiter.position}  "
        below = before + ("   " if last else "│  ") + " " * len(number)
        again = waiter.holder in drawn and waiter.holder in graph.holds
        itself = waiter.holder in graph.holders(waiter.name)
        drawn_line: Line = [
            Part(before + ("└─ " if last else "├─ "), "dim"),
            Part(number),
            _participant_part(graph, waiter.holder),
        ]
        drawn_line.append(Part(f", for {duration(waiter.seconds)}", "dim"))
        if itself:
            drawn_line.append(Part(" (holds this lock itself, perhaps in another thread)", "dim"))
        elif again:
            drawn_line.append(Part(" (drawn above)", "dim"))
        lines.append(drawn_line)
        if not again:
            drawn.add(waiter.holder)
            deeper: list[Line | tuple[str, Waiter, bool]] = []
            for held in graph.holds.get(waiter.holder, []):
                deeper.append([Part(below, "dim"), *_held_part(graph, held)])
                deeper += reversed(_queue_entries(graph, held, below))
            stack += reversed(deeper)
    return lines


def _queue_entries(graph: Graph, name: str, indent: str) -> list[tuple[str, Waiter, bool]]:
    queue = graph.queues.get(name, [])
    return [(indent, waiter, waiter is queue[-1]) for waiter in reversed(queue)]
