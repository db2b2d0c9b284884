"""``cutaway completion``: what a shell needs to complete our words."""

from __future__ import annotations

import click

from cutaway.cli.common import Settings
from cutaway.cli.options import shared


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@shared("out", "quiet", "debug")
def command(settings: Settings, /, shell: str) -> None:
    """Print the completion script for SHELL.

    In ~/.bashrc: eval "$(cutaway completion bash)". In ~/.zshrc: the same with zsh.
    In ~/.config/fish/config.fish: cutaway completion fish | source
    """
    from click.shell_completion import get_completion_class

    from cutaway.cli.group import COMPLETE, cli

    kind = get_completion_class(shell)
    assert kind is not None
    settings.emit(kind(cli, {}, "cutaway", COMPLETE).source() + "\n")
