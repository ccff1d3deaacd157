"""Timelines: for any events, the drawing fits, is well-formed, and no texts overlap."""

from __future__ import annotations

import random
from itertools import combinations
from xml.etree import ElementTree

import pytest

from dblock.cli.demo.events import KINDS, Event
from dblock.cli.demo.timeline.lanes import ASLEEP, FROZEN, HELD, LEGEND, MARKS, WAITING, panels, states
from dblock.cli.demo.timeline.svg import RIGHT, SIGNS, WIDTH, render_svg
from dblock.cli.demo.timeline.text import FINE, MIN_WIDTH, PLAIN, STYLES, timeline

HOSTILE = "a<b>&\"'\x1b[2J\u202e\n]]></text><script>"
SVG = "{http://www.w3.org/2000/svg}"


def act(
    *told: tuple[float, str, str, int | None], title: str = "An act", sums: tuple[int, int] | None = None
) -> list[Event]:
    events = [
        Event(at, title, who, kind, "", number if kind in ("held", "frozen") else None, number)
        for at, who, kind, number in told
    ]
    if sums:
        events.append(Event(9.0, title, "", "sums", "the balance", None, *sums))
    return events


STORY = act(
    (1.0, "alice", "held", 4), (1.2, "alice", "read", 100), (1.4, "alice", "frozen", 4), (1.5, "bob", "waits", None),
    (3.0, "alice", "expired", 4), (3.01, "bob", "held", 5), (3.2, "bob", "read", 100), (3.4, "bob", "stored", 150),
    (3.6, "bob", "released", None), (4.0, "alice", "woken", None), (4.0, "alice", "corrupted", 130),
    sums=(130, 180),
)  # fmt: skip


def crowded(seed: int) -> list[Event]:
    """Return events in random order, many at the same time, of workers with odd names."""
    choose = random.Random(seed)
    names = ["alice", "bob", HOSTILE][: choose.randint(1, 3)]
    told = [
        (
            choose.choice([0.0, 1.0, choose.uniform(0, 5)]),
            choose.choice(names),
            choose.choice(sorted(KINDS)),
            10 ** choose.randint(0, 9),
        )
        for _ in range(choose.randint(1, 40))
    ]
    title = choose.choice(["An act", HOSTILE * 5])
    return act(*told, title=title, sums=choose.choice([None, (1, 1), (1, 2)])) + act(*told[:3], title="Another")


def test_lanes_show_holders_and_frozen_workers() -> None:
    (panel,) = panels(STORY)
    alice, bob = panel.lanes
    assert [(bar.state, bar.start, bar.end, bar.grant) for bar in alice.bars] == [
        (HELD, 1.0, 1.4, 1),
        (FROZEN, 1.4, 3.0, 1),
        (ASLEEP, 3.0, 4.0, None),
    ]
    assert [(bar.state, bar.start, bar.end, bar.grant) for bar in bob.bars] == [
        (WAITING, 1.5, 3.01, None),
        (HELD, 3.01, 3.6, 2),
    ]
    assert [(mark.kind, mark.label) for mark in alice.marks] == [("read", "reads 100"), ("corrupted", "writes 130")]
    assert panel.good is False


def test_killed_worker_holds_nothing() -> None:
    (panel,) = panels(act((1.0, "bob", "held", 1), (2.0, "bob", "killed", None), (3.0, "alice", "held", 2)))
    assert [(bar.start, bar.end) for bar in panel.lanes[1].bars] == [(1.0, 2.0)]


def test_every_state_and_mark_has_a_sign_and_a_legend() -> None:
    drawable = {*MARKS, HELD, FROZEN, ASLEEP, WAITING}
    assert drawable == set(LEGEND) == set(PLAIN) == set(FINE)
    assert drawable <= set(STYLES)
    assert set(MARKS) == set(SIGNS)
    assert set(MARKS) <= set(KINDS)
    assert len(set(PLAIN.values())) == len(PLAIN)


def test_story_is_drawn_as_text() -> None:
    lines = ["".join(text for text, _ in line).rstrip() for line in timeline(panels(STORY), 60)]
    assert lines[:9] == [
        "",
        "An act",
        "       1                2                3 s",
        "alice  =1=r===###########################~~~~~~~~~~~~~~~~~!",
        "          reads 100                               writes 130",
        "bob            ..........................=2=r===w==",
        "                                            reads 100",
        "                                                writes 150",
        "the balance",
    ]


@pytest.mark.parametrize("seed", range(40))
def test_text_fits_the_width_and_moves_no_cursor(seed: int) -> None:
    drawn = panels(crowded(seed))
    for width in (1, MIN_WIDTH, 80, 200):
        for line in timeline(drawn, width):
            text = "".join(piece for piece, _ in line).rstrip()
            assert len(text) <= max(width, MIN_WIDTH)
            assert text.isprintable()


@pytest.mark.parametrize("seed", range(40))
def test_picture_is_well_formed_and_no_texts_overlap(seed: int) -> None:
    picture = render_svg(panels(crowded(seed)))
    root = ElementTree.fromstring(picture)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        "svg", "title", "desc", "style", "defs", "pattern", "rect", "text", "line", "path", "g", "circle",
    }  # fmt: skip
    _nothing_overlaps(root)


def test_picture_names_the_workers_and_their_writes() -> None:
    root = ElementTree.fromstring(render_svg(panels(STORY)))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    for text in ("An act", "alice", "bob", "reads 100", "writes 130", "the balance", "frozen, its lease has expired"):
        assert text in texts
    _nothing_overlaps(root)


def test_picture_loads_nothing_from_outside() -> None:
    picture = render_svg(panels(STORY)).replace("http://www.w3.org/2000/svg", "")
    for outside in ("http", "@import", "<script", "<image", "href"):
        assert outside not in picture


def test_empty_timeline_can_be_drawn() -> None:
    assert timeline([], 80) == []
    ElementTree.fromstring(render_svg([]))
    assert states([]) == []


def _nothing_overlaps(root: ElementTree.Element) -> None:
    """Check the boxes of all texts, each as wide as in a usual font or somewhat wider."""
    boxes = []
    for element in root.iter(f"{SVG}text"):
        text, style = element.text or "", element.get("style", "")
        css = element.get("class", "")
        size = float(
            style.partition("font-size: ")[2].partition("px")[0] or {"title": 16, "on": 11, "in": 11}.get(css, 12)
        )
        width, x, y = len(text) * size * 0.58, float(element.get("x", 0)), float(element.get("y", 0))
        if element.get("text-anchor") == "middle":
            x -= width / 2
        boxes.append((x, y - size * 0.75, x + width, y + size * 0.2, text))
    height = float(root.get("height", 0))
    for left, top, right, bottom, text in boxes:
        assert left >= 0, text
        assert right <= WIDTH, text
        assert 0 <= top < bottom <= height, text
    for one, other in combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, (one, other)
    assert RIGHT < WIDTH
