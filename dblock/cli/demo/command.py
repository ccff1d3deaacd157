"""`dblock demo`: narrate the story as it happens, then draw its timeline at the terminal or as a picture."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from dblock.cli.context import CommandContext, command
from dblock.cli.output import printable
from dblock.cli.signals import exit_on_first_signal
from dblock.errors import DblockError

if TYPE_CHECKING:
    from dblock.cli.demo.events import Event
    from dblock.embedded import Server

SESSIONS_END_WITHIN = 3.0
"""Seconds that the sessions of the story's own workers may take to end after their processes."""


@command("demo")
@click.option(
    "--svg", type=click.Path(path_type=Path), metavar="FILE", help="Also draw the timeline into this file, as SVG."
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def demo(context: CommandContext, svg: Path | None, force: bool) -> None:
    """Watch two workers keep a ledger under one lock: one is killed, one is frozen (installs dblock if needed).

    Without a fence, a deposit is lost. With a fence, the books add up. The workers are real processes, with real
    signals and a real database. The ledger is removed when the story ends.
    """
    from dblock.admin import schema
    from dblock.cli.demo import story
    from dblock.cli.demo.timeline.lanes import panels
    from dblock.cli.demo.timeline.text import print_timeline

    context.else_embedded = True
    with exit_on_first_signal(), _output_file(svg, force) as file, _temporary_server(context):
        target = context.target()
        schema.install(target, context.schema)
        if not context.as_json:
            click.echo(f"Two workers, one lock and a ledger, on {target}:")
        events = story.tell_story(target, context.schema, (lambda event: None) if context.as_json else _print_event)
        drawn = panels(events)
        if file is not None:
            from dblock.cli.demo.timeline.svg import render_svg

            file.write(render_svg(drawn))
            file.flush()
    context.output(events, lambda: print_timeline(drawn))
    if svg is not None:
        click.echo(f"Wrote the timeline to {svg}.", err=True)


def _print_event(event: Event) -> None:
    if event.kind == "act":
        click.echo(f"\n{event.text}")
    else:
        click.echo(f"{event.at:6.2f} s  {event.worker:<6} {printable(event.text)}")


@contextmanager
def _output_file(path: Path | None, force: bool) -> Iterator[IO[str] | None]:
    """Open the picture's file before the story starts; if the story fails, remove a file that was new."""
    if path is None:
        yield None
        return
    try:
        new = not path.exists()
        file = path.open("r+" if force and not new else "x", encoding="utf-8")
    except FileExistsError:
        raise DblockError(f"File {str(path)!r} already exists. To overwrite it, add --force.") from None
    except OSError as error:
        raise OSError(
            f"File {str(path)!r} cannot be written: {error.strerror}. Choose another file with --svg."
        ) from None
    try:
        with file:
            yield file
            file.truncate()
    except BaseException:
        if new:
            path.unlink(missing_ok=True)
        raise


@contextmanager
def _temporary_server(context: CommandContext) -> Iterator[None]:
    """Stop an embedded server that was started for the story, unless another client is connected to it."""
    from dblock import embedded

    ours = context.resolve_target().embedded and embedded.status() is None
    try:
        yield
    finally:
        server = embedded.status() if ours else None
        if server is not None and _is_idle(server):
            server.stop()


def _is_idle(server: Server) -> bool:
    """Return whether no other client is connected. The session of a killed worker ends a moment after its process."""
    give_up_at = time.monotonic() + SESSIONS_END_WITHIN
    while server.in_use():
        if time.monotonic() >= give_up_at:
            return False
        time.sleep(0.05)
    return True
