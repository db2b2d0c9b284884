"""Texts for verbs that take several, and the model for verbs that need one of a certain kind."""

from __future__ import annotations

import sys

import click

from cutaway.cli.common import Settings, read_stdin

SENTENCES = "sentence-transformers/all-MiniLM-L6-v2"


def texts_arguments(texts: tuple[str, ...], *, missing: str) -> list[str]:
    """The texts a verb works on: its arguments, or the lines of standard input for ``-`` or where that is a pipe.

    Raises:
        click.UsageError: neither is there; ``missing`` says what to do.
        RequestError, TokenizerError: nothing came, or no UTF-8.
    """
    if texts and texts != ("-",):
        return list(texts)
    if not texts and sys.stdin.isatty():
        raise click.UsageError(missing, click.get_current_context())
    return read_stdin().splitlines()


def model_of_kind(settings: Settings, needs: str, default: str | None = None) -> None:
    """Take ``default`` where no ``--model`` was given, or ask for one.

    Raises:
        click.UsageError: there is none.
    """
    context = click.get_current_context()
    if context.get_parameter_source("model") is click.core.ParameterSource.COMMANDLINE:
        return
    if default is None:
        raise click.UsageError(f"This needs {needs}. Name one with -m: a hub id or a folder.", context)
    settings.model = default
