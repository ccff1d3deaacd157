"""Write the wait-for graph in the languages of Mermaid and of Graphviz (DOT).

An arrow leads from a waiter to its lock, and from a lock to its holder. Names may hold any text, so in both languages
every name is escaped and cannot be taken for syntax.
"""

from __future__ import annotations

from dblock.admin.graph.labels import lock_details, participant_name
from dblock.admin.graph.waits import Graph
from dblock.cli.output import duration, printable

RED = "#c62828"
_SAFE = set(" .-:@/,")
"""Characters that Mermaid takes literally, besides letters and digits."""


def mermaid(graph: Graph) -> str:
    """Return the graph as a Mermaid flowchart, which GitHub renders."""
    participants, locks = _ids(graph)
    lines = ["flowchart RL"]
    for participant, identity in participants.items():
        lines.append(f'    {identity}(["{mermaid_text(participant_name(participant))}"])')
    for name, identity in locks.items():
        lines.append(
            f'    {identity}["{mermaid_text(printable(name))}<br/>{mermaid_text(lock_details(graph.locks[name]))}"]'
        )
    links: list[tuple[str, bool]] = []
    for name, identity in locks.items():
        for holder in graph.holders(name):
            links.append((f"    {identity} -->|held by| {participants[holder]}", graph.is_stuck(lock=name)))
        for waiter in graph.queues.get(name, []):
            label = mermaid_text(f"{waiter.position}, for {duration(waiter.seconds)}")
            stuck = graph.is_stuck(participant=waiter.holder, lock=name)
            links.append((f'    {participants[waiter.holder]} -.->|"{label}"| {identity}', stuck))
    lines += [link for link, _ in links]
    stuck_links = ",".join(str(number) for number, (_, stuck) in enumerate(links) if stuck)
    if stuck_links:
        nodes = [identity for participant, identity in participants.items() if graph.is_stuck(participant=participant)]
        nodes += [identity for name, identity in locks.items() if graph.is_stuck(lock=name)]
        lines.append(f"    linkStyle {stuck_links} stroke:{RED},stroke-width:3px")
        lines.append(f"    classDef stuck stroke:{RED},stroke-width:3px")
        lines.append(f"    class {','.join(nodes)} stuck")
    return "\n".join(lines) + "\n"


def mermaid_text(text: str) -> str:
    """Return text for a quoted label: characters that could be syntax become numeric entities."""
    put = []
    for here, after in zip(text, text[1:] + " ", strict=False):
        # "1. " and "- " would start a list.
        jsonable = here.isalnum() or (here in _SAFE and not (here in ".-" and after == " "))
        put.append(here if jsonable else f"#{ord(here)};")
    return "".join(put)


def dot(graph: Graph) -> str:
    """Return the graph in DOT."""
    participants, locks = _ids(graph)
    lines = [
        "digraph waits {",
        "    rankdir=RL",
        '    graph [bgcolor="white"]',
        '    node [fontname="monospace", fontsize=11, style="filled,rounded", shape=box, color="#90a4ae"]',
        '    edge [fontname="sans-serif", fontsize=9, color="#607d8b"]',
    ]
    for participant, identity in participants.items():
        red = f', color="{RED}", penwidth=2' if graph.is_stuck(participant=participant) else ""
        lines.append(f'    {identity} [label="{dot_text(participant_name(participant))}", fillcolor="#e3f2fd"{red}]')
    for name, identity in locks.items():
        red = f', color="{RED}", penwidth=2' if graph.is_stuck(lock=name) else ""
        label = f"{dot_text(printable(name))}\\n{dot_text(lock_details(graph.locks[name]))}"
        lines.append(f'    {identity} [label="{label}", fillcolor="#fff8e1", style="filled"{red}]')
    for name, identity in locks.items():
        for holder in graph.holders(name):
            red = f' [color="{RED}", penwidth=2]' if graph.is_stuck(lock=name) else ""
            lines.append(f"    {identity} -> {participants[holder]}{red}")
        for waiter in graph.queues.get(name, []):
            label = dot_text(f"{waiter.position}, for {duration(waiter.seconds)}")
            red = f', color="{RED}", penwidth=2' if graph.is_stuck(participant=waiter.holder, lock=name) else ""
            lines.append(f'    {participants[waiter.holder]} -> {identity} [label="{label}", style=dashed{red}]')
    return "\n".join([*lines, "}"]) + "\n"


def dot_text(text: str) -> str:
    """Return text for a quoted string: Graphviz interprets escapes with \\ and entities with &."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")


def _ids(graph: Graph) -> tuple[dict[str, str], dict[str, str]]:
    """Return an ID for each participant and each lock, because names would have to be escaped there too."""
    participants = {participant: f"p{number}" for number, participant in enumerate(graph.participants, 1)}
    locks = {name: f"l{number}" for number, name in enumerate(graph.locks, 1)}
    return participants, locks
