"""`dblock demo`: see it happen, and then all of it at once: a timeline, at the terminal or as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from dblock.cli.context import Asked, command
from dblock.cli.output import shown
from dblock.cli.signals import ended_once
from dblock.errors import DblockError

if TYPE_CHECKING:
    from dblock.cli.demo.events import Event


@command("demo")
@click.option(
    "--svg", type=click.Path(path_type=Path), metavar="FILE", help="Draw the timeline into this file too, as SVG."
)
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
def demo(asked: Asked, svg: Path | None, force: bool) -> None:
    """Two workers keep a ledger under one lock: one is killed, one is frozen (installs what is missing).

    First without a fence, and a deposit is lost; then with one, and the books add up. The workers are processes, the
    signals and the database are real, and the ledger goes when the story ends.
    """
    from dblock.admin import schema
    from dblock.cli.demo import story
    from dblock.cli.demo.timeline.lanes import panels
    from dblock.cli.demo.timeline.text import print_timeline

    with ended_once(), _picture(svg, force) as picture, _server_for_now(asked):
        target = asked.target()
        schema.install(target, asked.schema)
        if not asked.as_json:
            click.echo(f"Two workers, one lock and a ledger, on {target}:")
        events = story.tell_story(target, asked.schema, (lambda event: None) if asked.as_json else _say)
        drawn = panels(events)
        if picture is not None:
            from dblock.cli.demo.timeline.svg import svg_of

            picture.write(svg_of(drawn))
            picture.flush()
    asked.answer(events, lambda: print_timeline(drawn))
    if svg is not None:
        click.echo(f"The timeline is in {svg}.", err=True)


def _say(event: Event) -> None:
    if event.kind == "act":
        click.echo(f"\n{event.text}")
    else:
        click.echo(f"{event.at:6.2f} s  {event.who:<6} {shown(event.text)}")


@contextmanager
def _picture(path: Path | None, force: bool) -> Iterator[IO[str] | None]:
    """Open the file for the picture before anything happens; a file that was made for nothing goes again."""
    if path is None:
        yield None
        return
    try:
        new = not path.exists()
        picture = path.open("r+" if force and not new else "x", encoding="utf-8")
    except FileExistsError:
        raise DblockError(f"File {str(path)!r} is there already. Add --force to replace it.") from None
    except OSError as error:
        raise DblockError(f"File {str(path)!r} cannot be written: {error.strerror}.") from None
    try:
        with picture:
            yield picture
            picture.truncate()
    except BaseException:
        if new:
            path.unlink(missing_ok=True)
        raise


@contextmanager
def _server_for_now(asked: Asked) -> Iterator[None]:
    """Stop an embedded server that was started for the story, unless somebody has come to use it meanwhile."""
    from dblock import embedded

    ours = asked.unstarted().embedded and embedded.status() is None
    try:
        yield
    finally:
        server = embedded.status() if ours else None
        if server is not None and not server.in_use():
            server.stop()
