"""The commands that look: ls, show, history, waiters. They change nothing, but for `history --record`."""

from __future__ import annotations

from typing import Any

import click

from dblock.admin.inspect import Event, LockState, overview
from dblock.cli.context import Asked, command, lock_name
from dblock.cli.output import plain, seconds, shown, table
from dblock.errors import DblockError

EVENTS = {
    "granted": "granted",
    "released": "released",
    "expired": "ran out unreleased",
    "died": "its holder died",
    "forced": "told to let go",
    "forced_now": "taken away at once",
}

limit = click.option(
    "--limit", type=click.IntRange(1, 100_000), default=100, show_default=True, metavar="N", help="How many at most."
)


@command("ls")
@click.argument("pattern", default="*")
@click.option("-a", "--all", "every", is_flag=True, help="Also locks that are free.")
@click.option(
    "--limit", type=click.IntRange(1, 100_000), default=1000, show_default=True, metavar="N", help="How many at most."
)
def list_locks(asked: Asked, pattern: str, every: bool, limit: int) -> None:
    """List the locks that are held or waited for.

    PATTERN picks some of them by name, with * for any text and ? for any character.
    """
    with overview(asked.installed(), asked.schema) as look:
        locks = look.locks(pattern, include_free=every, limit=limit + 1)
    more, locks = len(locks) > limit, locks[:limit]

    def said() -> None:
        if not locks:
            which = "" if pattern == "*" else f" that fits {pattern!r}"
            click.echo(f"No lock{which} is {'known' if every else 'held or waited for'}.", err=True)
            return
        table(
            ["LOCK", "STATE", "HOLDER", "TOKEN", "LEFT", "WAITING"],
            [[one.name, one.state, one.holder, one.token, left(one), one.waiting or "-"] for one in locks],
            [style(one) for one in locks],
        )
        if more:
            click.echo(f"There are more than {limit}: give a pattern, or --limit.", err=True)

    asked.answer([facts(one) for one in locks], said)


def facts(lock: LockState) -> dict[str, Any]:
    """Return what is known of a lock, as JSON has it."""
    found: dict[str, Any] = plain(lock)
    return {"name": lock.name, "state": lock.state, "token": lock.token} | found


def left(lock: LockState) -> str:
    """Return how long a lock is still held, in words."""
    return seconds(lock.remaining) if lock.remaining else "-"


def style(lock: LockState) -> str | None:
    """Return how a lock looks at a terminal."""
    return {"held": None, "forced": "yellow", "free": "dim"}[lock.state]


@command("show")
@lock_name
def show(asked: Asked, name: str) -> None:
    """Show one lock: its holder, its deadline, its line, its history."""
    with overview(asked.installed(), asked.schema) as look:
        found = look.locks(name=name, include_free=True)
        waiters = look.waiters(name)
        history = look.history(name, limit=20)
        recorded = look.grants_are_recorded()
    if not found and not history:
        raise DblockError(
            f"Lock {name!r} is not known: nobody has asked for it, or it was idle for long. See: dblock ls"
        )

    def said() -> None:
        for lock in found:
            _say_lock(lock)
        if waiters:
            click.echo("\nin line")
            table(["#", "WHO", "FOR"], [[one.position, one.holder, seconds(one.seconds)] for one in waiters])
        click.echo(f"\nhistory{'' if recorded else ' (what went wrong; dblock history --record all has every grant)'}")
        if history:
            _say_history(history, with_name=False)
        else:
            click.echo("nothing")

    lock = found[0] if found else None
    asked.answer(
        {"lock": lock and facts(lock), "waiters": waiters, "history": history, "grants_recorded": recorded}, said
    )


def _say_lock(lock: LockState) -> None:
    click.echo(f"lock      {shown(lock.name)}")
    if lock.state == "free":
        since = lock.released_at or lock.expires_at
        how = "released" if lock.released_at else "ran out unreleased"
        click.echo(f"state     free{f', {how} {shown(since)}' if since else ''}")
        click.echo(f"token     {shown(lock.token)}, of its last grant")
        return
    told = f", told to let go {shown(lock.forced_at)}" if lock.forced_at else ""
    click.echo(f"state     held{told}")
    click.echo(f"holder    {shown(lock.holder)}")
    if lock.meta is not None:
        click.echo(f"meta      {shown(lock.meta)}")
    click.echo(f"token     {shown(lock.token) if lock.token else 'none: it is not durable'}")
    click.echo(f"granted   {shown(lock.granted_at)}")
    click.echo(f"deadline  {shown(lock.expires_at)}, in {seconds(lock.remaining)} unless renewed")


def _say_history(events: list[Event], with_name: bool) -> None:
    rows = []
    for one in events:
        what = EVENTS.get(one.event, one.event)
        what += f" by {one.actor}" if one.actor else ""
        what += f": {one.reason}" if one.reason else ""
        rows.append([one.at, *([one.name] if with_name else []), one.token, one.holder, what])
    table(["WHEN", *(["LOCK"] if with_name else []), "TOKEN", "HOLDER", "WHAT"], rows)


@command("history")
@click.argument("name", required=False)
@limit
@click.option(
    "--record",
    type=click.Choice(["all", "incidents"]),
    help="From now on note every grant and release too, or only what goes wrong (the default; grants are quicker so).",
)
def history(asked: Asked, name: str | None, limit: int, record: str | None) -> None:
    """Tell what befell locks, the newest first: leases that ran out, holders that died, forced releases."""
    with overview(asked.installed(), asked.schema) as look:
        if record is not None:
            look.record_grants(record == "all")
            what = "every grant and release" if record == "all" else "only what goes wrong"
            asked.answer({"record": record}, lambda: click.echo(f"From now on the history has {what}."))
            return
        events, recorded = look.history(name, limit=limit), look.grants_are_recorded()

    def said() -> None:
        if events:
            _say_history(events, with_name=name is None)
        else:
            click.echo("Nothing has gone wrong, as far as is remembered." if not recorded else "Nothing yet.", err=True)

    asked.answer(events, said)


@command("waiters")
@click.argument("name", required=False)
@limit
def waiters(asked: Asked, name: str | None, limit: int) -> None:
    """Tell who waits for which lock, in order, and for how long."""
    with overview(asked.installed(), asked.schema) as look:
        found = look.waiters(name, limit=limit)

    def said() -> None:
        if found:
            rows = [[one.name, one.position, one.holder, seconds(one.seconds)] for one in found]
            table(["LOCK", "#", "WHO", "FOR"], rows)
        else:
            click.echo("Nobody waits.", err=True)

    asked.answer(found, said)
