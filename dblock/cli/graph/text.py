"""The graph of who waits for whom as a tree of text, and what is said of circles.

A line is a list of parts, each with a style that a terminal may give it; joined they are plain text. Names are shown
escaped, so that no name can move the cursor or begin a line of its own.
"""

from __future__ import annotations

import shlex
from typing import NamedTuple

from dblock.admin.inspect import LockState, Waiter
from dblock.cli.graph.waits import Graph, holder_of, roots
from dblock.cli.output import seconds, shown


class Part(NamedTuple):
    """Some text of a line, and how it looks at a terminal."""

    text: str
    style: str = ""


Line = list[Part]

ALARM = "bold red"


def plain_text(lines: list[Line]) -> str:
    """Return lines as plain text."""
    return "".join("".join(part.text for part in line).rstrip() + "\n" for line in lines)


def name_of(who: str) -> str:
    """Return how a participant is called."""
    return shown(who) if who else "somebody without a name"


def about(lock: LockState) -> str:
    """Return what is to be said of a lock beside its name."""
    if lock.state == "free":
        return "free"
    said = f"token {lock.token}" if lock.token else "without durability"
    told = ", told to let go" if lock.state == "forced" else ""
    return f"{said}, {seconds(lock.remaining)} left{told}"


def circles(graph: Graph) -> list[Line]:
    """Say who waits for each other, and what helps; nothing where nobody does."""
    said: list[Line] = []
    for circle in graph.circles:
        said.append([Part("These wait for each other and none will go on:", ALARM)])
        for before, step in zip([circle[-1], *circle], circle, strict=False):
            has = Part(f" has {shown(before.lock)} and waits for {shown(step.lock)}")
            said.append([Part("  "), Part(name_of(step.waiter), ALARM), has])
        locks = [step.lock for step in circle if shown(step.lock) == step.lock]
        example = shlex.quote(locks[0]) if locks else "NAME"
        said.append(
            [Part("Their leases are renewed meanwhile, so this ends only when one of them gives up, or when a lock")]
        )
        said.append([Part("is taken from its holder: "), Part(f"dblock break {example}", "bold")])
        said.append([Part("(Where one name stands for several threads, they may go on all the same.)", "dim")])
        said.append([])
    return said


def tree(graph: Graph) -> list[Line]:
    """Draw a tree for each circle and for each holder that waits for no other: its locks, and their lines."""
    lines: list[Line] = []
    drawn: set[str] = set()
    for who, name in roots(graph):
        if who in drawn:
            continue
        if lines:
            lines.append([])
        if who is None:
            what = Part(shown(name), "bold")
            lines.append([Part("nobody", "dim"), Part("  holds "), what, Part(" at this moment")])
            lines += _line(graph, name, "", drawn)
            continue
        drawn.add(who)
        held = graph.holds[who]
        if len(held) == 1:
            lines.append([_who(graph, who), Part("  "), *_held(graph, held[0])])
            lines += _line(graph, held[0], "", drawn)
            continue
        lines.append([_who(graph, who)])
        for one in held:
            lines.append([Part("  "), *_held(graph, one)])
            lines += _line(graph, one, "  ", drawn)
    return lines


def _who(graph: Graph, who: str) -> Part:
    return Part(name_of(who), ALARM if graph.is_stuck(who=who) else "cyan")


def _held(graph: Graph, name: str) -> Line:
    lock = graph.locks[name]
    style = ALARM if graph.is_stuck(lock=name) else "bold"
    faint = "yellow" if lock.state == "forced" else "dim"
    return [Part("holds "), Part(shown(name), style), Part(f" ({about(lock)})", faint)]


def _line(graph: Graph, name: str, indent: str, drawn: set[str]) -> list[Line]:
    """Draw a lock's line, and beneath each who waits what it holds itself."""
    lines: list[Line] = []
    # What is still to be drawn, the next one last: so a chain of any length takes no recursion.
    todo: list[Line | tuple[str, Waiter, bool]] = [*_places(graph, name, indent)]
    while todo:
        one = todo.pop()
        if isinstance(one, list):
            lines.append(one)
            continue
        before, place, last = one
        number = f"{place.position}  "
        below = before + ("   " if last else "│  ") + " " * len(number)
        again = place.holder in drawn and place.holder in graph.holds
        itself = holder_of(graph.locks[place.name]) == place.holder
        said: Line = [Part(before + ("└─ " if last else "├─ "), "dim"), Part(number), _who(graph, place.holder)]
        said.append(Part(f", for {seconds(place.seconds)}", "dim"))
        if itself:
            said.append(Part(" (it holds it itself, perhaps in another thread)", "dim"))
        elif again:
            said.append(Part(" (drawn above)", "dim"))
        lines.append(said)
        if not again:
            drawn.add(place.holder)
            deeper: list[Line | tuple[str, Waiter, bool]] = []
            for held in graph.holds.get(place.holder, []):
                deeper.append([Part(below, "dim"), *_held(graph, held)])
                deeper += reversed(_places(graph, held, below))
            todo += reversed(deeper)
    return lines


def _places(graph: Graph, name: str, indent: str) -> list[tuple[str, Waiter, bool]]:
    line = graph.lines.get(name, [])
    return [(indent, place, place is line[-1]) for place in reversed(line)]
