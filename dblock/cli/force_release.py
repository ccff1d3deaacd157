"""`dblock break`: take a lock from its holder."""

from __future__ import annotations

import getpass
import socket

import click

from dblock.admin.inspect import LockState, overview
from dblock.cli.context import Asked, command, confirmed, lock_name
from dblock.cli.output import seconds, shown
from dblock.errors import DblockError


@command("break")
@lock_name
@click.option("--why", metavar="TEXT", help="The reason, to be remembered (asked for at a terminal).")
@click.option(
    "--now", is_flag=True, help="Free it at once, while its holder may still be at work; the fence must hold."
)
@click.option("--token", type=int, metavar="N", help="Only if it is held under this token.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def break_lock(asked: Asked, name: str, why: str | None, now: bool, token: int | None, yes: bool) -> None:
    """Take a lock from its holder.

    Its holder is told to let go, by its next renewal; the lock is free when it has, or when its deadline passes. With
    --now it is free at once, and a holder that is still at work is stopped by nothing but the fence.
    """
    with overview(asked.installed(), asked.schema) as look:
        found = look.locks(name=name, include_free=True)
        if not found or found[0].state == "free":
            raise DblockError(f"Lock {name!r} is not held; there is nothing to break. See: dblock show {shown(name)!r}")
        lock = found[0]
        if token is not None and lock.token != token:
            raise DblockError(
                f"Lock {name!r} is not held under token {token} but under {lock.token}; nothing was done."
            )
        if lock.state == "forced" and not now:
            raise DblockError(
                f"The holder of lock {name!r} was told to let go at {shown(lock.forced_at)}; it is free in "
                f"{seconds(lock.remaining)} at the latest. With --now it is free at once."
            )
        if not yes:
            for line in consequences(lock, now):
                click.echo(line, err=True)
        confirmed(asked, yes, "Go ahead?")
        if why is None:
            why = "" if yes else click.prompt("Why? It will be remembered", default="", show_default=False, err=True)
        if not look.force_release(name, lock.number, actor=_who(), reason=why, now=now):
            raise DblockError(f"Lock {name!r} is not held {under(lock)} any more; nothing was done.")
        after = look.locks(name=name, include_free=True)
    remaining = after[0].remaining if after and after[0].token == lock.token else 0.0

    def said() -> None:
        if now:
            click.echo(f"Lock {shown(name)!r} was taken from {shown(lock.holder)}, held {under(lock)}; it is free.")
        else:
            click.echo(
                f"{shown(lock.holder)} was told to let go of lock {shown(name)!r}, held {under(lock)}. It is free "
                "when it "
                f"has, in {seconds(remaining)} at the latest."
            )

    facts = {"name": name, "token": lock.token, "holder": lock.holder, "now": now, "free_within": remaining, "why": why}
    asked.answer(facts, said)


def consequences(lock: LockState, now: bool) -> list[str]:
    """Return what breaking this lock means, in words."""
    said = [f"Lock {shown(lock.name)!r} is held by {shown(lock.holder)} {under(lock)}."]
    if lock.waiting:
        said.append(f"{lock.waiting} wait{'s' if lock.waiting == 1 else ''} for it.")
    if now:
        said.append(
            "It will be free at once. Its holder may be in the middle of its work, and goes on until its next "
            "renewal: two "
            "may be at work at the same time. Only resources that refuse a stale token (fenced_store) are safe."
        )
    else:
        said.append(
            "Its holder learns with its next renewal that it must let go, and its work is cut off. The lock is free "
            "when it "
            f"has let go, or in {seconds(lock.remaining)} when its deadline passes. Nobody has it before."
        )
    return said


def under(lock: LockState) -> str:
    """Return what a lock is held under, in words."""
    return f"under token {lock.token}" if lock.token else "without durability or token"


def _who() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
