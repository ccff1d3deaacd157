"""`dblock graph`: draw the wait-for graph, as text or as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dblock.admin.graph.waits import Graph, build_graph, graph_data, select
from dblock.cli.context import CommandContext, command
from dblock.cli.graph.text import Line, cycle_warnings, plain_text, wait_tree
from dblock.cli.output import printable, to_json
from dblock.errors import DblockError

MAX_ROWS = 10_000
"""The number of locks, and of waiters, that are read at most."""

FORMATS = {".svg": "svg", ".dot": "dot", ".gv": "dot", ".mmd": "mermaid"}
"""The format of a file, by the end of its name."""


@command("graph")
@click.argument("pattern", default="*")
@click.option("-a", "--all", "every", is_flag=True, help="Include locks without waiters.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["text", "mermaid", "dot", "svg"]),
    help="Output format (default: by the end of FILE's name, else text).",
)
@click.option("--output", metavar="FILE", help="File to write (default: standard output).")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def graph(
    context: CommandContext, pattern: str, every: bool, format_: str | None, output: str | None, force: bool
) -> None:
    """Draw which clients wait for which, and find deadlocks.

    PATTERN selects locks by name: * matches any text, ? any character. Everything connected with them is drawn too.
    """
    if context.as_json and format_ is not None:
        raise click.UsageError("--json and --format each choose the output format. Use only one of them.")
    if format_ is None and output is not None and not context.as_json:
        format_ = FORMATS.get(Path(output).suffix.lower())
    from dblock.admin.inspect import overview

    with overview(context.installed_target(), context.schema) as database, database.one_moment():
        locks, waiters = database.locks(limit=MAX_ROWS + 1), database.waiters(limit=MAX_ROWS + 1)
        waits = database.waits(limit=MAX_ROWS)
    found = select(build_graph(locks, waiters, waits), pattern, every=every)
    if len(locks) > MAX_ROWS or len(waiters) > MAX_ROWS:
        click.echo(f"There are more than {MAX_ROWS} locks or waiters; the others are left out.", err=True)
    if not context.as_json and not found.locks and format_ in (None, "text"):
        which = "" if pattern == "*" else f" for a lock that matches {printable(pattern)!r}"
        click.echo(
            f"No client is waiting{which}.{'' if every else ' To include locks that are only held, add --all.'}",
            err=True,
        )
    if output is not None and output != "-":
        _write(Path(output), render_graph(context, found, format_), force)
        click.echo(f"Wrote {printable(output)}.", err=True)
    elif format_ in (None, "text") and not context.as_json and sys.stdout.isatty():
        _show(cycle_warnings(found) + wait_tree(found))
    else:
        click.echo(render_graph(context, found, format_), nl=False)
    if (found.cycles or found.deadlocks) and (output is not None or format_ not in (None, "text")):
        # A picture may stay unseen for a while, so the warning goes to standard error too.
        click.echo(plain_text(cycle_warnings(found)), err=True, nl=False)


def render_graph(context: CommandContext, found: Graph, format_: str | None) -> str:
    """Return the graph in the requested format."""
    if context.as_json:
        return to_json(graph_data(found), indent=2) + "\n"
    if format_ == "svg":
        from dblock.admin.graph.svg import svg

        return svg(found)
    if format_ in ("mermaid", "dot"):
        from dblock.cli.graph.markup import dot, mermaid

        return mermaid(found) if format_ == "mermaid" else dot(found)
    return plain_text(cycle_warnings(found) + wait_tree(found))


def _show(lines: list[Line]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for line in lines:
        # The terminal wraps long lines, so that nothing is cut.
        console.print(Text.assemble(*line), soft_wrap=True)


def _write(path: Path, text: str, force: bool) -> None:
    """Write a new file; with `force`, overwrite an existing one."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise DblockError(f"{printable(path)} already exists. To overwrite it, add --force.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"{printable(path)} cannot be written: {reason}. Choose another file with --output.") from error
