"""The options that give an answer a form."""

from __future__ import annotations

from typing import Any, cast

import click

from cutaway.cli.common import as_input
from cutaway.cli.options import F, Text
from cutaway.errors import FormatError

_MOST = 1 << 20  # bytes of a file
_FILES = ("schema", "grammar")
_FORMS = (
    click.option("--schema", type=Text(), metavar="FILE", help="The answer is JSON of the JSON schema in this file."),
    click.option("--regex", type=Text(), metavar="TEXT", help="The answer matches this regular expression."),
    click.option("--grammar", type=Text(), metavar="FILE", help="The answer is of the Lark grammar in this file."),
    click.option(
        "--choice",
        "choices",
        type=Text(),
        multiple=True,
        metavar="TEXT",
        help="The answer is this text; may be given several times, for one of several.",
    ),
)


def forming(function: F) -> F:
    """Adds the options that give an answer a form."""
    decorated: Any = function
    for option in reversed(_FORMS):
        decorated = option(decorated)
    return cast(F, decorated)


def read_forms(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the files that they name as texts.

    Raises:
        click.BadParameter: more than one form.
        StorageError, LimitExceeded, FormatError: a file that cannot be read, or is no text.
    """
    given = [name for name in ("schema", "regex", "grammar", "choices") if options.get(name)]
    if len(given) > 1:
        raise click.BadParameter("an answer has one form: leave the others out.", param_hint=f"--{given[0]}")
    if given and (options.get("num_beams") or 1) > 1:
        raise click.BadParameter("beams know no form of an answer: leave one out.", param_hint="--num-beams")
    read = {name: _text(name, options[name]) for name in _FILES if options.get(name)}
    return {**options, **read}


def _text(name: str, path: str) -> str:
    from cutaway.formats.files import read_small

    if path.lstrip().startswith(("{", "start:")):
        raise click.BadParameter("a file is wanted: write what is in it to one, and name that.", param_hint=f"--{name}")
    with as_input():
        try:
            return read_small(path, limit=_MOST).decode()
        except UnicodeDecodeError as error:
            raise FormatError("is not UTF-8", path=path, offset=error.start) from error
