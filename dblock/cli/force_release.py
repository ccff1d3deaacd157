"""`dblock force-release`: take a lock from its holder."""

from __future__ import annotations

import getpass
import shlex
import socket
from typing import TYPE_CHECKING

import click

from dblock.cli.context import CommandContext, command, confirm, lock_name
from dblock.cli.output import duration, printable
from dblock.errors import DblockError

if TYPE_CHECKING:
    from dblock.admin.inspect import LockState


@command("force-release")
@lock_name
@click.option("--reason", metavar="TEXT", help="Reason to record in the history (prompted for at a terminal).")
@click.option(
    "--now",
    is_flag=True,
    help="Free the lock at once, while its holder may still be working; only a fence stops its writes.",
)
@click.option(
    "--token",
    type=int,
    metavar="N",
    help="Only if the lock is held under this token. Of several holders, the one with this token.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def force_release_lock(
    context: CommandContext, name: str, reason: str | None, now: bool, token: int | None, yes: bool
) -> None:
    """Take a lock from its holder.

    Of the holders of a read-write lock or a semaphore, choose one by its token, or by its share as `dblock ls` shows
    it.

    The holder learns with its next renewal that it must release the lock. The lock is free when the holder has released
    it, or when its deadline passes. With --now the lock is free at once, and only a fence stops a holder that is still
    working.
    """
    from dblock.admin.inspect import overview

    with overview(context.installed_target(), context.schema) as database:
        found = database.locks(name=name, include_free=True)
        if not found or found[0].state == "free":
            see = f" See: dblock show {shlex.quote(printable(name))}" if found else ""
            raise DblockError(f"Lock {printable(name)!r} is not held; there is nothing to release.{see}")
        lock = found[0] if found[0].held is None else chosen_share(name, found[1:], token)
        name = lock.name
        if token is not None and lock.token != token:
            under = token if lock.token else f"under token {token}"
            raise DblockError(f"Lock {name!r} is held {held_under(lock)}, not {under}; nothing was done.")
        if lock.state == "forced" and not now:
            raise DblockError(
                f"The holder of lock {name!r} was told to release it at {printable(lock.forced_at)}. The lock is free "
                f"in {duration(lock.remaining)} at the latest. To free it at once, add --now."
            )
        if not yes:
            for line in consequences(lock, now):
                click.echo(line, err=True)
        confirm(context, yes, "Go ahead?")
        if reason is None:
            question = "Reason, for the history"
            reason = "" if yes else click.prompt(question, default="", show_default=False, err=True)
        if not database.force_release(name, lock.number, actor=actor(), reason=reason, now=now):
            raise DblockError(f"Lock {name!r} is no longer held {held_under(lock)}; nothing was done.")
        after = database.locks(name=name, include_free=True)
    remaining = after[0].remaining if after and after[0].number == lock.number else 0.0

    def render() -> None:
        what = noun(lock)
        lock_text, holder = f"{what} {printable(name)!r}, held {held_under(lock)}", printable(lock.holder)
        if now:
            click.echo(f"Took {lock_text}, from {holder}. The {what} is free.")
        else:
            click.echo(
                f"{holder} was told to release {lock_text}. "
                f"The {what} is free when its holder has released it, in {duration(remaining)} at the latest."
            )

    data = {
        "name": name,
        "token": lock.token,
        "holder": lock.holder,
        "now": now,
        "free_within": remaining,
        "reason": reason,
    }
    context.output(data, render)


def chosen_share(name: str, shares: list[LockState], token: int | None) -> LockState:
    """Return the share to take: the one that is held, or the one with this token."""
    held = [share for share in shares if share.state != "free" and token in (None, share.token)]
    if not held:
        raise DblockError(f"Lock {name!r} is not held under token {token}; nothing was done.")
    if len(held) > 1:
        listed = ", ".join(
            f"{printable(share.name)} (token {share.token}, {printable(share.holder)})" for share in held
        )
        raise DblockError(f"Lock {name!r} has {len(held)} holders. Choose one by its name or with --token: {listed}.")
    return held[0]


def consequences(lock: LockState, now: bool) -> list[str]:
    """Return the consequences of force-releasing this lock, one sentence or two per line."""
    what = noun(lock)
    lines = [f"{what.capitalize()} {printable(lock.name)!r} is held by {printable(lock.holder)} {held_under(lock)}."]
    if lock.waiting:
        lines.append(f"{lock.waiting} waiter{'s are' if lock.waiting > 1 else ' is'} in its queue.")
    if now:
        lines.append(
            f"The {what} will be free at once. Its holder may be in the middle of its work and continues until its "
            "next renewal, so two holders may work at the same time. Only resources that refuse a stale token "
            "(fenced_store) are safe."
        )
    else:
        lines.append(
            f"The holder learns with its next renewal that it must release the {what}, and its work is cut off. The "
            f"{what} is free when the holder has released it, or in {duration(lock.remaining)} when its deadline "
            f"passes. No other client gets the {what} before that."
        )
    return lines


def noun(lock: LockState) -> str:
    """Return what to call it: other holders may have their own shares of the same lock."""
    return "lock" if lock.head is None else "share"


def held_under(lock: LockState) -> str:
    """Return how a lock is held: under which token, or without one."""
    return f"under token {lock.token}" if lock.token else "without durability or token"


def actor() -> str:
    """Return the name of the operator, for the history."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
