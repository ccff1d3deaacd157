"""`dblock completion`: what a shell needs to complete commands, options and the names of locks."""

from __future__ import annotations

import click

from dblock.cli.context import Asked, command

WHERE = {
    "bash": 'eval "$(dblock completion bash)"   in ~/.bashrc',
    "zsh": 'eval "$(dblock completion zsh)"   in ~/.zshrc, after compinit',
    "fish": "dblock completion fish > ~/.config/fish/completions/dblock.fish",
}


@command("completion", epilog="To have it in every shell: " + "; ".join(WHERE.values()) + ".")
@click.argument("shell", type=click.Choice(list(WHERE)))
def completion(asked: Asked, shell: str) -> None:
    """Print the script that completes dblock in a shell."""
    from click.shell_completion import get_completion_class

    from dblock.cli import dblock

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(dblock, {}, "dblock", "_DBLOCK_COMPLETE").source()
    asked.answer({"shell": shell, "script": script}, lambda: click.echo(script))
