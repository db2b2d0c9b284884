"""The options that choose tokens, and the report of a generation: shared by the verbs that write text."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

import click

from cutaway.cli.common import Settings
from cutaway.cli.interrupts import interruptible
from cutaway.cli.options import COUNT, F, Number, Text
from cutaway.cli.text import counted

if TYPE_CHECKING:
    from cutaway.generation.generate import Generation, TokenLogprob
    from cutaway.model import Model, Prompt

_DRAWING = ("seed", "top_k", "top_p", "min_p")  # what says how to draw, where a token is drawn
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
)


def choosing(function: F) -> F:
    """Adds the options that choose tokens, and --seed."""
    decorated: Any = function
    for option in reversed(_CHOOSING):
        decorated = option(decorated)
    return cast(F, decorated)


@dataclass(slots=True)
class Clock:
    """When things happened, in seconds of a clock that only goes forward."""

    loaded_in: float = 0.0
    start: float = field(default_factory=time.perf_counter)
    first: float | None = None  # when text first came
    first_tokens: int = 0  # tokens produced by then
    end: float | None = None

    def report(self, result: Generation) -> dict[str, float | None]:
        """Seconds and tokens a second; None where there was nothing to measure."""
        end = self.end or time.perf_counter()
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


def as_dict(
    model: Model, result: Generation, options: dict[str, Any], clock: Clock, settings: Settings
) -> dict[str, Any]:
    """A generation as the object that --json prints."""
    from cutaway.generation.params import resolve

    chosen = asdict(resolve(model.settings, model.spec.vocab_size, **options))
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "usage": {**asdict(result.usage), "total_tokens": result.usage.total_tokens},
        "logprobs": None if result.logprobs is None else [_entry(model, entry) for entry in result.logprobs],
        "timing": clock.report(result),
        "model": {"name": settings.model, "origin": model.origin, "family": model.spec.family},
        "settings": {key: _plain(value) for key, value in chosen.items() if key not in ("n", "logit_bias")},
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
    """A token's text; its number where there is no tokenizer."""
    return f"<{token}>" if model.tokenizer is None else model.tokenizer.pieces([token])[0].text


def stats_line(timing: dict[str, float | None], result: Generation) -> str:
    """What --stats says."""

    def rate(value: float | None) -> str:
        return "–" if value is None else f"{value:,.1f} tokens/s"

    first = timing["first_token_s"]
    return (
        f"prefill {counted(result.usage.prompt_tokens, 'token')}, {rate(timing['prefill_tokens_per_s'])}; "
        f"first text after {'–' if first is None else f'{first:.3f} s'}; "
        f"decode {counted(result.usage.completion_tokens, 'token')}, {rate(timing['decode_tokens_per_s'])}; "
        f"load {timing['load_s']:.2f} s"
    )


def note_idle(settings: Settings, model: Model, options: dict[str, Any]) -> None:
    """Say which of the options that were given change nothing, because the best token is taken each time."""
    idle = [f"--{name.replace('_', '-')}" for name in _DRAWING if name in options]
    greedy = options.get("temperature", model.settings.temperature) == 0
    if idle and greedy and not (settings.json or settings.jsonl):
        does = "does" if len(idle) == 1 else "do"
        settings.note(
            f"note: {', '.join(idle)} {does} nothing at temperature 0, which takes the best token; try -t 0.8"
        )


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
