"""The commands that inspect locks: ls, show, history, waiters. Only `history --record` changes anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dblock.admin.graph.labels import holder_text
from dblock.cli.context import CommandContext, command, lock_name
from dblock.cli.output import duration, jsonable, printable, table
from dblock.errors import DblockError

if TYPE_CHECKING:
    from dblock.admin.inspect import Event, LockState, Waiter

EVENTS = {
    "granted": "granted",
    "released": "released",
    "expired": "expired",
    "died": "holder died",
    "forced": "told to release",
    "forced_now": "force-released at once",
}
"""Each event of the history, as it is printed."""

limit = click.option(
    "--limit",
    type=click.IntRange(1, 100_000),
    default=100,
    show_default=True,
    metavar="N",
    help="Maximum number of rows.",
)


@command("ls")
@click.argument("pattern", default="*")
@click.option("-a", "--all", "every", is_flag=True, help="Include free locks.")
@click.option(
    "--limit",
    type=click.IntRange(1, 100_000),
    default=1000,
    show_default=True,
    metavar="N",
    help="Maximum number of rows.",
)
def list_locks(context: CommandContext, pattern: str, every: bool, limit: int) -> None:
    """List locks that are held or waited for.

    PATTERN selects locks by name: * matches any text, ? any character.
    """
    from dblock.admin.inspect import overview

    with overview(context.installed_target(), context.schema) as database:
        locks = database.locks(pattern, include_free=every, limit=limit + 1)
    more, locks = len(locks) > limit, locks[:limit]

    def render() -> None:
        if not locks:
            which = "" if pattern == "*" else f" that matches {pattern!r}"
            click.echo(f"No lock{which} {'exists' if every else 'is held or waited for'}.", err=True)
            return
        table(
            ["LOCK", "KIND", "STATE", "HOLDER", "TOKEN", "LEFT", "WAITING"],
            [
                [lock.name, lock.kind, lock.state, holder_text(lock), lock.token, time_left(lock), lock.waiting or "-"]
                for lock in locks
            ],
            [row_style(lock) for lock in locks],
        )
        if more:
            click.echo(f"There are more than {limit} locks: narrow the pattern, or raise --limit.", err=True)

    context.output([lock_data(lock) for lock in locks], render)


def lock_data(lock: LockState) -> dict[str, Any]:
    """Return a lock as JSON data."""
    data: dict[str, Any] = jsonable(lock)
    grant = data.pop("number")
    return {"name": lock.name, "state": lock.state, "token": lock.token, "grant": grant} | data


def event_data(event: Event) -> dict[str, Any]:
    """Return an event of the history as JSON data."""
    data: dict[str, Any] = jsonable(event)
    return {"id": data.pop("number")} | data


def time_left(lock: LockState) -> str:
    """Return the time until a lock's deadline."""
    return duration(lock.remaining) if lock.remaining else "-"


def row_style(lock: LockState) -> str | None:
    """Return the style of a lock's row at a terminal."""
    return {"held": None, "forced": "yellow", "free": "dim"}[lock.state]


@command("show")
@lock_name
def show(context: CommandContext, name: str) -> None:
    """Show one lock: its holder, deadline, queue and history."""
    from dblock.admin.inspect import overview

    with overview(context.installed_target(), context.schema) as database:
        found = database.locks(name=name, include_free=True)
        waiters = database.waiters(name)
        history = database.history(name, limit=20)
        recorded = database.grants_are_recorded()
    shares = [lock for lock in found if lock.head == name and lock.state != "free"]
    if not found and not history:
        raise DblockError(
            f"Lock {name!r} does not exist: it was never acquired, or the reaper removed it. See: dblock ls --all"
        )

    def render() -> None:
        for lock in found[:1]:
            _print_lock(lock)
        if shares:
            click.echo("\nholders")
            rows = [[one.name, one.kind, one.state, one.holder, one.token, time_left(one)] for one in shares]
            table(["SHARE", "KIND", "STATE", "HOLDER", "TOKEN", "LEFT"], rows, [row_style(one) for one in shares])
        if waiters:
            click.echo("\nqueue")
            _print_waiters(waiters, with_name=False)
        scope = "" if recorded else " (incidents only; to record every grant: dblock history --record all)"
        click.echo(f"\nhistory{scope}")
        if history:
            _print_history(history, name)
        else:
            click.echo("none")

    lock = found[0] if found else None
    context.output(
        {
            "lock": lock and lock_data(lock),
            "shares": [lock_data(share) for share in shares],
            "waiters": waiters,
            "history": [event_data(event) for event in history],
            "grants_recorded": recorded,
        },
        render,
    )


def _print_lock(lock: LockState) -> None:
    click.echo(f"lock      {printable(lock.name)}")
    if lock.kind is not None:
        click.echo(f"kind      {printable(lock.kind)}{f' of {printable(lock.head)}' if lock.head else ''}")
    if lock.held is not None:
        click.echo(f"state     {lock.state}{f', {holder_text(lock)}' if lock.permits or lock.held else ''}")
        click.echo(f"token     {printable(lock.token)}, of its last grant")
        return
    if lock.state == "free":
        since = lock.released_at or lock.expires_at
        how = "released" if lock.released_at else "expired"
        click.echo(f"state     free{f', {how} {printable(since)}' if since else ''}")
        click.echo(f"token     {printable(lock.token)}, of its last grant")
        return
    forced = f", told to release {printable(lock.forced_at)}" if lock.forced_at else ""
    click.echo(f"state     held{forced}")
    click.echo(f"holder    {printable(lock.holder)}")
    if lock.meta is not None:
        click.echo(f"meta      {printable(lock.meta)}")
    click.echo(f"token     {printable(lock.token) if lock.token else 'none: the grant is not durable'}")
    click.echo(f"granted   {printable(lock.granted_at)}")
    click.echo(f"deadline  {printable(lock.expires_at)}, in {duration(lock.remaining)} unless renewed")


def _print_history(events: list[Event], name: str | None) -> None:
    """Print events, with the name of each lock unless all are of the lock of this name itself."""
    column = "LOCK" if name is None else "SHARE" if any(event.name != name for event in events) else None
    rows = []
    for event in events:
        text = EVENTS.get(event.event, event.event)
        text += f" by {event.actor}" if event.actor else ""
        text += f": {event.reason}" if event.reason else ""
        rows.append([event.at, *([event.name] if column else []), event.token, event.holder, text])
    table(["TIME", *([column] if column else []), "TOKEN", "HOLDER", "EVENT"], rows)


@command("history")
@click.argument("name", required=False)
@limit
@click.option(
    "--record",
    type=click.Choice(["all", "incidents"]),
    help="From now on, record every grant and release too, or only incidents (the default, which keeps grants faster).",
)
def history(context: CommandContext, name: str | None, limit: int, record: str | None) -> None:
    """Show the history of locks, the newest event first: expired leases, dead holders, forced releases."""
    from dblock.admin.inspect import overview

    with overview(context.installed_target(), context.schema) as database:
        if record is not None:
            database.record_grants(record == "all")
            what = "every grant and release" if record == "all" else "only incidents"
            context.output({"record": record}, lambda: click.echo(f"From now on the history records {what}."))
            return
        events, recorded = database.history(name, limit=limit), database.grants_are_recorded()

    def render() -> None:
        if events:
            _print_history(events, name)
        else:
            click.echo("No event is recorded yet." if recorded else "No incident is recorded.", err=True)

    context.output([event_data(event) for event in events], render)


def _print_waiters(waiters: list[Waiter], with_name: bool) -> None:
    modes = any(one.mode for one in waiters)
    table(
        [*(["LOCK"] if with_name else []), "#", "WAITER", "FOR", *(["MODE"] if modes else [])],
        [
            [
                *([one.name] if with_name else []),
                one.position,
                one.holder,
                duration(one.seconds),
                *([one.mode] if modes else []),
            ]
            for one in waiters
        ],
    )


@command("waiters")
@click.argument("name", required=False)
@limit
def waiters(context: CommandContext, name: str | None, limit: int) -> None:
    """List the waiters of each lock, in queue order, with their waiting times."""
    from dblock.admin.inspect import overview

    with overview(context.installed_target(), context.schema) as database:
        found = database.waiters(name, limit=limit)

    def render() -> None:
        if found:
            _print_waiters(found, with_name=True)
        else:
            what = "" if name is None else f" for lock {printable(name)!r}"
            click.echo(f"No client is waiting{what}.", err=True)

    context.output(found, render)
