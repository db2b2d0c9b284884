"""The options that choose tokens, and the report of a generation: shared by the verbs that write text."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

import click

from cutaway.cli.common import Settings
from cutaway.cli.interrupts import interruptible
from cutaway.cli.options import COUNT, Early, F, Number, Text
from cutaway.cli.text import Look, counted
from cutaway.errors import RequestError

if TYPE_CHECKING:
    from cutaway.generation.generate import Generation, TokenLogprob
    from cutaway.generation.sampling import Sampling
    from cutaway.model import Model, Prompt

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
        "--choices",
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
        raise click.BadParameter(f"{beams} beams have no {options['n']} answers.", param_hint="--choices")


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


@dataclass(slots=True)
class Clock:
    """When things happened, in seconds of a clock that only goes forward."""

    loaded_in: float = 0.0
    start: float = field(default_factory=time.perf_counter)
    first: float | None = None  # when text first came
    first_tokens: int = 0  # tokens produced by then
    end: float | None = None
    whole: bool = False  # the text came at the end: reading and writing were not told apart

    def report(self, *results: Generation) -> dict[str, float | None]:
        """Seconds and tokens a second, of all answers to a prompt; None where there was nothing to measure."""
        end = self.end or time.perf_counter()
        result, count = results[0], sum(one.usage.completion_tokens for one in results)
        if self.whole:
            total = end - self.start
            rate = round(count / total, 1) if count and total > 0 else None
            times = {"load_s": round(self.loaded_in, 4), "first_token_s": None, "total_s": round(total, 4)}
            return {**times, "prefill_tokens_per_s": None, "decode_tokens_per_s": rate}
        first = self.first or end
        prefill, decode = first - self.start, end - first
        later = result.usage.completion_tokens - self.first_tokens
        return {
            "load_s": round(self.loaded_in, 4),
            "first_token_s": None if self.first is None else round(prefill, 4),
            "total_s": round(end - self.start, 4),
            "prefill_tokens_per_s": round(result.usage.prompt_tokens / prefill, 1) if prefill > 0 else None,
            "decode_tokens_per_s": round(later / decode, 1) if later > 0 and decode > 0 else None,
        }


def stream(
    model: Model, prompt: Prompt, options: dict[str, Any], clock: Clock, show: Callable[[str], None]
) -> Generation:
    """Generate, showing each piece as it comes.

    Args:
        options: arguments of ``Model.stream``; a missing seed is drawn here, so that it can be reported.
        clock: is told when the first piece came and when the last.
    """
    if options.get("seed") is None:
        options["seed"] = secrets.randbits(53)  # a number that every reader of JSON keeps exactly
    clock.start = time.perf_counter()
    with interruptible():
        pieces = model.stream(prompt, **options)
        for piece in pieces:
            if clock.first is None:
                clock.first = time.perf_counter()
                clock.first_tokens = len(pieces.result.tokens)
            show(piece)
    clock.end = time.perf_counter()
    return pieces.result


def generate(
    model: Model, prompt: Prompt, options: dict[str, Any], clock: Clock, settings: Settings, says: str
) -> list[Generation]:
    """Generate what only comes whole: the answers of beams, or several answers. As :func:`stream` otherwise.

    Args:
        says: what stands on a terminal's standard error until then.
    """
    if options.get("seed") is None:
        options["seed"] = secrets.randbits(53)
    clock.whole, clock.start = True, time.perf_counter()
    with interruptible(), _waiting(settings, says):
        found = model.generate(prompt, **options)
    clock.end = time.perf_counter()
    return found if isinstance(found, list) else [found]


@contextmanager
def _waiting(settings: Settings, says: str) -> Iterator[None]:
    """A line that is there as long as something takes, on a terminal."""
    shown = not settings.quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if shown:
        print(Look.of(sys.stderr).paint(says, "dim"), end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def as_dict(
    model: Model, results: list[Generation], options: dict[str, Any], clock: Clock, settings: Settings
) -> dict[str, Any]:
    """A generation as the object that --json prints: the first answer, and where there are several, all of them."""
    chosen = asdict(settled(model, options))
    answers = [_answer(model, result) for result in results]
    return {
        **answers[0],
        **({"choices": answers} if len(answers) > 1 else {}),
        "timing": clock.report(*results),
        "model": {"name": settings.model, "origin": model.origin, "family": model.spec.family},
        "settings": {key: _plain(value) for key, value in chosen.items() if key not in ("n", "logit_bias")},
    }


def _answer(model: Model, result: Generation) -> dict[str, Any]:
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "score": result.score,
        "usage": {**asdict(result.usage), "total_tokens": result.usage.total_tokens},
        "logprobs": None if result.logprobs is None else [_entry(model, entry) for entry in result.logprobs],
    }


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else list(value) if isinstance(value, tuple) else value


def _entry(model: Model, entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token": entry.token,
        "text": token_text(model, entry.token),
        "logprob": entry.logprob,
        "top": [{"token": t, "text": token_text(model, t), "logprob": p} for t, p in entry.top],
    }


def token_text(model: Model, token: int) -> str:
    """A produced token's text; its number where there is no tokenizer."""
    return f"<{token}>" if model.tokenizer is None else model.tokenizer.target.pieces([token])[0].text


def stats_line(timing: dict[str, float | None], *results: Generation) -> str:
    """What --stats says."""

    def rate(value: float | None) -> str:
        return "–" if value is None else f"{value:,.1f} tokens/s"

    first, read = timing["first_token_s"], results[0].usage.prompt_tokens
    written = sum(result.usage.completion_tokens for result in results)
    return (
        f"prefill {counted(read, 'token')}, {rate(timing['prefill_tokens_per_s'])}; "
        f"first text after {'–' if first is None else f'{first:.3f} s'}; "
        f"decode {counted(written, 'token')}, {rate(timing['decode_tokens_per_s'])}; "
        f"load {timing['load_s']:.2f} s"
    )


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


def note_end(settings: Settings, model: Model, result: Generation, max_tokens: int, more: str = "-n") -> None:
    """Why an answer ended, for --verbose; on a terminal, a mark where it was cut. ``more`` is what raises the limit."""
    shown = sys.stdout.isatty() and not (settings.json or settings.jsonl or settings.to_file)
    if settings.verbose:
        settings.detail(finish_line(model, result, max_tokens))
    elif shown and result.finish_reason == "length":
        count = result.usage.completion_tokens
        full = "the model has no further position" if count < max_tokens else f"{more} takes a larger limit"
        settings.note(f"(cut after {counted(count, 'token')}: {full})")


def finish_line(model: Model, result: Generation, max_tokens: int) -> str:
    """Why a generation ended, in words."""
    if result.finish_reason == "stop":
        return "ended: an end token, or a stop text"
    limit = model.spec.position_limit
    if result.usage.completion_tokens < max_tokens and limit is not None:
        return f"ended: length; the model has no position after the {limit}th"
    return f"ended: length (--max-tokens {max_tokens})"


def given(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Options that were given."""
    return {key: value for key, value in pairs if value is not None and value != ()}
