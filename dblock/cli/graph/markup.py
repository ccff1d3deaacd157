"""The graph of who waits for whom in the languages of other programs that draw: Mermaid and Graphviz's DOT.

An arrow leads from who waits to what it waits for, and from a lock to its holder. Names are anybody's text: in both
languages each is put so that it stands for itself and nothing else, whatever it holds.
"""

from __future__ import annotations

from dblock.cli.graph.text import about, name_of
from dblock.cli.graph.waits import Graph, holder_of
from dblock.cli.output import seconds, shown

RED = "#c62828"
_SAFE = set(" .-:@/,")
"""What Mermaid takes for itself, besides letters and digits."""


def mermaid(graph: Graph) -> str:
    """Return the graph as a Mermaid flowchart, as GitHub and others draw it."""
    people, locks = _ids(graph)
    lines = ["flowchart RL"]
    for who, identity in people.items():
        lines.append(f'    {identity}(["{mermaid_text(name_of(who))}"])')
    for name, identity in locks.items():
        lines.append(f'    {identity}["{mermaid_text(shown(name))}<br/>{mermaid_text(about(graph.locks[name]))}"]')
    links: list[tuple[str, bool]] = []
    for name, identity in locks.items():
        if (holder := holder_of(graph.locks[name])) is not None:
            links.append((f"    {identity} -->|held by| {people[holder]}", graph.is_stuck(lock=name)))
        for place in graph.lines.get(name, []):
            said = mermaid_text(f"{place.position}, for {seconds(place.seconds)}")
            stuck = graph.is_stuck(who=place.holder, lock=name)
            links.append((f'    {people[place.holder]} -.->|"{said}"| {identity}', stuck))
    lines += [link for link, _ in links]
    stuck_links = ",".join(str(number) for number, (_, stuck) in enumerate(links) if stuck)
    if stuck_links:
        nodes = [identity for who, identity in people.items() if graph.is_stuck(who=who)]
        nodes += [identity for name, identity in locks.items() if graph.is_stuck(lock=name)]
        lines.append(f"    linkStyle {stuck_links} stroke:{RED},stroke-width:3px")
        lines.append(f"    classDef stuck stroke:{RED},stroke-width:3px")
        lines.append(f"    class {','.join(nodes)} stuck")
    return "\n".join(lines) + "\n"


def mermaid_text(text: str) -> str:
    """Return text as it may stand between a label's quotes: what could mean something is given by its number."""
    put = []
    for here, after in zip(text, text[1:] + " ", strict=False):
        # "1. " and "- " would begin a list.
        plain = here.isalnum() or (here in _SAFE and not (here in ".-" and after == " "))
        put.append(here if plain else f"#{ord(here)};")
    return "".join(put)


def dot(graph: Graph) -> str:
    """Return the graph in the language of Graphviz."""
    people, locks = _ids(graph)
    lines = [
        "digraph waits {",
        "    rankdir=RL",
        '    graph [bgcolor="white"]',
        '    node [fontname="monospace", fontsize=11, style="filled,rounded", shape=box, color="#90a4ae"]',
        '    edge [fontname="sans-serif", fontsize=9, color="#607d8b"]',
    ]
    for who, identity in people.items():
        red = f', color="{RED}", penwidth=2' if graph.is_stuck(who=who) else ""
        lines.append(f'    {identity} [label="{dot_text(name_of(who))}", fillcolor="#e3f2fd"{red}]')
    for name, identity in locks.items():
        red = f', color="{RED}", penwidth=2' if graph.is_stuck(lock=name) else ""
        label = f"{dot_text(shown(name))}\\n{dot_text(about(graph.locks[name]))}"
        lines.append(f'    {identity} [label="{label}", fillcolor="#fff8e1", style="filled"{red}]')
    for name, identity in locks.items():
        if (holder := holder_of(graph.locks[name])) is not None:
            red = f' [color="{RED}", penwidth=2]' if graph.is_stuck(lock=name) else ""
            lines.append(f"    {identity} -> {people[holder]}{red}")
        for place in graph.lines.get(name, []):
            said = dot_text(f"{place.position}, for {seconds(place.seconds)}")
            red = f', color="{RED}", penwidth=2' if graph.is_stuck(who=place.holder, lock=name) else ""
            lines.append(f'    {people[place.holder]} -> {identity} [label="{said}", style=dashed{red}]')
    return "\n".join([*lines, "}"]) + "\n"


def dot_text(text: str) -> str:
    """Return text as it may stand between quotes: Graphviz knows escapes by \\ and entities by &."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")


def _ids(graph: Graph) -> tuple[dict[str, str], dict[str, str]]:
    """Return an identity for each participant and each lock: names would have to be escaped there too."""
    people = {who: f"p{number}" for number, who in enumerate(graph.participants, 1)}
    locks = {name: f"l{number}" for number, name in enumerate(graph.locks, 1)}
    return people, locks
