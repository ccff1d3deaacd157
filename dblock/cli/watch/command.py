"""`dblock watch`: what goes on, as it goes on; a live screen at a terminal, elsewhere a line for each happening.

Neither ends when the database goes away: the screen says so and keeps what it had, the lines say so on standard
error, and both go on by themselves when it is back. Only a database that cannot be reached at the start is an error.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from dblock.cli.context import Asked, command
from dblock.errors import DblockError

if TYPE_CHECKING:
    from dblock.cli.watch.model import Seen
    from dblock.cli.watch.poller import Looking

TICK = 0.25
"""Seconds between two drawings when nothing happens: the time that is left counts down."""


@command("watch")
@click.argument("pattern", default="*")
@click.option(
    "--interval", type=click.FloatRange(0.05, 3600), default=1.0, show_default=True, metavar="S",
    help="Seconds between two looks at the database.",
)  # fmt: skip
def watch(asked: Asked, pattern: str, interval: float) -> int | None:
    """Watch locks, lines and hand-offs as they change.

    PATTERN picks locks by name, with * for any text and ? for any character. At a terminal this is a live screen; ?
    tells its keys. Elsewhere, and with --json, it prints a line for each happening, the state at the start first.
    """
    if not math.isfinite(interval):
        raise click.BadParameter("it is a number of seconds.", param_hint="--interval")
    from dblock.cli.watch.poller import Looking

    target = asked.installed()
    looking = Looking(target, asked.schema, pattern, interval)
    keyboard = None if asked.as_json else _keyboard()
    if keyboard is None:
        from dblock.cli.watch.stream import follow

        return follow(asked, looking, pattern, str(target))
    from dblock.cli.watch.model import Seen

    # Before there is a screen: what is wrong from the start is said as every command says it.
    seen = Seen(looking.look(), database=str(target), interval=interval, pattern=pattern)
    return _Live(seen, looking, keyboard).run()


def _keyboard() -> int | None:
    """Return the terminal to read keys from; None where there is no screen, or nobody in front of it."""
    if sys.stdout is None or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return None
    if sys.stdin is not None and sys.stdin.isatty():
        return sys.stdin.fileno()
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return None


class _Live:
    """The live screen: a loop over keys, answers and signals, none of which it waits for alone."""

    def __init__(self, seen: Seen, looking: Looking, keyboard: int) -> None:
        self._seen = seen
        self._looking = looking
        self._keyboard = keyboard
        self._signals: list[int] = []
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._waking, False)
        os.set_blocking(self._woken, False)

    def run(self) -> int | None:
        """Show it until its user has had enough."""
        from rich.console import Console
        from rich.live import Live

        from dblock.cli.watch.keys import Keys, each_key_at_once

        keys = Keys(self._keyboard)
        self._looking.begin(self._wake)
        try:
            with self._handled():
                while True:
                    with each_key_at_once(self._keyboard):
                        console = Console()
                        with Live(
                            console=console,
                            screen=True,
                            auto_refresh=False,
                            redirect_stdout=False,
                            redirect_stderr=False,
                        ) as live:
                            while not self._signals:
                                live.update(_Window(self._seen, console), refresh=True)
                                if not self._turn(keys):
                                    return None
                    if self._signals[0] != signal.SIGTSTP:
                        break
                    # By Ctrl-Z: with the terminal as it was, until the shell lets us go on.
                    self._signals.clear()
                    os.kill(os.getpid(), signal.SIGSTOP)
        finally:
            self._looking.end()
        if self._signals[0] == signal.SIGINT:
            raise KeyboardInterrupt
        return 128 + self._signals[0]

    def _turn(self, keys: Any) -> bool:
        """Wait for a key, an answer or a moment, and take in what has come; False when it is over."""
        from dblock.cli.watch.keys import press

        ready = select.select([self._keyboard, self._woken], [], [], TICK)[0]
        if self._woken in ready:
            os.read(self._woken, 4096)
            while not self._looking.answers.empty():
                answer = self._looking.answers.get()
                if isinstance(answer, DblockError):
                    self._seen.fail(str(answer))
                else:
                    self._seen.take(answer)
        if self._keyboard in ready:
            for key in keys.read():
                if not press(self._seen, key, time.monotonic()):
                    return False
            if keys.closed:
                return False
            self._looking.open(self._seen.opened)
        return True

    def _wake(self) -> None:
        try:
            os.write(self._waking, b"!")
        except OSError:
            return  # it has been woken often enough

    @contextmanager
    def _handled(self) -> Iterator[None]:
        """Have signals end the loop between two drawings; the second of a kind ends it wherever it is."""

        def ended(number: int, frame: FrameType | None) -> None:
            if number in self._signals and number != signal.SIGTSTP:
                raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
            self._signals.append(number)
            self._wake()

        def resized(number: int, frame: FrameType | None) -> None:
            self._wake()

        wanted: dict[int, Any] = {signal.SIGWINCH: resized}
        wanted |= dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP), ended)
        before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Window:
    """The screen as rich takes it: drawn when it is shown, in the size that the window has then."""

    def __init__(self, seen: Seen, console: Any) -> None:
        self._seen = seen
        width, height = _size()
        console.size = (width, height)
        self._width, self._height = width, height

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.console import Group

        from dblock.cli.watch.screen import draw

        yield Group(*draw(self._seen, self._width, self._height, time.monotonic()))


def _size() -> tuple[int, int]:
    """Return the window's size, as it is and not as the environment says that it was."""
    try:
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        columns, lines = 80, 24
    return columns or 80, lines or 24
