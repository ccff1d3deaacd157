"""Draw the live screen as lines that fit the window exactly.

Guarantee: for any window size there are at most as many lines as the window has, and none is wider. Text from the
database is escaped and never interpreted as markup.
"""

from __future__ import annotations

from datetime import datetime
from itertools import islice

from rich.text import Text

from dblock.admin.graph.labels import holder_text
from dblock.admin.inspect import LockState
from dblock.cli.inspect import EVENTS, row_style
from dblock.cli.output import duration, printable
from dblock.cli.watch.changes import Change
from dblock.cli.watch.messages import STYLES, describe
from dblock.cli.watch.model import ORDERS, ScreenState

KEYS = "q quit  s sort  r reverse  / filter  ↑↓ select  Enter open  p pause  ? help"
KEYS_OPENED = "Esc back  ↑↓ scroll  p pause  q quit"
KEYS_HELP = "Esc back  q quit"
HELP = """
 q          quit
 s          next sort order: name, time left, waiting, hand-offs
 r          reverse the order
 /          filter by a part of the name, with * and ?
            Enter keeps the filter, Esc clears it
 ↑ ↓ j k    select a lock; also PageUp, PageDown, Home, End
 Enter      open the selected lock: its holder, queue and history
 Esc        back; in the list: clear the filter
 p          pause, continue
 ?          this help

 A hand-off is a lock whose token has changed between two polls.
 A shorter change appears only if the database recorded it.
"""


def draw(screen: ScreenState, width: int, height: int, now: float) -> list[Text]:
    """Return the lines of the whole screen."""
    head, foot = _head(screen, width, now), _foot(screen)
    room = height - len(head) - 1
    if screen.show_help:
        body = _scrolled(screen, [Text(line) for line in HELP.strip("\n").splitlines()], room)
    elif screen.opened is not None:
        body = _scrolled(screen, _opened(screen, now), room)
    else:
        # The changes get at least a third of the room, and whatever the table does not need.
        table = _table(screen, width, room - max(0, (room - 4) // 3), now)
        body = [*table, *_events(screen, room - len(table))]
    lines = [*head, *body[: max(0, room)]]
    lines += [Text("")] * (height - 1 - len(lines))
    lines = [*lines[: max(0, height - 1)], foot]
    for line in lines:
        line.no_wrap = True
        line.truncate(max(1, width), overflow="ellipsis")
    return lines[:height]


def _head(screen: ScreenState, width: int, now: float) -> list[Text]:
    locks = screen.snapshot.locks
    held = sum(lock.state != "free" and lock.held is None for lock in locks)
    awaited = sum(bool(lock.waiting) for lock in locks)
    waiting = sum(lock.waiting for lock in locks)
    parts = [f"{held} held", f"{awaited} awaited", f"{waiting} waiting", f"{screen.rate(now):.1f} hand-offs/s"]
    if screen.snapshot.refusals is not None:
        parts.append(f"{screen.refused} refused")
    order = f"by {ORDERS[screen.order]}{', reversed' if screen.reverse else ''}"
    first = Text.assemble((" dblock ", "bold reverse"), " ", printable(screen.database))
    if screen.pattern != "*":
        first.append(f"  {printable(screen.pattern)}", "cyan")
    lines = [
        _two_sided(first, _freshness(screen, now), width),
        _two_sided(Text(" " + "  ".join(parts)), Text(order, "dim"), width),
    ]
    if screen.is_late(now):
        alarm = Text(f" The database has not replied for {duration(screen.age(now))}", "bold white on red")
        if screen.error:
            alarm.append(f": {printable(screen.error)}")
        lines.append(alarm)
    elif screen.snapshot.more:
        lines.append(Text(f" Only the first {len(locks)} locks are shown: narrow the pattern.", "yellow"))
    lines.append(Text(""))
    return lines


def _freshness(screen: ScreenState, now: float) -> Text:
    if screen.paused_at is not None:
        return Text(" PAUSED ", "black on yellow")
    return Text(f"{screen.age(now):.1f} s old", "red" if screen.is_late(now) else "dim")


def _two_sided(left: Text, right: Text, width: int) -> Text:
    """Put a text at each end of a line. If both do not fit, the left one is cut."""
    room = width - right.cell_len - 2
    if room < 10:
        return left
    left.truncate(room, overflow="ellipsis", pad=True)
    return Text.assemble(left, "  ", right)


def _table(screen: ScreenState, width: int, room: int, now: float) -> list[Text]:
    rows = screen.rows()
    selected = screen.selected(rows)
    widths = _widths(rows, width)
    names = {"name": "LOCK", "state": "STATE", "holder": "HOLDER", "token": "TOKEN", "left": "LEFT"}
    names |= {"waiting": "WAITING", "handed": "HAND-OFFS"}
    header = _row(names, widths)
    header.stylize("bold")
    lines = [header]
    if not rows:
        which = " that matches the filter" if screen.filter else ""
        return [*lines, Text(f" No lock{which} is held or waited for.", "dim")]
    visible_rows = max(1, room - 1)
    first = max(0, min(selected - visible_rows // 2, len(rows) - visible_rows))
    for number, lock in enumerate(rows[first : first + visible_rows], first):
        left = screen.left(lock, now)
        cells = {
            "name": printable(lock.name),
            "state": lock.state,
            "holder": printable(holder_text(lock)),
            "token": printable(lock.token),
            "left": "-" if lock.state == "free" or lock.held is not None else duration(left) if left else "expired",
            "waiting": str(lock.waiting or "-"),
            "handed": str(screen.handed_over[lock.name] or "-"),
        }
        how = "reverse" if number == selected else row_style(lock) or ""
        line = _row(cells, widths)
        line.stylize(how)
        lines.append(line)
    return lines


RIGHT_ALIGNED = {"token", "left", "waiting", "handed"}
"""The columns that hold numbers."""


def _widths(rows: list[LockState], width: int) -> dict[str, int]:
    """Return the columns and their widths: a narrow window has fewer columns."""
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
        line = Text.assemble(
            line, "  " if number else "", *((space, cell) if column in RIGHT_ALIGNED else (cell, space))
        )
    return line


def _events(screen: ScreenState, room: int) -> list[Text]:
    lines = [Text(""), Text(" CHANGES", "bold")]
    lines += [_event(change) for change in islice(screen.changes, max(0, room - 2))]
    if not screen.changes:
        lines.append(Text(" none yet", "dim"))
    return lines if room > 2 else []


def _event(change: Change) -> Text:
    line = Text.assemble(" ", (clock(change.at), "dim"), "  ", (printable(change.name), "bold"), "  ")
    return line.append(describe(change), STYLES[change.kind])


def clock(at: datetime) -> str:
    """Return a local time, with its date unless that is today."""
    local = at.astimezone()
    today = datetime.now().astimezone().date() == local.date()
    return local.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S")


def _opened(screen: ScreenState, now: float) -> list[Text]:
    detail = screen.detail
    lines = [Text.assemble((f" {printable(screen.opened)}", "bold")), Text("")]
    if detail is None or detail.name != screen.opened:
        return [*lines, Text(" …", "dim")]
    lock, since = detail.lock, max(0.0, screen.now(now) - screen.detail_at)
    if lock is None:
        lines.append(Text(" This lock no longer exists.", "dim"))
    elif lock.held is not None:
        lines.append(_field("kind", printable(lock.kind)))
        lines.append(_field("state", f"{lock.state}, {printable(holder_text(lock))}"))
        for share in detail.shares:
            until = duration(max(0.0, share.remaining - since))
            lines.append(
                _field(printable(share.kind), f"{printable(share.name)}, {printable(share.holder)}, {until} left")
            )
    elif lock.state == "free":
        ended = "released" if lock.released_at else "expired"
        lines.append(_field("state", f"free, {ended} {printable(lock.released_at or lock.expires_at)}"))
        lines.append(_field("token", f"{printable(lock.token)}, of its last grant"))
    else:
        forced = f", its holder was told to release {printable(lock.forced_at)}" if lock.forced_at else ""
        left = max(0.0, lock.remaining - since)
        lines += [
            _field("state", f"held{forced}"),
            _field("holder", printable(lock.holder)),
            _field("meta", printable(lock.meta)),
            _field("token", printable(lock.token) if lock.token else "none: the grant is not durable"),
            _field("granted", printable(lock.granted_at)),
            _field("deadline", f"{printable(lock.expires_at)}, in {duration(left)} unless renewed"),
        ]
    lines += [Text(""), Text(f" QUEUE ({len(detail.queue)})", "bold")]
    for waiter in detail.queue:
        lines.append(Text(f" {waiter.position:>4}  {printable(waiter.holder)}, for {duration(waiter.seconds + since)}"))
    lines += [Text(""), Text(" HISTORY", "bold")]
    for event in detail.history:
        what = EVENTS.get(event.event, printable(event.event))
        what += f" by {printable(event.actor)}" if event.actor else ""
        what += f": {printable(event.reason)}" if event.reason else ""
        token = f"token {event.token}" if event.token else "no token"
        lines.append(Text(f" {clock(event.at)}  {printable(event.holder)}, {token}: {what}"))
    if not detail.history:
        lines.append(Text(" none", "dim"))
    return lines


def _field(name: str, value: str) -> Text:
    return Text.assemble((f" {name:9} ", "dim"), value)


def _scrolled(screen: ScreenState, lines: list[Text], room: int) -> list[Text]:
    # Only here the number of lines is known, and so how far one can scroll.
    screen.scrolled = max(0, min(screen.scrolled, len(lines) - room))
    return lines[screen.scrolled : screen.scrolled + max(0, room)]


def _foot(screen: ScreenState) -> Text:
    if screen.typing:
        keys = "  Enter keeps  Esc clears"
        return Text.assemble((" / ", "bold"), printable(screen.filter), ("▏", "blink"), (keys, "dim"))
    keys = KEYS_HELP if screen.show_help else KEYS if screen.opened is None else KEYS_OPENED
    kept = f" filter: {printable(screen.filter)}  " if screen.filter and screen.opened is None else " "
    return Text.assemble((kept, "cyan"), (keys, "dim"))
