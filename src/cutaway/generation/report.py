"""An answer as plain data, for JSON."""

from __future__ import annotations

from typing import Any

from cutaway.generation.logprobs import TokenLogprob
from cutaway.generation.result import Generation
from cutaway.tokenizers.tokenizer import Tokenizer


def as_plain(result: Generation, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What came of a prompt, without times; ``tokenizer`` is the model's."""
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
        "usage": {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
            "total_tokens": result.usage.total_tokens,
        },
        **{name: None if found is None else [_entry(one, words) for one in found] for name, found in entries.items()},
    }


def _entry(entry: TokenLogprob | None, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    best = [{**_token(token, tokenizer), "logprob": value} for token, value in entry.top]
    return {**_token(entry.token, tokenizer), "logprob": entry.logprob, "top": best}


def _token(token: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """A token with its text, and with its bytes: half a character has some too."""
    if tokenizer is None:
        return {"token": token, "text": f"<{token}>", "bytes": None}
    (piece,) = tokenizer.pieces([token])
    return {"token": token, "text": piece.text, "bytes": list(piece.bytes)}
