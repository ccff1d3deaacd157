"""The wait-for graph and its drawings, built from given locks and waiters without a database."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest

from dblock.admin.graph.svg import HEIGHT, layout, shorten, svg
from dblock.admin.graph.waits import Graph, Step, build_graph, graph_data, name_matcher, select
from dblock.cli.graph.markup import dot, mermaid
from dblock.cli.graph.text import cycle_warnings, plain_text, wait_tree
from tests.support.machine import soon
from tests.support.records import free_lock, held_lock, waiter

HOSTILE = [
    'say "hi"', "<b>bold</b>", "a&b &amp; &#60;", "back`tick`", "pi|pe", "new\nline\r\x1b[2J", "back\\slash \\n \\N",
    "]) --> evil[(", "} evil -> {", "-- end", "1. one", "- two", "# x;y", "\u202eturned", "\x00\x07\ufffe\uffff",
    "%%{x}%%", "'; DROP", "]]>", "<!--", "", "日本" * 40, "e\u0301" * 300, "x" * 512,
]  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


def cycle(*participants: str) -> Graph:
    """Return a graph in which each participant waits for the lock of the next."""
    locks = [held_lock(f"lock of {one}", one, number) for number, one in enumerate(participants, 1)]
    waits = zip(participants, participants[1:] + participants[:1], strict=True)
    return build_graph(locks, [waiter(f"lock of {after}", 1, one) for one, after in waits])


def test_shared_lock_has_several_holders_and_its_shares_are_no_locks() -> None:
    """A writer waits for every reader. A semaphore with several holders is in no cycle: any of them may release."""
    head = replace(free_lock("rw"), kind="read-write", held=2)
    readers = [replace(held_lock(f"rw#reader-{one}", who, one), kind="reader", head="rw") for one, who in
               enumerate(("ann", "bob"), 1)]  # fmt: skip
    graph = build_graph([head, *readers, held_lock("a", "carol")], [waiter("rw", 1, "carol"), waiter("a", 1, "bob")])
    assert list(graph.locks) == ["a", "rw"]
    assert graph.holders("rw") == ["ann", "bob"]
    assert graph.cycles == [[Step("bob", "a", "carol"), Step("carol", "rw", "bob")]]
    drawn = plain_text(wait_tree(select(graph, "rw")))
    assert "ann  holds rw (read-write, 2 holders)" in drawn
    assert mermaid(graph).count("held by") == 3
    assert dot(graph)
    assert svg(graph)
    permits = [replace(one, name=f"s#{one.number}", kind="permit", head="s") for one in readers]
    some = replace(free_lock("s"), kind="semaphore", permits=2, held=2)
    waits = [waiter("s", 1, "carol"), waiter("a", 1, "bob")]
    assert build_graph([some, *permits, held_lock("a", "carol")], waits).cycles == []
    one_left = replace(some, permits=1, held=1)
    assert build_graph([one_left, permits[1], held_lock("a", "carol")], waits).cycles


def test_holder_that_waits_is_one_participant() -> None:
    graph = build_graph(
        [held_lock("a", "ann"), held_lock("b", "bob")], [waiter("a", 1, "bob"), waiter("b", 1, "carol")]
    )
    assert graph.participants == ["ann", "bob", "carol"]
    assert graph.cycles == []
    found = graph_data(graph)
    assert [one["id"] for one in found["nodes"]] == [
        "participant:ann", "participant:bob", "participant:carol", "lock:a", "lock:b",
    ]  # fmt: skip
    assert {(one["kind"], one["from"], one["to"]) for one in found["edges"]} == {
        ("holds", "participant:ann", "lock:a"),
        ("holds", "participant:bob", "lock:b"),
        ("waits", "participant:bob", "lock:a"),
        ("waits", "participant:carol", "lock:b"),
    }


def test_cycle_is_found_and_described_in_order() -> None:
    graph = cycle("ann", "bob", "carol")
    assert graph.cycles == [
        [
            Step("ann", "lock of bob", "bob"),
            Step("bob", "lock of carol", "carol"),
            Step("carol", "lock of ann", "ann"),
        ]
    ]
    said = plain_text(cycle_warnings(graph))
    assert said.startswith("Deadlock: these holders wait for each other.\n  ann holds lock of ann and waits for")
    assert "dblock force-release 'lock of bob'" in said


def test_touching_cycles_are_found_without_their_outside_waiters() -> None:
    """Ann is in two cycles. Dora waits for ann and holds a lock without waiters. Erik waits for none of them."""
    locks = [
        held_lock("a", "ann"),
        held_lock("b", "bob"),
        held_lock("c", "carol"),
        held_lock("d", "dora"),
        held_lock("e", "erik"),
    ]
    waits = [("a", "bob"), ("b", "ann"), ("a", "carol"), ("c", "ann"), ("a", "dora"), ("e", "ann"), ("e", "fay")]
    graph = build_graph(locks, [waiter(name, 1, participant) for name, participant in waits])
    stuck = {participant for participant in graph.participants if graph.is_stuck(participant=participant)}
    assert stuck == {"ann", "bob", "carol"}
    assert len(graph.cycles) == 2
    assert graph.is_stuck(participant="bob", lock="a")
    assert not graph.is_stuck(participant="dora", lock="a")
    assert not graph.is_stuck(lock="e")


def test_wait_for_a_lock_held_by_the_waiter_is_no_cycle() -> None:
    graph = build_graph([held_lock("a", "ann")], [waiter("a", 1, "ann"), waiter("a", 2, "bob")])
    assert graph.cycles == []
    assert "ann, for 1.0 s (holds this lock itself, perhaps in another thread)" in plain_text(wait_tree(graph))


def test_expired_lock_is_free_although_its_row_names_a_holder() -> None:
    graph = build_graph(
        [held_lock("a", "ann", left=0.0), held_lock("b", "bob")], [waiter("a", 1, "bob"), waiter("b", 1, "ann")]
    )
    assert graph.cycles == []
    assert "free  a" in plain_text(wait_tree(graph))


def test_tree_shows_holders_and_queues() -> None:
    locks = [held_lock("invoice:42", "ann@web-1:812", 7, 12.3), held_lock("report", "bob@web-2:99", 9, 5)]
    queue = [
        waiter("invoice:42", 1, "bob@web-2:99", 3.1),
        waiter("report", 1, "carol", 2),
        waiter("report", 2, "erik", 1.5),
        waiter("invoice:42", 2, "dave", 0.4),
    ]
    assert plain_text(wait_tree(build_graph(locks, queue))) == (
        "ann@web-1:812  holds invoice:42 (token 7, 12.3 s left)\n"
        "├─ 1  bob@web-2:99, for 3.1 s\n"
        "│     holds report (token 9, 5.0 s left)\n"
        "│     ├─ 1  carol, for 2.0 s\n"
        "│     └─ 2  erik, for 1.5 s\n"
        "└─ 2  dave, for 400 ms\n"
    )


def test_tree_shows_each_holding_once() -> None:
    """In cycles, behind them, with several locks, with free ones: each holding is drawn exactly once."""
    graph = build_graph(
        [held_lock("a", "ann"), held_lock("b", "bob"), held_lock("c", "ann"), held_lock("d", "dora"),
         held_lock("e", "erik"), free_lock("f")],
        [waiter("a", 1, "bob"), waiter("b", 1, "ann"), waiter("b", 2, "dora"), waiter("c", 1, "dora"),
         waiter("d", 1, "x"), waiter("f", 1, "erik"), waiter("e", 1, "y")],
    )  # fmt: skip
    text = plain_text(wait_tree(graph))
    for name in "abcde":
        assert text.count(f"holds {name} (") == 1, text
    assert text.count("free  f") == 1
    assert len(re.findall(r"─ \d", text)) == 7, text


def test_pattern_selects_locks_and_everything_connected() -> None:
    locks = [
        held_lock("a", "ann"),
        held_lock("b", "bob"),
        held_lock("z", "zoe"),
        held_lock("idle", "ann"),
        held_lock("lone", "bob"),
    ]
    graph = build_graph(locks, [waiter("a", 1, "bob"), waiter("z", 1, "x")])
    assert set(select(graph).locks) == {"a", "b", "z", "lone"}  # lone is held by bob, a waiter
    assert set(select(graph, "a").locks) == {"a", "b", "lone"}
    assert set(select(graph, "i*").locks) == set()
    assert set(select(graph, "idl?", every=True).locks) == {"a", "b", "lone", "idle"}
    assert set(select(graph, every=True).locks) == {lock.name for lock in locks}
    assert set(select(graph, "[ab]").locks) == set()


@pytest.mark.second_stage
def test_chain_of_1500_waits_is_drawn() -> None:
    number = 1500
    locks = [held_lock(f"l{one:04}", f"p{one:04}") for one in range(number)]
    graph = build_graph(locks, [waiter(f"l{one:04}", 1, f"p{one + 1:04}") for one in range(number)])
    assert len(wait_tree(graph)) == 2 * number
    boxes = layout(select(graph))
    assert boxes["participant", f"p{number:04}"].layer == 2 * number
    ElementTree.fromstring(svg(graph))


def hostile() -> Graph:
    locks = [held_lock(name, f"holder {name}", number) for number, name in enumerate(HOSTILE, 1)]
    locks.append(held_lock("plain", HOSTILE[0], 99))
    return build_graph(
        locks, [waiter(name, 1, f"waiter {name}") for name in HOSTILE] + [waiter(HOSTILE[1], 2, HOSTILE[0])]
    )


def test_hostile_names_add_no_lines() -> None:
    graph = hostile()
    text = plain_text(cycle_warnings(graph) + wait_tree(graph))
    for drawing in (text, mermaid(graph), dot(graph), svg(graph)):
        assert not set(drawing) & set("\x00\x07\r\x1b\u202e")
    # One line for each lock and for each waiter, and empty lines between the trees.
    waiters = sum(len(line) for line in graph.queues.values())
    assert len([line for line in text.splitlines() if line]) == len(graph.locks) + waiters


def test_svg_with_hostile_names_is_xml_with_full_titles() -> None:
    graph = hostile()
    root = ElementTree.fromstring(svg(graph))
    assert root.tag == f"{SVG}svg"
    assert {element.tag for element in root.iter()} <= {
        SVG + tag for tag in ("svg", "title", "style", "defs", "marker", "path", "rect", "text", "g")
    }
    titles = [element.text for element in root.iter(f"{SVG}title")]
    assert f"holder {HOSTILE[1]}" in titles
    assert f"holder {'x' * 512}" in titles
    drawn = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert max(map(len, drawn)) < 200
    # The first element is the background, as large as the picture.
    background = next(iter(root.iter(f"{SVG}rect")))
    assert background.get("fill") == "#fdfdfb"
    assert abs(float(background.get("width", "0")) - float(root.get("width", "0"))) <= 1


@pytest.mark.parametrize(
    "graph",
    [
        hostile(),
        cycle("ann", "bob"),
        cycle("a", "b", "c", "d"),
        build_graph(
            [held_lock("a", "ann"), held_lock("b", "bob"), held_lock("c", "ann"), held_lock("d", "dora"),
             free_lock("f")],
            [waiter("a", 1, "bob"), waiter("b", 1, "dora"), waiter("c", 1, "dora"), waiter("d", 1, "x"),
             waiter("f", 1, "x"), waiter("a", 2, "bob"), waiter("a", 3, "y")],
        ),
    ],
)  # fmt: skip
def test_svg_boxes_do_not_overlap_and_layers_go_right(graph: Graph) -> None:
    boxes = layout(graph)
    assert len(boxes) == len(graph.participants) + len(graph.locks)
    root = ElementTree.fromstring(svg(graph))
    rects = [
        tuple(float(rect.get(key, "nan")) for key in ("x", "y", "width", "height"))
        for group in root.iter(f"{SVG}g")
        for rect in group.iter(f"{SVG}rect")
    ]
    assert len(rects) == len(boxes)
    for (x, y, width, height), (other_x, other_y, other_width, other_height) in combinations(rects, 2):
        beside = x + width <= other_x or other_x + other_width <= x
        above = y + height <= other_y or other_y + other_height <= y
        assert beside or above
    for x, y, width, height in rects:
        assert x + width <= float(root.get("width", "0"))
        assert y + height <= float(root.get("height", "0"))
        assert height == HEIGHT
    for participant, names in graph.holds.items():
        for name in names:
            assert boxes["lock", name].layer == boxes["participant", participant].layer + 1
    for name, line in graph.queues.items():
        for one in line:
            closes = boxes["participant", one.holder].layer < boxes["lock", name].layer
            assert not closes or graph.is_stuck(participant=one.holder, lock=name)


def test_cycle_is_red_in_every_picture() -> None:
    stuck, fine = cycle("ann", "bob"), build_graph([held_lock("a", "ann")], [waiter("a", 1, "bob")])
    root = ElementTree.fromstring(svg(stuck))
    assert sum("stuck" in (path.get("class") or "") for path in root.iter(f"{SVG}path")) == 4
    assert sum("stuck" in (rect.get("class") or "") for rect in root.iter(f"{SVG}rect")) == 4
    assert "these holders wait for each other" in svg(stuck)
    assert "linkStyle 0,1,2,3 stroke:#c62828" in mermaid(stuck)
    assert dot(stuck).count('color="#c62828"') == 8
    for drawing in (mermaid(fine), dot(fine)):
        assert "c62828" not in drawing
    assert "wait for each other" not in svg(fine)
    assert not [
        path for path in ElementTree.fromstring(svg(fine)).iter(f"{SVG}path") if "stuck" in path.get("class", "")
    ]


def test_mermaid_names_are_never_syntax() -> None:
    lines = mermaid(hostile()).splitlines()
    label = r"(?:[^\W_]|[ .\-:@/,]|#\d+;)*"
    shapes = [
        "flowchart RL",
        rf' +p\d+\(\["{label}"\]\)',
        rf' +l\d+\["{label}<br/>{label}"\]',
        r" +l\d+ -->\|held by\| p\d+",
        rf' +p\d+ -\.->\|"{label}"\| l\d+',
    ]
    for line in lines:
        assert any(re.fullmatch(shape, line) for shape in shapes), line
        assert not re.search(r'"[^"]*[.-] ', line.replace(" s left", "")), line
    decoded = {re.sub(r"#(\d+);", lambda found: chr(int(found[1])), line) for line in lines}
    assert any("holder 1. one" in line for line in decoded)


def test_dot_names_are_never_syntax() -> None:
    text = dot(hostile())
    string = r'"(?:[^"\\]|\\.)*"'
    outside = re.sub(string, '""', text)
    assert re.fullmatch(r"[\w\s{}\[\]=,;>\"-]*", outside)
    assert outside.count("->") == sum(len(line) for line in hostile().queues.values()) + len(hostile().locks)
    for found in re.findall(string, text):
        # Only quotes, backslashes and the line end in a lock's label are escaped; the only entity is &amp;.
        rest = re.sub(r'\\[\\"]', "", found[1:-1])
        assert rest.count("\\") == rest.count("\\n") <= 1
        assert not re.search(r"&(?!amp;)", found)


def test_shortened_text_keeps_both_ends() -> None:
    assert shorten("short", 32) == "short"
    assert shorten("abcdefghij", 5) == "ab…ij"
    assert shorten("日本語日本語", 5) == "日…語"


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("*", ["", "a", "a\nb"], []),
        ("", [""], ["a"]),
        ("a*", ["a", "ab"], ["ba"]),
        ("*a", ["a", "aa", "ba"], ["ab", ""]),
        ("a*b*a", ["aba", "abba", "axbxbxa"], ["ab", "aab", "aa"]),
        ("**a?b**", ["a.b", "aaabb"], ["ab", "a"]),
        ("*aab*b", ["aaabb", "aababb"], ["aaab"]),
        ("a.[b]", ["a.[b]"], ["axb", "a.b"]),
    ],
)
def test_pattern_matches_whole_names(pattern: str, matching: list[str], others: list[str]) -> None:
    matches = name_matcher(pattern)
    assert all(matches(name) for name in matching)
    assert not any(matches(name) for name in others)


@pytest.mark.second_stage
@pytest.mark.alone
def test_pattern_of_many_stars_takes_no_time() -> None:
    """With a regular expression that tries all combinations this takes seconds, and three times more with each star."""
    matches = name_matcher("*?" * 9 + "!*", ignore_case=True)
    with soon(1.0):
        assert not matches("invoice:2026-11-17:customer-4711")
