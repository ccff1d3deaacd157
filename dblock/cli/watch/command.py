"""`dblock watch`: show changes as they happen, on a live screen at a terminal, elsewhere one line for each change.

Neither form ends when the database goes away. The screen reports it and keeps its last snapshot, the stream reports it
on standard error, and both continue by themselves when the database is back. Only a database that cannot be reached at
the start is an error.
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

from dblock.cli.context import CommandContext, command
from dblock.errors import DblockError

if TYPE_CHECKING:
    from dblock.cli.watch.model import ScreenState
    from dblock.cli.watch.poller import Poller

TICK = 0.25
"""Seconds between two drawings when nothing changes, because the remaining times count down."""


@command("watch")
@click.argument("pattern", default="*")
@click.option(
    "--interval", type=click.FloatRange(0.05, 3600), default=1.0, show_default=True, metavar="S",
    help="Seconds between two polls of the database.",
)  # fmt: skip
def watch(context: CommandContext, pattern: str, interval: float) -> int | None:
    """Watch locks and queues as they change.

    PATTERN selects locks by name: * matches any text, ? any character. At a terminal this is a live screen; press ? for
    its keys. Elsewhere, and with --json, the command prints the state at the start and then one line for each change.
    """
    if not math.isfinite(interval):
        raise click.BadParameter("must be a finite number of seconds.", param_hint="--interval")
    from dblock.cli.watch.poller import Poller

    target = context.installed_target()
    poller = Poller(target, context.schema, pattern, interval)
    keyboard = None if context.as_json else _keyboard()
    if keyboard is None:
        from dblock.cli.watch.stream import follow

        return follow(context, poller, pattern, str(target))
    from dblock.cli.watch.model import ScreenState

    # The first poll comes before the screen, so that its errors are reported like those of every other command.
    screen = ScreenState(poller.poll(), database=str(target), interval=interval, pattern=pattern)
    return _LiveScreen(screen, poller, keyboard).run()


def _keyboard() -> int | None:
    """Return the terminal to read keys from; None if the output is no terminal or there is no keyboard."""
    if sys.stdout is None or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return None
    if sys.stdin is not None and sys.stdin.isatty():
        return sys.stdin.fileno()
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return None


class _LiveScreen:
    """The live screen: a loop that waits for keys, results and signals at the same time."""

    def __init__(self, screen: ScreenState, poller: Poller, keyboard: int) -> None:
        self._screen = screen
        self._poller = poller
        self._keyboard = keyboard
        self._signals: list[int] = []
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        os.set_blocking(self._wake_reader, False)

    def run(self) -> int | None:
        """Show the screen until the user quits or a signal ends it."""
        from rich.console import Console
        from rich.live import Live

        from dblock.cli.watch.keys import KeyReader, cbreak_mode

        keys = KeyReader(self._keyboard)
        self._poller.start(self._wake)
        try:
            with self._signal_handlers():
                while True:
                    with cbreak_mode(self._keyboard):
                        console = Console()
                        with Live(
                            console=console,
                            screen=True,
                            auto_refresh=False,
                            redirect_stdout=False,
                            redirect_stderr=False,
                        ) as live:
                            while not self._signals:
                                live.update(_Window(self._screen, console), refresh=True)
                                if not self._step(keys):
                                    return None
                    if self._signals[0] != signal.SIGTSTP:
                        break
                    # After Ctrl-Z: the terminal is restored, and the shell will continue us.
                    self._signals.clear()
                    os.kill(os.getpid(), signal.SIGSTOP)
        finally:
            self._poller.stop()
        if self._signals[0] == signal.SIGINT:
            raise KeyboardInterrupt
        return 128 + self._signals[0]

    def _step(self, keys: Any) -> bool:
        """Wait for a key, a result or the next tick, and process it; return False when the user quits."""
        from dblock.cli.watch.keys import handle_key

        ready = select.select([self._keyboard, self._wake_reader], [], [], TICK)[0]
        if self._wake_reader in ready:
            os.read(self._wake_reader, 4096)
            while not self._poller.results.empty():
                result = self._poller.results.get()
                if isinstance(result, DblockError):
                    self._screen.record_failure(str(result))
                else:
                    self._screen.update(result)
        if self._keyboard in ready:
            for key in keys.read():
                if not handle_key(self._screen, key, time.monotonic()):
                    return False
            if keys.closed:
                return False
            self._poller.open(self._screen.opened)
        return True

    def _wake(self) -> None:
        try:
            os.write(self._wake_writer, b"!")
        except OSError:
            return  # the pipe is full, so the loop wakes up anyway

    @contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        """Let a signal end the loop between two drawings; the second of its kind ends it at once."""

        def on_end_signal(number: int, frame: FrameType | None) -> None:
            if number in self._signals and number != signal.SIGTSTP:
                raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
            self._signals.append(number)
            self._wake()

        def on_resize(number: int, frame: FrameType | None) -> None:
            self._wake()

        wanted: dict[int, Any] = {signal.SIGWINCH: on_resize}
        wanted |= dict.fromkeys(
            (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP), on_end_signal
        )
        before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Window:
    """A renderable for rich that draws the screen in the window's present size."""

    def __init__(self, screen: ScreenState, console: Any) -> None:
        self._screen = screen
        width, height = _size()
        console.size = (width, height)
        self._width, self._height = width, height

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.console import Group

        from dblock.cli.watch.screen import draw

        yield Group(*draw(self._screen, self._width, self._height, time.monotonic()))


def _size() -> tuple[int, int]:
    """Return the window's present size; the environment may hold an old one."""
    try:
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        columns, lines = 80, 24
    return columns or 80, lines or 24
