"""The options that choose tokens, and how they go together: shared by the verbs that write text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import click

from cutaway.cli.common import Settings
from cutaway.cli.options import COUNT, Early, F, Number, Text
from cutaway.errors import RequestError

if TYPE_CHECKING:
    from cutaway.generation.sampling import Sampling
    from cutaway.model import Model

_DRAWING = ("seed", "top_k", "top_p", "min_p")  # what says how to draw, where a token is drawn
_COMPARING = ("length_penalty", "early_stopping")  # what says how beams are compared, where there are any
_MOST_BEAMS = 1024
_CHOOSING = (
    click.option(
        "-t", "--temperature", type=Number(0), metavar="X", help="0 takes the best token. [the model's own setting]"
    ),
    click.option("--top-k", type=COUNT, metavar="K", help="Keep the K best tokens."),
    click.option("--top-p", type=Number(0, 1), metavar="P", help="Keep the likeliest that reach P together."),
    click.option("--min-p", type=Number(0, 1), metavar="P", help="Keep those at least P times as likely as the best."),
    click.option("--repetition-penalty", type=Number(1e-6), metavar="X", help="Above 1: less likely to come again."),
    click.option(
        "--stop", type=Text(), multiple=True, metavar="TEXT", help="End at this text; may be given several times."
    ),
    click.option(
        "--no-repeat-ngram",
        "--no-repeat-ngram-size",
        "no_repeat_ngram_size",
        type=COUNT,
        metavar="N",
        help="No N tokens in a row come twice.",
    ),
    click.option("--min-tokens", type=COUNT, metavar="N", help="Do not end before N tokens."),
    click.option(
        "--bad-words",
        type=Text(),
        multiple=True,
        metavar="TEXT",
        help="Never write this; may be given several times.",
    ),
)
_SEARCHING = (
    click.option(
        "--num-beams",
        type=Number(1, _MOST_BEAMS, whole=True),
        metavar="B",
        help="Search for the likeliest answer, B at a time. [the model's own setting]",
    ),
    click.option(
        "--length-penalty", type=Number(-50, 50), metavar="X", help="Of beams: above 0 is for longer answers."
    ),
    click.option(
        "--early-stopping",
        type=Early(),
        metavar="true|false|never",
        help="Of beams: end at B answers, when better ones are unlikely, or impossible.",
    ),
    click.option(
        "--answers",
        "--n-best",
        "n",
        type=Number(1, _MOST_BEAMS, whole=True),
        metavar="K",
        help="Give K answers: the best of the beams, or as many drawn.",
    ),
)


def choosing(function: F) -> F:
    """Adds the options that choose tokens."""
    return _with(_CHOOSING, function)


def searching(function: F) -> F:
    """Adds the options of a search with beams, and of several answers."""
    return _with(_SEARCHING, function)


def _with(options: Iterable[Callable[[Any], Any]], function: F) -> F:
    decorated: Any = function
    for option in reversed(tuple(options)):
        decorated = option(decorated)
    return cast(F, decorated)


def check_together(options: dict[str, Any]) -> None:
    """Refuse what each make sense but not together, before anything is loaded.

    Raises:
        click.BadParameter: beams with a temperature or stop texts, or fewer of them than answers.
    """
    beams = options.get("num_beams") or 1
    if beams == 1:
        return
    if options.get("temperature"):
        raise click.BadParameter("beams search and a temperature draws: leave one out.", param_hint="--num-beams")
    if options.get("stop"):
        raise click.BadParameter("beams know no stop texts: leave one out.", param_hint="--num-beams")
    if (options.get("n") or 1) > beams:
        raise click.BadParameter(f"{beams} beams have no {options['n']} answers.", param_hint="--answers")


def settled(model: Model, options: dict[str, Any]) -> Sampling:
    """How tokens are chosen: what was given over what the checkpoint says.

    Raises:
        RequestError: the two do not go together.
    """
    from cutaway.generation.params import resolve

    own, n = model.settings.num_beams, options.get("n", 1)
    if own > 1 and "num_beams" not in options and not options.get("temperature"):
        what = f"this model searches with {own} beams"
        if options.get("stop"):
            raise RequestError(f"{what}, which know no stop texts", field="stop", hint="add --num-beams 1")
        if n > own:
            raise RequestError(f"{what}", field="n", expected=f"at most {own}", got=n, hint=f"add --num-beams {n}")
    return resolve(model.settings, model.spec.vocab_size, **options)


def most_tokens(model: Model, sampling: Sampling) -> int:
    """The most tokens that an answer may have."""
    if sampling.max_tokens is not None:
        return sampling.max_tokens
    # of the text, whose first token an encoder–decoder is given
    return model.spec.max_positions if sampling.max_length is None else max(1, sampling.max_length - 1)


def note_idle(settings: Settings, model: Model, options: dict[str, Any]) -> None:
    """Say which of the options that were given change nothing, because nothing is drawn or nothing is compared.

    Raises:
        RequestError: what was given and what the checkpoint says do not go together.
    """
    sampling = settled(model, options)
    if settings.json or settings.jsonl:
        return
    if sampling.num_beams > 1:
        _idle(settings, options, _DRAWING, "with beams, which search for the likeliest answer")
        return
    _idle(settings, options, _COMPARING, "without beams; try --num-beams 4")
    if sampling.temperature == 0:
        _idle(settings, options, _DRAWING, "at temperature 0, which takes the best token; try -t 0.8")
        if sampling.n > 1:
            settings.note(f"note: at temperature 0 all answers are alike; try -t 0.8, or --num-beams {sampling.n}")


def _idle(settings: Settings, options: dict[str, Any], names: Iterable[str], why: str) -> None:
    idle = [f"--{name.replace('_', '-')}" for name in names if name in options]
    if idle:
        settings.note(f"note: {', '.join(idle)} {'does' if len(idle) == 1 else 'do'} nothing {why}")


def given(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Options that were given."""
    return {key: value for key, value in pairs if value is not None and value != ()}
