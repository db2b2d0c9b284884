"""Generating, and the report of it: shared by the verbs that write text."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from cutaway.cli.choosing import settled
from cutaway.cli.common import Settings
from cutaway.cli.interrupts import interruptible
from cutaway.cli.text import Look, counted

if TYPE_CHECKING:
    from cutaway.generation.generate import Generation, TokenLogprob
    from cutaway.model import Model, Prompt


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
