"""The entry: a static table of verbs, so that ``--help`` costs no import but click's."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import TextIO, cast

import click

from cutaway import __version__
from cutaway.cli.failures import INTERRUPTED, PIPE_CLOSED, TERMINATED, guarded

# verb → what it does, under the heading it stands with. Its module is cutaway.cli.{verb}.
VERBS: dict[str, dict[str, str]] = {
    "Use a model": {
        "run": "Complete a text, as it comes.",
        "chat": "Talk with a model.",
    },
    "Look inside": {
        "next": "The next token's distribution, as bars.",
        "show": "What a model is made of, or one of its tensors.",
        "tokenize": "Text as tokens: ids, pieces, places, bytes.",
    },
    "Set up": {
        "models": "The catalogue, and what of it is here.",
        "pull": "Fetch a model.",
        "doctor": "Versions, devices, folders, and a self-test.",
        "completion": "Shell completion for bash, zsh or fish.",
    },
}
TOUR = """\
cutaway run "Once upon a time"            complete a text (the first time this fetches a 94 MiB model)
cutaway chat                              talk with it
cutaway next "The capital of France is"   see what it expects next, and how surely
cutaway show                              see what it is made of; --taps for every quantity inside
cutaway --help                            all verbs; cutaway VERB --help for one of them
"""


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
    return guarded(lambda: cli.main(list(arguments), prog_name="cutaway", standalone_mode=False), arguments)


def main() -> int:
    """Run this process's command line; return its exit code."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    signal.signal(signal.SIGTERM, stop)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # what an encoding cannot say is escaped rather than fatal
            cast("TextIO", stream).reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]
    code = invoke(sys.argv[1:])
    if code == PIPE_CLOSED:
        # Python flushes once more on the way out; nobody listens there.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an impatient second Ctrl-C prints no traceback either
    return code
