"""`dblock demo`: see it happen."""

from __future__ import annotations

import click

from dblock.cli.asked import Asked, command


@command("demo")
def demo(asked: Asked) -> None:
    """Let processes contend for one lock; one is killed, one is frozen (installs what is missing)."""
    from dblock import demo as story
    from dblock import embedded, schema

    target = asked.unstarted()
    ours = target.embedded and embedded.status() is None
    try:
        target = asked.target()
        schema.install(target, asked.schema)
        click.echo(f"Three workers and one lock, on {target}:\n")
        story.tell_story(target, asked.schema, click.echo)
    finally:
        # What was started for the story ends with it, unless somebody has come to use it meanwhile.
        server = embedded.status() if ours else None
        if server is not None and not server.in_use():
            server.stop()
