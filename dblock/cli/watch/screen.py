"""Draws the live screen: what was seen, as lines that fit the window exactly.

Guarantee: for any size of the window there are at most as many lines as it has, none wider than it; what is another's
text is shown escaped and never as markup.
"""

from __future__ import annotations

from datetime import datetime
from itertools import islice

from rich.text import Text

from dblock.admin.inspect import LockState
from dblock.cli.inspect import EVENTS, style
from dblock.cli.output import seconds, shown
from dblock.cli.watch.changes import Happening
from dblock.cli.watch.messages import STYLES, said
from dblock.cli.watch.model import ORDERS, Seen

KEYS = "q quit  s sort  r reverse  / filter  ↑↓ select  Enter open  p pause  ? help"
KEYS_OPENED = "Esc back  ↑↓ scroll  p pause  q quit"
KEYS_HELP = "Esc back  q quit"
HELP = """
 q          quit
 s          the next order: by name, time left, waiting, hand-offs
 r          the order reversed
 /          filter by a part of the name, with * and ?
            Enter keeps the filter, Esc clears it
 ↑ ↓ j k    select a lock; also PageUp, PageDown, Home, End
 Enter      open the selected lock: its holder, its line, its history
 Esc        back; in the list: clear the filter
 p          pause, and go on
 ?          this

 A hand-off is a lock whose token has changed between two looks.
 What was shorter than that is told only if the database has noted it.
"""


def draw(seen: Seen, width: int, height: int, now: float) -> list[Text]:
    """Return the lines of the whole screen."""
    head, foot = _head(seen, width, now), _foot(seen)
    room = height - len(head) - 1
    if seen.helping:
        body = _scrolled(seen, [Text(line) for line in HELP.strip("\n").splitlines()], room)
    elif seen.opened is not None:
        body = _scrolled(seen, _opened(seen, now), room)
    else:
        # At least a third is for what happened, and all that the table does not need.
        table = _table(seen, width, room - max(0, (room - 4) // 3), now)
        body = [*table, *_events(seen, room - len(table))]
    lines = [*head, *body[: max(0, room)]]
    lines += [Text("")] * (height - 1 - len(lines))
    lines = [*lines[: max(0, height - 1)], foot]
    for line in lines:
        line.no_wrap = True
        line.truncate(max(1, width), overflow="ellipsis")
    return lines[:height]


def _head(seen: Seen, width: int, now: float) -> list[Text]:
    locks = seen.look.locks
    held = sum(lock.state != "free" for lock in locks)
    awaited = sum(bool(lock.waiting) for lock in locks)
    waiting = sum(lock.waiting for lock in locks)
    parts = [f"{held} held", f"{awaited} awaited", f"{waiting} waiting", f"{seen.rate(now):.1f} hand-offs/s"]
    if seen.look.refusals is not None:
        parts.append(f"{seen.refused} refused")
    order = f"by {ORDERS[seen.order]}{', reversed' if seen.reverse else ''}"
    first = Text.assemble((" dblock ", "bold reverse"), " ", shown(seen.database))
    if seen.pattern != "*":
        first.append(f"  {shown(seen.pattern)}", "cyan")
    lines = [
        _both(first, _freshness(seen, now), width),
        _both(Text(" " + "  ".join(parts)), Text(order, "dim"), width),
    ]
    if seen.is_late(now):
        trouble = Text(f" The database has not answered for {seconds(seen.age(now))}", "bold white on red")
        if seen.trouble:
            trouble.append(f": {shown(seen.trouble)}")
        lines.append(trouble)
    elif seen.look.more:
        lines.append(Text(f" Only the first {len(locks)} locks are looked at: give a pattern.", "yellow"))
    lines.append(Text(""))
    return lines


def _freshness(seen: Seen, now: float) -> Text:
    if seen.paused_at is not None:
        return Text(" PAUSED ", "black on yellow")
    return Text(f"{seen.age(now):.1f} s old", "red" if seen.is_late(now) else "dim")


def _both(left: Text, right: Text, width: int) -> Text:
    """Put one thing at each end of a line; where both do not fit, the right one stays whole."""
    room = width - right.cell_len - 2
    if room < 10:
        return left
    left.truncate(room, overflow="ellipsis", pad=True)
    return Text.assemble(left, "  ", right)


def _table(seen: Seen, width: int, room: int, now: float) -> list[Text]:
    rows = seen.rows()
    selected = seen.selected(rows)
    widths = _widths(rows, width)
    names = {"name": "LOCK", "state": "STATE", "holder": "HOLDER", "token": "TOKEN", "left": "LEFT"}
    names |= {"waiting": "WAITING", "handed": "HAND-OFFS"}
    header = _row(names, widths)
    header.stylize("bold")
    lines = [header]
    if not rows:
        which = " that fits the filter" if seen.filter else ""
        return [*lines, Text(f" No lock{which} is held or waited for.", "dim")]
    shown_rows = max(1, room - 1)
    first = max(0, min(selected - shown_rows // 2, len(rows) - shown_rows))
    for number, lock in enumerate(rows[first : first + shown_rows], first):
        left = seen.left(lock, now)
        cells = {
            "name": shown(lock.name),
            "state": lock.state,
            "holder": shown(lock.holder),
            "token": shown(lock.token),
            "left": "-" if lock.state == "free" else seconds(left) if left else "over",
            "waiting": str(lock.waiting or "-"),
            "handed": str(seen.handed_over[lock.name] or "-"),
        }
        how = "reverse" if number == selected else style(lock) or ""
        line = _row(cells, widths)
        line.stylize(how)
        lines.append(line)
    return lines


RIGHT = {"token", "left", "waiting", "handed"}
"""Columns of numbers."""


def _widths(rows: list[LockState], width: int) -> dict[str, int]:
    """Return which columns there are, and how wide: the less room there is, the fewer."""
    token = max([5, *(len(str(lock.token)) for lock in rows)])
    fixed = {"state": 6, "token": token, "left": 10, "waiting": 7, "handed": 9}
    if width < 90:
        del fixed["handed"]
    if width < 72:
        del fixed["token"]
    if width < 48:
        del fixed["state"]
    if width < 30:
        del fixed["waiting"]
    flexible = ["name", "holder"] if width >= 60 else ["name"]
    room = max(4, width - 1 - sum(fixed.values()) - 2 * (len(fixed) + len(flexible) - 1))
    sizes = {"name": room if len(flexible) == 1 else room * 3 // 5, "holder": room - room * 3 // 5, **fixed}
    return {name: sizes[name] for name in ("name", "state", "holder", "token", "left", "waiting", "handed")
            if name in fixed or name in flexible}  # fmt: skip


def _row(cells: dict[str, str], widths: dict[str, int]) -> Text:
    line = Text(" ")
    for number, (column, size) in enumerate(widths.items()):
        cell = Text(cells[column])
        cell.truncate(size, overflow="ellipsis")
        space = " " * (size - cell.cell_len)
        line = Text.assemble(line, "  " if number else "", *((space, cell) if column in RIGHT else (cell, space)))
    return line


def _events(seen: Seen, room: int) -> list[Text]:
    lines = [Text(""), Text(" WHAT HAPPENED", "bold")]
    lines += [_event(one) for one in islice(seen.happened, max(0, room - 2))]
    if not seen.happened:
        lines.append(Text(" nothing yet", "dim"))
    return lines if room > 2 else []


def _event(one: Happening) -> Text:
    line = Text.assemble(" ", (clock(one.at), "dim"), "  ", (shown(one.name), "bold"), "  ")
    return line.append(said(one), STYLES[one.kind])


def clock(at: datetime) -> str:
    """Return when something was, by the clock on the wall; with the day, unless it was today."""
    local = at.astimezone()
    today = datetime.now().astimezone().date() == local.date()
    return local.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S")


def _opened(seen: Seen, now: float) -> list[Text]:
    detail = seen.detail
    lines = [Text.assemble((f" {shown(seen.opened)}", "bold")), Text("")]
    if detail is None or detail.name != seen.opened:
        return [*lines, Text(" …", "dim")]
    lock, since = detail.lock, max(0.0, seen.now(now) - seen.detail_at)
    if lock is None:
        lines.append(Text(" This lock is not known any more.", "dim"))
    elif lock.state == "free":
        ended = "released" if lock.released_at else "ran out unreleased"
        lines.append(_fact("state", f"free, {ended} {shown(lock.released_at or lock.expires_at)}"))
        lines.append(_fact("token", f"{shown(lock.token)}, of its last grant"))
    else:
        told = f", its holder was told to let go {shown(lock.forced_at)}" if lock.forced_at else ""
        left = max(0.0, lock.remaining - since)
        lines += [
            _fact("state", f"held{told}"),
            _fact("holder", shown(lock.holder)),
            _fact("meta", shown(lock.meta)),
            _fact("token", shown(lock.token) if lock.token else "none: it is not durable"),
            _fact("granted", shown(lock.granted_at)),
            _fact("deadline", f"{shown(lock.expires_at)}, in {seconds(left)} unless renewed"),
        ]
    lines += [Text(""), Text(f" IN LINE ({len(detail.line)})", "bold")]
    for place in detail.line:
        lines.append(Text(f" {place.position:>4}  {shown(place.holder)}, for {seconds(place.seconds + since)}"))
    lines += [Text(""), Text(" HISTORY", "bold")]
    for event in detail.history:
        what = EVENTS.get(event.event, shown(event.event))
        what += f" by {shown(event.actor)}" if event.actor else ""
        what += f": {shown(event.reason)}" if event.reason else ""
        token = f"token {event.token}" if event.token else "no token"
        lines.append(Text(f" {clock(event.at)}  {shown(event.holder)}, {token}: {what}"))
    if not detail.history:
        lines.append(Text(" nothing", "dim"))
    return lines


def _fact(name: str, value: str) -> Text:
    return Text.assemble((f" {name:9} ", "dim"), value)


def _scrolled(seen: Seen, lines: list[Text], room: int) -> list[Text]:
    # Only here is it known how far there is to scroll.
    seen.scrolled = max(0, min(seen.scrolled, len(lines) - room))
    return lines[seen.scrolled : seen.scrolled + max(0, room)]


def _foot(seen: Seen) -> Text:
    if seen.typing:
        keys = "  Enter keeps  Esc clears"
        return Text.assemble((" / ", "bold"), shown(seen.filter), ("▏", "blink"), (keys, "dim"))
    keys = KEYS_HELP if seen.helping else KEYS if seen.opened is None else KEYS_OPENED
    kept = f" filter: {shown(seen.filter)}  " if seen.filter and seen.opened is None else " "
    return Text.assemble((kept, "cyan"), (keys, "dim"))
