"""The loop: read the prompts, then choose, check and read one token after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cutaway.errors import ContextExceeded, RequestError
from cutaway.generation.params import Sampling
from cutaway.generation.session import Session
from cutaway.generation.stop import StopText
from cutaway.models import Transformer
from cutaway.tokenizers.stream import DecodeStream
from cutaway.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """What a generation cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Both."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A produced token's log-probability under the model, before any filter.

    Attributes:
        token: its id.
        logprob: natural logarithm.
        top: the likeliest tokens at this place, best first, as (id, logprob).
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """What came of one prompt, or of one of its choices.

    Attributes:
        text: up to, and without, what ended it. Empty where there is no tokenizer.
        tokens: every produced id, an end token included.
        finish_reason: ``"stop"`` (an end token or stop text) or ``"length"`` (max_tokens, or the end of a
            learned table of positions).
        logprobs: one entry a token, if asked for.
        choice: which of the prompt's ``n`` choices it is.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    choice: int = 0


@dataclass(slots=True)
class Row:
    """One text that is being generated."""

    prompt: list[int]
    choice: int
    max_tokens: int
    decoder: DecodeStream | None
    gate: StopText
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, token: int, stop_ids: frozenset[int]) -> str:
        """Take the next token; give back text that can be shown, and note if this was the end."""
        self.tokens.append(token)
        if token in stop_ids:
            self.finish_reason = "stop"
        elif self.decoder is not None:
            piece = self.gate.push(self.decoder.push(token))
            if self.gate.stopped:
                self.finish_reason = "stop"
                return self._show(piece)
            if len(self.tokens) >= self.max_tokens:
                self.finish_reason = "length"
                piece += self._rest()
            return self._show(piece)
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"
        return self._show(self._rest()) if self.finish_reason else ""

    def _rest(self) -> str:
        """What was still held back, at the end."""
        if self.decoder is None:
            return ""
        piece = self.gate.push(self.decoder.flush())
        if self.gate.stopped:
            self.finish_reason = "stop"
        return piece + self.gate.flush()

    def _show(self, piece: str) -> str:
        self.pieces.append(piece)
        return piece

    def result(self, with_logprobs: bool) -> Generation:
        """What has come of it so far."""
        return Generation(
            text="".join(self.pieces),
            tokens=list(self.tokens),
            finish_reason=self.finish_reason or "length",
            usage=Usage(len(self.prompt), len(self.tokens)),
            logprobs=list(self.logprobs) if with_logprobs else None,
            choice=self.choice,
        )


class Run:
    """Prompts being continued together. Iterating yields (row, text) as text becomes ready.

    Args:
        model: what generates.
        tokenizer: turns tokens into text; None gives tokens only.
        prompts: ids of each.
        sampling: how to choose and when to stop.

    Raises:
        RequestError: an empty prompt, or an id outside the vocabulary.
        ContextExceeded: a prompt longer than a learned table of positions.
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer | None, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> None:
        self._model = model
        self._sampling = sampling
        self._prompts = [check_ids(prompt, model.spec.vocab_size) for prompt in prompts]
        if tokenizer is None and sampling.stop:
            raise RequestError("stop texts need a tokenizer, and this model has none", field="stop")
        self.rows = [
            Row(
                prompt,
                choice,
                self._room(prompt),
                None if tokenizer is None else tokenizer.stream(continuation=True),
                StopText(sampling.stop),
            )
            for prompt in self._prompts
            for choice in range(sampling.n)
        ]

    def _room(self, prompt: list[int]) -> int:
        """Tokens that may be produced. The last is only predicted, never read, so it needs no position."""
        limit = self._model.spec.position_limit
        if limit is None:
            return self._sampling.max_tokens
        if len(prompt) > limit:
            raise ContextExceeded(
                "the prompt is longer than the model's table of positions",
                field="prompt",
                expected=f"at most {limit} tokens",
                got=len(prompt),
            )
        return min(self._sampling.max_tokens, limit - len(prompt) + 1)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        if not self._sampling.max_tokens:
            return
        n = self._sampling.n
        capacity = max(map(len, self._prompts)) + min(self._sampling.max_tokens, 256)
        session = Session(self._model, len(self._prompts), capacity)
        logits = session.feed(self._prompts)
        if n > 1:
            logits = logits.repeat_interleave(n, 0)
            session.select([row for row in range(len(self._prompts)) for _ in range(n)])
        live = list(range(len(self.rows)))  # which row of self.rows each row of the session is
        while True:
            for place, token in self._choose(logits, live):
                row = self.rows[live[place]]
                piece = row.take(token, self._sampling.stop_ids)
                if piece or row.finish_reason:
                    yield live[place], piece
            going = [place for place, index in enumerate(live) if self.rows[index].finish_reason is None]
            if not going:
                return
            if len(going) * 2 <= len(live):  # finished rows stay, idle, until they are the half
                session.select(going)
                live = [live[place] for place in going]
            logits = session.feed(
                [self.rows[index].tokens[-1:] if self.rows[index].finish_reason is None else [] for index in live]
            )

    def _choose(self, logits: Tensor, live: list[int]) -> list[tuple[int, int]]:
        """(row of the session, next token) for each row that goes on."""
        going = [place for place, index in enumerate(live) if self.rows[index].finish_reason is None]
        rows = [self.rows[live[place]] for place in going]
        logits = logits[going]
        tokens = self._sampling.choose(
            logits, [row.prompt for row in rows], [row.tokens for row in rows], [row.choice for row in rows]
        )
        if self._sampling.logprobs is not None:
            for row, entry in zip(rows, token_logprobs(logits, tokens, self._sampling.logprobs), strict=True):
                row.logprobs.append(entry)
        return list(zip(going, tokens, strict=True))

    def results(self) -> list[Generation]:
        """Each row's outcome so far."""
        return [row.result(self._sampling.logprobs is not None) for row in self.rows]


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of chosen tokens and of the likeliest ones. [rows, vocab]"""
    logprobs = logits.float().log_softmax(-1)
    best = logprobs.topk(min(top, logprobs.shape[1]))
    return [
        TokenLogprob(token, float(row[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
        for token, row, ids, values in zip(tokens, logprobs, best.indices, best.values, strict=True)
    ]


def check_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """A prompt's ids, if they are usable.

    Raises:
        RequestError: empty, or an id outside the vocabulary.
    """
    if not len(ids):
        raise RequestError("the prompt is empty", field="prompt", hint="This model has no token to begin a text with.")
    for place, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(
                "not a token of this vocabulary", field=f"prompt/{place}", expected=f"0…{vocab_size - 1}", got=token
            )
    return list(ids)


@torch.no_grad()
def score_ids(model: Transformer, ids: Sequence[int]) -> list[float | None]:
    """Log-probability of each token given those before it; None for the first, which has nothing before it."""
    checked = check_ids(ids, model.spec.vocab_size)
    logits = model(torch.tensor([checked]))[0, :-1].float()
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(checked[1:], device=logits.device)[:, None])[:, 0]
    return [None, *chosen.tolist()]
