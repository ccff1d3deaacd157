"""Draw the wait-for graph as SVG, without another program to lay it out.

Holders are at the left, their locks to the right of them, the waiters of those locks further right, and so on for
participants that hold and wait. Every box has its own row within its layer, so no boxes overlap. A wait that does not
lead to the next layer, such as the one that closes a cycle, is drawn below all boxes.

The picture has its own background, so it is readable on light and on dark pages. Long names are shortened in the
middle; the full name is in a title, which browsers show under the pointer.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field

from dblock._core.printing import duration, printable
from dblock.admin.graph.labels import lock_details, participant_name
from dblock.admin.graph.waits import Graph, roots

COLUMNS = 32
"""The number of columns of a name that are drawn, at most."""
CHARACTER = 7.9
"""The width of one column in the font's size."""
ROW, HEIGHT, GAP, MARGIN, LANE = 60.0, 44.0, 120.0, 36.0, 24.0

LABEL_OFFSETS = (-7, 15, -19, 27)
"""Vertical offsets of the labels beside a waiter's arrows, because it may wait for several locks."""

RED, LINE, INK, FAINT, PAPER = "#c62828", "#78909c", "#102a43", "#627d98", "#fdfdfb"
_STYLE = f"""
.name {{ font: 600 13px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: {INK}; }}
.small {{ font: 11px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: {FAINT}; }}
.beside {{ paint-order: stroke; stroke: {PAPER}; stroke-width: 4px; }}
.title {{ font: 600 15px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: {INK}; }}
.alarm {{ fill: {RED}; }}
.edge {{ fill: none; stroke: {LINE}; stroke-width: 1.6; }}
.wait {{ stroke-dasharray: 5 4; }}
.participant {{ fill: #e3f0fb; stroke: #7ba7cc; stroke-width: 1.4; }}
.lock {{ fill: #fff6df; stroke: #d9ac4e; stroke-width: 1.4; }}
.free {{ fill: #f4f6f8; stroke: #b6c2cd; stroke-dasharray: 4 3; }}
.stuck {{ stroke: {RED}; stroke-width: 2.4; }}
""".strip()

_PICTURE = 'role="img"'
_LINKED = 'role="group" aria-label="Wait-for graph"'
"""The roles of the drawing. A picture with links in it is no picture for a screen reader."""

Node = tuple[str, str]
"""A kind, `participant` or `lock`, and a name."""


@dataclass
class Box:
    """A node's rectangle."""

    layer: int
    row: float = 0.0
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    children: list[Node] = field(default_factory=list)


def svg(graph: Graph, link: Callable[[str], str] | None = None) -> str:
    """Return the graph as an SVG document.

    With `link` it is made for a page: it has no style of its own, and each lock links to what `link` returns.
    """
    boxes = layout(graph)
    top = MARGIN + 30 + 18 * len(graph.cycles)
    for box in boxes.values():
        box.y = top + box.row * ROW
    bottom = max((box.y + HEIGHT for box in boxes.values()), default=top)
    right = max((box.x + box.width for box in boxes.values()), default=320.0)
    edges, lanes = _edges(graph, boxes, bottom)
    bottom += LANE * lanes + (10 if lanes else 0)
    right += 28 if lanes else 0
    width, height = max(right + MARGIN, 460.0), bottom + 34 + MARGIN / 2
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" {_LINKED if link else _PICTURE}>',
        "<title>Wait-for graph</title>",
        *([] if link else [f"<style>{_STYLE}</style>"]),
        "<defs>",
        *(_arrow(identity, colour) for identity, colour in (("arrow", LINE), ("red", RED))),
        "</defs>",
        f'<rect class="paper" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="12" '
        f'fill="{PAPER}" stroke="#d5dde3"/>',
        *_heading(graph),
        *edges,
        *(_linked(_draw_box(graph, node, box), node, link) for node, box in boxes.items()),
        *_legend(bottom + 30),
        "</svg>",
    ]
    return "\n".join(drawn) + "\n"


def layout(graph: Graph) -> dict[Node, Box]:
    """Return each node's box: its layer is the distance from the left, its row depends on its children."""
    order, ahead = _in_order(graph)
    boxes = {node: Box(0 if node[0] == "participant" else 1) for node in order}
    parent: dict[Node, Node] = {}
    for node in order:
        for one in ahead[node]:
            if boxes[one].layer <= boxes[node].layer or one not in parent:
                boxes[one].layer = max(boxes[one].layer, boxes[node].layer + 1)
                parent[one] = node
    for node in order:
        if node in parent:
            boxes[parent[node]].children.append(node)
    _rows(boxes, [node for node in order if node not in parent])
    x = MARGIN
    for layer in range(max((box.layer for box in boxes.values()), default=-1) + 1):
        inside = {node: box for node, box in boxes.items() if box.layer == layer}
        for node, box in inside.items():
            texts = [shorten(name) for name in _texts(graph, node)]
            box.width = max(96.0, 28 + CHARACTER * max(display_width(text) for text in texts))
            box.x = x
        x += max((box.width for box in inside.values()), default=0.0) + (GAP if layer % 2 else GAP / 2)
    return boxes


def _in_order(graph: Graph) -> tuple[list[Node], dict[Node, list[Node]]]:
    """Return all nodes, each before its children, and each node's children, without the waits that close a cycle."""
    ahead: dict[Node, list[Node]] = {}
    finished: list[Node] = []
    under_way: set[Node] = set()
    # The order is reversed at the end, so everything is visited from its end.
    for participant, name in _start_nodes(graph):
        start: Node = ("lock", name) if participant is None else ("participant", participant)
        if start in ahead:
            continue
        ahead[start] = []
        under_way.add(start)
        path = [(start, iter(_children(graph, start)[::-1]))]
        while path:
            node, rest = path[-1]
            one = next(rest, None)
            if one is None:
                finished.append(node)
                under_way.discard(node)
                path.pop()
            elif one not in under_way:
                ahead[node].append(one)
                if one not in ahead:
                    ahead[one] = []
                    under_way.add(one)
                    path.append((one, iter(_children(graph, one)[::-1])))
    return finished[::-1], ahead


def _start_nodes(graph: Graph) -> list[tuple[str | None, str]]:
    """Return the start nodes from the last to the first, without those that an earlier one reaches."""
    begun: list[tuple[str | None, str]] = []
    reached: set[Node] = set()
    for participant, name in roots(graph):
        start: Node = ("lock", name) if participant is None else ("participant", participant)
        if start not in reached:
            begun.append((participant, name))
        todo = [start]
        while todo:
            node = todo.pop()
            if node not in reached:
                reached.add(node)
                todo += _children(graph, node)
    return begun[::-1]


def _children(graph: Graph, node: Node) -> list[Node]:
    kind, name = node
    if kind == "participant":
        return [("lock", one) for one in graph.holds.get(name, [])]
    return [
        ("participant", participant)
        for participant in dict.fromkeys(waiter.holder for waiter in graph.queues.get(name, []))
    ]


def _rows(boxes: dict[Node, Box], tops: list[Node]) -> None:
    """Assign rows: each tree has its own, and a box is in the middle of its children."""
    seen: list[Node] = []
    todo = tops[::-1]
    row = 0
    while todo:
        node = todo.pop()
        seen.append(node)
        todo += boxes[node].children[::-1]
        if not boxes[node].children:
            boxes[node].row = row
            row += 1
    for node in reversed(seen):
        if children := boxes[node].children:
            boxes[node].row = (boxes[children[0]].row + boxes[children[-1]].row) / 2


def _edges(graph: Graph, boxes: dict[Node, Box], bottom: float) -> tuple[list[str], int]:
    """Draw the arrows; return also the number that run below the boxes."""
    drawn: list[str] = []
    labels: list[str] = []
    lanes = 0
    labels_of: dict[str, int] = {}
    edge_of: dict[int, float] = {}
    for box in boxes.values():
        edge_of[box.layer] = max(edge_of.get(box.layer, 0.0), box.x + box.width)
    for participant, names in graph.holds.items():
        for name in names:
            holder, lock = boxes["participant", participant], boxes["lock", name]
            stuck = graph.is_stuck(lock=name)
            drawn.append(_curve(lock.x, lock.y, holder.x + holder.width, holder.y, "edge", stuck))
    for name, line in graph.queues.items():
        for waiter in line:
            waiter_box, lock = boxes["participant", waiter.holder], boxes["lock", name]
            stuck = graph.is_stuck(participant=waiter.holder, lock=name)
            label = f"{waiter.position}, for {duration(waiter.seconds)}"
            tip = lock.x + lock.width
            alone = sum(other.holder == waiter.holder for other in line) == 1
            labels_before = labels_of.get(waiter.holder, 0)
            if waiter_box.layer == lock.layer + 1 and alone and labels_before < len(LABEL_OFFSETS):
                labels_of[waiter.holder] = labels_before + 1
                drawn.append(_curve(waiter_box.x, waiter_box.y, tip, lock.y, "edge wait", stuck))
                beside = waiter_box.y + HEIGHT / 2 + LABEL_OFFSETS[labels_before]
                labels.append(_label(waiter_box.x - 12, beside, label, stuck, "end"))
                continue
            aside = 16 + 5 * (lanes % 4)
            lanes += 1
            y = bottom + LANE * lanes
            left, right = waiter_box.x - aside, edge_of[lock.layer] + aside
            start, end = waiter_box.y + HEIGHT / 2 + 6, lock.y + HEIGHT / 2 + 6
            turn = -8 if right < left else 8
            path = (
                f"M {waiter_box.x:.1f} {start:.1f} H {left + 8:.1f} q -8 0 -8 8 V {y - 8:.1f} q 0 8 {turn} 8 "
                f"H {right - turn:.1f} q {turn} 0 {turn} -8 V {end + 8:.1f} q 0 -8 -8 -8 H {tip + 7:.1f}"
            )
            drawn.append(_path(path, "edge wait", stuck))
            labels.append(_label((left + right) / 2, y - 5, label, stuck, "middle"))
    return drawn + labels, lanes


def _curve(x: float, y: float, to_x: float, to_y: float, style: str, stuck: bool) -> str:
    y, to_y, to_x = y + HEIGHT / 2, to_y + HEIGHT / 2, to_x + 7
    bend = (x - to_x) * 0.5
    path = f"M {x:.1f} {y:.1f} C {x - bend:.1f} {y:.1f} {to_x + bend:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
    return _path(path, style, stuck)


def _path(path: str, style: str, stuck: bool) -> str:
    how = f"{style} stuck" if stuck else style
    return f'<path class="{how}" marker-end="url(#{"red" if stuck else "arrow"})" d="{path}"/>'


def _label(x: float, y: float, label: str, stuck: bool, anchor: str) -> str:
    how = "small beside alarm" if stuck else "small beside"
    return f'<text class="{how}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape_xml(label)}</text>'


def _draw_box(graph: Graph, node: Node, box: Box) -> str:
    kind, name = node
    stuck = graph.is_stuck(participant=name) if kind == "participant" else graph.is_stuck(lock=name)
    how = kind if kind == "participant" or graph.locks[name].state != "free" else "lock free"
    texts = _texts(graph, node)
    middle = box.x + box.width / 2
    radius = HEIGHT / 2 if kind == "participant" else 7
    drawn = [
        f"<g><title>{escape_xml(', '.join(texts))}</title>",
        f'<rect class="{how}{" stuck" if stuck else ""}" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
        f'height="{HEIGHT:.0f}" rx="{radius:.0f}"/>',
    ]
    for text, style, lower in zip(texts, ("name", "small"), (26, 35) if len(texts) == 1 else (19, 35), strict=False):
        drawn.append(
            f'<text class="{style}" x="{middle:.1f}" y="{box.y + lower:.1f}" text-anchor="middle">'
            f"{escape_xml(shorten(text))}</text>"
        )
    return "".join([*drawn, "</g>"])


def _linked(drawn: str, node: Node, link: Callable[[str], str] | None) -> str:
    if link is None or node[0] != "lock":
        return drawn
    return f'<a href="{escape_xml(link(node[1]))}">{drawn}</a>'


def _texts(graph: Graph, node: Node) -> list[str]:
    kind, name = node
    return [participant_name(name)] if kind == "participant" else [printable(name), lock_details(graph.locks[name])]


def _heading(graph: Graph) -> list[str]:
    lines = [f'<text class="title" x="{MARGIN:.0f}" y="{MARGIN:.0f}">Wait-for graph</text>']
    for number, cycle in enumerate(graph.cycles, 1):
        names = ", ".join(shorten(participant_name(step.waiter)) for step in cycle[:3])
        more = f" and {len(cycle) - 3} more" if len(cycle) > 3 else ""
        label = f"Deadlock: these holders wait for each other: {names}{more}"
        lines.append(
            f'<text class="small alarm" x="{MARGIN:.0f}" y="{MARGIN + 3 + 18 * number:.0f}" font-weight="600">'
            f"{escape_xml(label)}</text>"
        )
    return lines


def _legend(y: float) -> list[str]:
    x = MARGIN
    drawn = []
    for style, label in (("edge", "is held by"), ("edge wait", "waits for, with its position in the queue")):
        drawn.append(_path(f"M {x:.1f} {y - 4:.1f} H {x + 26:.1f}", style, False))
        drawn.append(_label(x + 42, y, label, False, "start"))
        x += 56 + 6.2 * len(label) + 20
    return drawn


def _arrow(identity: str, colour: str) -> str:
    return (
        f'<marker id="{identity}" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="8" markerHeight="8" '
        f'markerUnits="userSpaceOnUse" orient="auto">'
        f'<path class="tip {identity}" d="M 0 0.5 L 8 4 L 0 7.5 z" fill="{colour}"/></marker>'
    )


def display_width(text: str) -> int:
    """Return the number of columns that text takes in a monospaced font."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def shorten(text: str, most: int = COLUMNS) -> str:
    """Return text that takes at most this many columns, with its middle cut out if it is longer."""
    if display_width(text) <= most:
        return text
    half = (most - 1) // 2
    head, tail = "", ""
    for character in text:
        if display_width(head + character) > half:
            break
        head += character
    for character in reversed(text):
        if display_width(character + tail) > half:
            break
        tail = character + tail
    return f"{head}…{tail}"


def escape_xml(text: str) -> str:
    """Return text escaped for XML; characters that XML does not allow become \\u escapes."""
    put = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    return "".join(
        character if character >= " " and character not in "\x7f\ufffe\uffff" else f"\\u{ord(character):04x}"
        for character in put
    )
