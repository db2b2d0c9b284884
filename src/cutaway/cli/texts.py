"""Texts for verbs that take several, and the model for verbs that need one of a certain kind."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from cutaway.cli.common import Settings, as_input, read_stdin
from cutaway.cli.text import Cell, Look, cut, visible
from cutaway.errors import ContextExceeded

SENTENCES = "sentence-transformers/all-MiniLM-L6-v2"
_SHOWN = 40  # columns of a text that an error shows


def texts_arguments(texts: tuple[str, ...], *, missing: str) -> list[str]:
    """The texts a verb works on: its arguments, or the lines of standard input for ``-`` or where that is a pipe.

    Every line is a text, an empty one too: answers stay in step with what was piped in.

    Raises:
        click.UsageError: neither is there; ``missing`` says what to do.
        RequestError, TokenizerError: nothing came, or no UTF-8.
    """
    if texts and texts != ("-",):
        return list(texts)
    if not texts and sys.stdin.isatty():
        raise click.UsageError(missing, click.get_current_context())
    # not splitlines(), which cuts at a form feed and at separators of Unicode's too
    return [line.removesuffix("\r") for line in read_stdin().split("\n")]


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


@contextmanager
def reading(texts: Sequence[str], first: int = 0) -> Iterator[None]:
    """Reads texts; what is wrong with one of them names it as people count, and shows its beginning.

    Args:
        texts: what is read.
        first: how many came before these.
    """
    try:
        with as_input():
            yield
    except ContextExceeded as error:
        if found := re.fullmatch(r"texts/([0-9]+)", error.field or ""):
            place, look = int(found[1]), Look()
            error.field = f"text {first + place + 1}"
            error.hint = f"shorten it, or cut it in two: {cut(visible(texts[place], look), _SHOWN, look)}"
        raise


def shown_text(text: str, look: Look, columns: int) -> Cell:
    """A text as one can see it, on one line."""
    return Cell(cut(visible(text, look), columns, look), "bold") if text else Cell("(empty)", "dim")
