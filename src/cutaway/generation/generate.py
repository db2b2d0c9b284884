"""The loop: read the prompts, then choose, check and read one token after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.params import Sampling, check_ids
from cutaway.generation.session import CHUNK, Session, check_length
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
            learned table of positions); None while it is not finished.
        logprobs: one entry a token, if asked for.
        choice: which of the prompt's ``n`` choices it is.
    """

    text: str
    tokens: list[int]
    finish_reason: str | None
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
        ended = token in stop_ids
        piece = "" if ended or self.decoder is None else self.gate.push(self.decoder.push(token))
        if not self.gate.stopped and (ended or len(self.tokens) >= self.max_tokens):
            self.finish_reason = "stop" if ended else "length"
            # What was held back comes out: the bytes of half a character, and text that became no stop after all.
            piece += "" if self.decoder is None else self.gate.push(self.decoder.flush())
            piece += self.gate.flush()
        if self.gate.stopped:
            self.finish_reason = "stop"
        self.pieces.append(piece)
        return piece

    def result(self, with_logprobs: bool) -> Generation:
        """What has come of it so far."""
        return Generation(
            text="".join(self.pieces),
            tokens=list(self.tokens),
            finish_reason=self.finish_reason,
            usage=Usage(len(self.prompt), len(self.tokens)),
            logprobs=list(self.logprobs) if with_logprobs else None,
            choice=self.choice,
        )


class Run:
    """Prompts being continued together. Iterating, once, yields (row, text) as text becomes ready.

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
        for row in self.rows:
            if not row.max_tokens:
                row.finish_reason = "length"
        self._steps = self._loop()

    def _room(self, prompt: list[int]) -> int:
        """Tokens that may be produced. The last is only predicted, never read, so it needs no position."""
        check_length(self._model, len(prompt), "prompt")
        spec, most = self._model.spec, self._sampling.max_tokens
        if most is None:
            return max(1, (spec.position_limit or spec.max_positions) - len(prompt) + 1)
        return most if spec.position_limit is None else min(most, spec.position_limit - len(prompt) + 1)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return self._steps

    def _loop(self) -> Iterator[tuple[int, str]]:
        if not self.rows or self.rows[0].finish_reason:
            return
        n = self._sampling.n
        capacity = max(len(row.prompt) + min(row.max_tokens, 256) for row in self.rows)
        session = Session(self._model, len(self._prompts), capacity)
        logits = session.feed(self._prompts)
        if n > 1:
            logits = logits.repeat_interleave(n, 0)
            session.select([row for row in range(len(self._prompts)) for _ in range(n)])
        live = list(range(len(self.rows)))  # which row of self.rows each row of the session is
        while True:
            for index, piece in self._choose(logits, live):
                if piece or self.rows[index].finish_reason:
                    yield index, piece
            going = [place for place, index in enumerate(live) if self.rows[index].finish_reason is None]
            if not going:
                return
            if len(going) * 2 <= len(live):  # finished rows stay, idle, until they are the half
                session.select(going)
                live = [live[place] for place in going]
            logits = session.feed(
                [self.rows[index].tokens[-1:] if self.rows[index].finish_reason is None else [] for index in live]
            )

    def _choose(self, logits: Tensor, live: list[int]) -> list[tuple[int, str]]:
        """Give each row that goes on its next token: (row, text that can be shown)."""
        going = [place for place, index in enumerate(live) if self.rows[index].finish_reason is None]
        rows = [self.rows[live[place]] for place in going]
        if len(going) < len(live):
            logits = logits[going]
        tokens = self._sampling.choose(
            logits, [row.prompt for row in rows], [row.tokens for row in rows], [row.choice for row in rows]
        )
        if self._sampling.logprobs is not None:
            for row, entry in zip(rows, token_logprobs(logits, tokens, self._sampling.logprobs), strict=True):
                row.logprobs.append(entry)
        pieces = [row.take(token, self._sampling.stop_ids) for row, token in zip(rows, tokens, strict=True)]
        return [(live[place], piece) for place, piece in zip(going, pieces, strict=True)]

    def results(self) -> list[Generation]:
        """Each row's outcome so far."""
        return [row.result(self._sampling.logprobs is not None) for row in self.rows]


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of chosen tokens and of the likeliest ones. [rows, vocab]"""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(min(top, logprobs.shape[1]))
    return [
        TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in zip(tokens, chosen, best.indices.tolist(), best.values.tolist(), strict=True)
    ]


@torch.no_grad()
def score_ids(model: Transformer, ids: Sequence[int]) -> list[float | None]:
    """Log-probability of each token given those before it; None for the first, which has nothing before it."""
    ids = check_ids(ids, model.spec.vocab_size)
    check_length(model, len(ids), "prompt")
    hidden = model.hidden(torch.tensor([ids]))[0, :-1]
    scores: list[float | None] = [None]
    for start in range(0, len(ids) - 1, CHUNK):  # logits of a long text, with a large vocabulary, are gigabytes
        piece = model.unembed(hidden[None, start : start + CHUNK])[0]
        scores += [entry.logprob for entry in token_logprobs(piece, ids[start + 1 : start + 1 + CHUNK], 0)]
    return scores
