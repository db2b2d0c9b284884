"""Answers as plain data, for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cutaway.generation.logprobs import TokenLogprob
from cutaway.generation.pace import Speculation
from cutaway.generation.result import Generation, Usage
from cutaway.tokenizers.tokenizer import Tokenizer


def as_plain(results: Sequence[Generation], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What came of a prompt, without times: the first answer, of several all as ``choices``, and what they cost.

    Args:
        results: the answers to one prompt.
        tokenizer: the model's.
    """
    answers = [_answer(result, tokenizer) for result in results]
    several = {"choices": answers} if len(answers) > 1 else {}
    return {**answers[0], "usage": usage_as_plain(Usage.of(results)), **several}


def _answer(result: Generation, tokenizer: Tokenizer | None) -> dict[str, Any]:
    entries = {"logprobs": result.logprobs}
    for name, found in (("prompt_logprobs", result.prompt_logprobs), ("processed_logprobs", result.processed_logprobs)):
        if found is not None:
            entries[name] = found  # type: ignore[assignment]
    words = None if tokenizer is None else tokenizer.target
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "score": result.score,
        "usage": usage_as_plain(result.usage),
        **{
            name: None if found is None else [entry_as_plain(one, words) for one in found]
            for name, found in entries.items()
        },
        **({} if result.speculation is None else {"speculation": _guessed(result.speculation)}),
    }


def _guessed(found: Speculation) -> dict[str, Any]:
    return {**asdict(found), "acceptance": found.acceptance}


def usage_as_plain(usage: Usage) -> dict[str, int]:
    """With its sum."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def entry_as_plain(entry: TokenLogprob | None, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """A log-probability and its alternatives."""
    if entry is None:
        return None
    best = [{**token_as_plain(token, tokenizer), "logprob": value} for token, value in entry.top]
    return {**token_as_plain(entry.token, tokenizer), "logprob": entry.logprob, "top": best}


def token_as_plain(token: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """A token with its text, and with its bytes: half a character has some too."""
    if tokenizer is None:
        return {"token": token, "text": f"<{token}>", "bytes": None}
    (piece,) = tokenizer.pieces([token])
    return {"token": token, "text": piece.text, "bytes": list(piece.bytes)}
