"""`dblock completion`: print the script that lets a shell complete commands, options and lock names."""

from __future__ import annotations

import click

from dblock.cli.context import CommandContext, command

SETUP = {
    "bash": 'eval "$(dblock completion bash)"   in ~/.bashrc',
    "zsh": 'eval "$(dblock completion zsh)"   in ~/.zshrc, after compinit',
    "fish": "dblock completion fish > ~/.config/fish/completions/dblock.fish",
}


@command("completion", epilog="To enable it in every new shell: " + "; ".join(SETUP.values()) + ".")
@click.argument("shell", type=click.Choice(list(SETUP)))
def completion(context: CommandContext, shell: str) -> None:
    """Print the completion script for a shell."""
    from click.shell_completion import get_completion_class

    from dblock.cli import dblock

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(dblock, {}, "dblock", "_DBLOCK_COMPLETE").source()
    context.output({"shell": shell, "script": script}, lambda: click.echo(script))
