"""Generating, and the report of it: shared by the verbs that write text."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cutaway.cli.choosing import settled
from cutaway.cli.common import Settings
from cutaway.cli.interrupts import interruptible
from cutaway.cli.text import Cell, Look, counted, table, visible

if TYPE_CHECKING:
    from cutaway.generation.generate import Generation, TokenLogprob
    from cutaway.model import Model, Prompt


def times(load_s: float, results: Sequence[Generation]) -> dict[str, float | None]:
    """Seconds and tokens a second, of all answers to a prompt; None where there was nothing to measure.

    The first tokens come with the prompt, so what is written is counted after them.
    """
    found = [result.timing for result in results if result.timing is not None]
    firsts = [timing.first_token_s for timing in found if timing.first_token_s is not None]
    total = max((timing.total_s for timing in found), default=0.0)
    since = min(firsts, default=found[0].prompt_s if found else None)
    later = sum(timing.tokens for timing in found) - len(firsts)
    decode = 0.0 if since is None else total - since
    read = found[0].prompt_tokens_per_s if found else None
    return {
        "load_s": round(load_s, 4),
        "first_token_s": round(min(firsts), 4) if firsts else None,
        "total_s": round(total, 4),
        "prefill_tokens_per_s": None if read is None else round(read, 1),
        "decode_tokens_per_s": round(later / decode, 1) if later > 0 and decode > 0 else None,
    }


def stream(model: Model, prompt: Prompt, options: dict[str, Any], show: Callable[[str], None]) -> Generation:
    """Generate, showing each piece as it comes.

    Args:
        options: arguments of ``Model.stream``; a missing seed is drawn here, so that it can be reported.
    """
    if options.get("seed") is None:
        options["seed"] = secrets.randbits(53)  # a number that every reader of JSON keeps exactly
    with interruptible():
        pieces = model.stream(prompt, **options)
        for piece in pieces:
            show(piece)
    return pieces.result


def generate(model: Model, prompt: Prompt, options: dict[str, Any], settings: Settings, says: str) -> list[Generation]:
    """Generate what only comes whole: the answers of beams, or several answers. As :func:`stream` otherwise.

    Args:
        says: what stands on a terminal's standard error until then.
    """
    if options.get("seed") is None:
        options["seed"] = secrets.randbits(53)
    with interruptible(), _waiting(settings, says):
        found = model.generate(prompt, **options)
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
    model: Model, results: list[Generation], options: dict[str, Any], load_s: float, settings: Settings
) -> dict[str, Any]:
    """A generation as the object that --json prints: the first answer, and where there are several, all of them."""
    from cutaway.generation.report import as_plain

    chosen = asdict(settled(model, options))
    return {
        **as_plain(results, model.tokenizer),
        "timing": times(load_s, results),
        "model": {"name": settings.model, "origin": model.origin, "family": model.spec.family},
        "settings": {key: _plain(value) for key, value in chosen.items() if key not in ("n", "logit_bias")},
    }


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else list(value) if isinstance(value, tuple) else value


def token_text(model: Model, token: int) -> str:
    """A produced token's text; its number where there is no tokenizer."""
    return f"<{token}>" if model.tokenizer is None else model.tokenizer.target.pieces([token])[0].text


def logprob_lines(model: Model, entries: Iterable[tuple[int, TokenLogprob | None]], look: Look) -> list[str]:
    """Tokens with their log-probabilities and the likeliest ones; a dash for a first, which nothing precedes."""
    rows: list[list[str | Cell]] = []
    for token, entry in entries:
        best = () if entry is None else entry.top
        shown = (f"{visible(token_text(model, token), look)} {value:.2f}" for token, value in best)
        number = "–" if entry is None else f"{entry.logprob:.3f}"
        rows.append([visible(token_text(model, token), look), number, "  ".join(shown)])
    return table(rows, "lrl", look, gives=2)


def stats_line(timing: dict[str, float | None], *results: Generation) -> str:
    """What --stats says."""

    def rate(value: float | None) -> str:
        return "–" if value is None else f"{value:,.1f} tokens/s"

    first, read = timing["first_token_s"], results[0].usage.prompt_tokens
    if (found := results[0].timing) is not None:  # without what a conversation had read before
        read = found.prompt_tokens
    written = sum(result.usage.completion_tokens for result in results)
    return (
        f"prefill {counted(read, 'token')}, {rate(timing['prefill_tokens_per_s'])}; "
        f"first token after {'–' if first is None else f'{first:.3f} s'}; "
        f"decode {counted(written, 'token')}, {rate(timing['decode_tokens_per_s'])}; "
        f"load {timing['load_s']:.2f} s{_guesses_line(results)}"
    )


def _guesses_line(results: Sequence[Generation]) -> str:
    found = [result.speculation for result in results if result.speculation is not None]
    if not found:
        return ""
    proposed, accepted, passes = (
        sum(getattr(one, name) for one in found) for name in ("proposed", "accepted", "passes")
    )
    written = sum(result.usage.completion_tokens for result in results)
    share = f" ({accepted / proposed:.0%})" if proposed else ""
    each = f", {written / passes:.2f} tokens a pass" if passes else ""
    return f"; guessed {counted(proposed, 'token')}, {accepted} right{share}{each}"


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
