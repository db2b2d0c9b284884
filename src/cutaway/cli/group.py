"""The root command: its verbs are imported when they are asked for, so that ``--help`` costs no import but click's."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import cast

import click

from cutaway import __version__
from cutaway.cli.failures import guarded
from cutaway.cli.main import TOUR, VERBS

COMPLETE = "_CUTAWAY_COMPLETE"  # what a shell sets to ask for completions


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every verb."""
        return [verb for verbs in VERBS.values() for verb in verbs]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb of this name, imported now."""
        if cmd_name not in self.list_commands(ctx):
            return None
        return cast(click.Command, importlib.import_module(f"cutaway.cli.{cmd_name}").command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, with nearest names for a verb that there is not."""
        if not args[0].startswith("-") and args[0] not in self.list_commands(ctx) and not ctx.resilient_parsing:
            import difflib

            near = difflib.get_close_matches(args[0].lower(), self.list_commands(ctx), n=2, cutoff=0.5)
            guess = f" Did you mean {' or '.join(near)}?" if near else ""
            raise click.UsageError(f"There is no verb {args[0]!r}.{guess}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of verbs, without importing any."""
        for heading, verbs in VERBS.items():
            with formatter.section(heading):
                formatter.write_dl(list(verbs.items()), col_max=14)


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, "-V", "--version", message="cutaway %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """One readable transformer you can run and see through.

    Data goes to standard output, everything else to standard error. Exit codes: 0 done, 2 usage, 3 bad input,
    4 memory or disk, 5 network, 70 a bug of ours, 130 interrupted.
    """
    if ctx.invoked_subcommand is None:
        click.echo(TOUR, nl=False)


def invoke(arguments: Sequence[str]) -> int:
    """Run one command line in this process; return its exit code."""
    return guarded(lambda: _command_line(list(arguments)), arguments)


def _command_line(arguments: list[str]) -> int:
    """As click's own ``main``, which would make a closed pipe and an interrupt look like errors."""
    if asked := os.environ.get(COMPLETE):
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "cutaway", COMPLETE, asked)
    try:
        with cli.make_context("cutaway", arguments) as context:
            cli.invoke(context)
    except click.exceptions.Exit as ending:
        return ending.exit_code
    return 0
