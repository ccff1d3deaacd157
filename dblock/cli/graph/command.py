"""`dblock graph`: who waits for whom, as text or as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dblock.admin.inspect import overview
from dblock.cli.context import Asked, command
from dblock.cli.graph.text import Line, circles, plain_text, tree
from dblock.cli.graph.waits import Graph, build, facts, part
from dblock.cli.output import as_json, shown
from dblock.errors import DblockError

MOST = 10_000
"""How many locks, and how many who wait, are taken in."""


@command("graph")
@click.argument("pattern", default="*")
@click.option("-a", "--all", "every", is_flag=True, help="Also locks that nobody waits for.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "mermaid", "dot", "svg"]),
    help="What to draw (default: text).",
)
@click.option("--output", metavar="FILE", help="Where to write it (default: standard output).")
@click.option("--force", is_flag=True, help="Overwrite the file.")
def graph(asked: Asked, pattern: str, every: bool, form: str | None, output: str | None, force: bool) -> None:
    """Show who waits for whom, and find those who wait for each other.

    PATTERN picks locks by name, with * for any text and ? for any character; whatever hangs together with them is
    shown too.
    """
    if asked.as_json and form is not None:
        raise click.UsageError("--json and --format are two forms of the same; give one of them.")
    with overview(asked.installed(), asked.schema) as look, look.one_moment():
        locks, waiters = look.locks(limit=MOST + 1), look.waiters(limit=MOST + 1)
    found = part(build(locks, waiters), pattern, every=every)
    if len(locks) > MOST or len(waiters) > MOST:
        click.echo(f"There are more than {MOST} locks or waiters; only so many were looked at.", err=True)
    if not asked.as_json and not found.locks and form in (None, "text"):
        which = "" if pattern == "*" else f" for a lock that fits {shown(pattern)!r}"
        click.echo(
            f"Nobody waits{which}.{'' if every else ' With --all, locks that are held are shown too.'}", err=True
        )
    if output is not None and output != "-":
        _write(Path(output), drawn(asked, found, form), force)
        click.echo(f"Wrote {shown(output)}.", err=True)
    elif form in (None, "text") and not asked.as_json and sys.stdout.isatty():
        _show(circles(found) + tree(found))
    else:
        click.echo(drawn(asked, found, form), nl=False)
    if found.circles and (output is not None or form not in (None, "text")):
        # A picture may not be looked at for a while.
        click.echo(plain_text(circles(found)), err=True, nl=False)


def drawn(asked: Asked, found: Graph, form: str | None) -> str:
    """Return the graph in the form that was asked for."""
    if asked.as_json:
        return as_json(facts(found), indent=2) + "\n"
    if form == "svg":
        from dblock.cli.graph.svg import svg

        return svg(found)
    if form in ("mermaid", "dot"):
        from dblock.cli.graph.markup import dot, mermaid

        return mermaid(found) if form == "mermaid" else dot(found)
    return plain_text(circles(found) + tree(found))


def _show(lines: list[Line]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for line in lines:
        # A line that is too long goes on in the next, as a terminal has it: nothing is left out.
        console.print(Text.assemble(*line), soft_wrap=True)


def _write(path: Path, text: str, force: bool) -> None:
    """Write a file, a new one unless told otherwise."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise DblockError(f"{shown(path)} is there already; --force overwrites it.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DblockError(f"{shown(path)} cannot be written: {reason}. Choose another file by --output.") from error
