"""The options that guess ahead: who guesses the next tokens, and how many at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import click

from cutaway.cli.common import Settings, as_input, load_model
from cutaway.cli.options import F, Number, Text

if TYPE_CHECKING:
    from cutaway.model import Model

_MOST = 64
_GUESSING = (
    click.option(
        "--draft",
        type=Text(),
        metavar="MODEL|prompt",
        help="Faster: guess ahead by a smaller model of the same vocabulary, or from the text so far.",
    ),
    click.option(
        "--draft-tokens", type=Number(1, _MOST, whole=True), metavar="K", help="Guess at most K tokens at a time. [15]"
    ),
)


def guessing(function: F) -> F:
    """Adds the options that guess ahead."""
    decorated: Any = function
    for option in reversed(_GUESSING):
        decorated = option(decorated)
    return cast(F, decorated)


def check_draft(options: dict[str, Any]) -> None:
    """Refuse what makes no sense before anything is loaded.

    Raises:
        click.BadParameter: beams, or a number of guesses and nobody who makes them.
    """
    if options["draft"] is None and options["draft_tokens"] is not None:
        raise click.BadParameter("who guesses? Give --draft as well.", param_hint="--draft-tokens")
    if options["draft"] is not None and (options.get("num_beams") or 1) > 1:
        raise click.BadParameter("beams take no draft: leave one out.", param_hint="--num-beams")


def load_draft(settings: Settings, options: dict[str, Any], model: Model) -> dict[str, Any]:
    """The options with a model in its name's place.

    Raises:
        RequestError: it cannot guess for this model.
    """
    if options["draft"] in (None, "prompt"):
        return options
    from cutaway.generation.drafting import drafting

    guesser = load_model(replace(settings, model=options["draft"], revision=None))
    with as_input():
        drafting(guesser, None, model.transformer, model.tokenizer)
    return {**options, "draft": guesser}
