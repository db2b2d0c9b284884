"""The loop: read the prompts, then choose, check and read one token after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.beam import beam_search
from cutaway.generation.checks import check_ids
from cutaway.generation.constrain import Guide, Guides, mask
from cutaway.generation.logprobs import TokenLogprob, token_logprobs
from cutaway.generation.sampling import Sampling
from cutaway.generation.session import Session, check_length, read_sources
from cutaway.generation.steady import promise
from cutaway.generation.stop import StopText
from cutaway.models import Transformer
from cutaway.tokenizers.stream import DecodeStream
from cutaway.tokenizers.tokenizer import Tokenizer

__all__ = ["Generation", "Row", "Run", "TokenLogprob", "Usage"]


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
class Generation:
    """What came of one prompt, or of one of its choices.

    Attributes:
        text: up to, and without, what ended it. Empty where there is no tokenizer.
        tokens: every produced id, an end token included.
        finish_reason: ``"stop"`` (an end token, a stop text, or a form that is complete) or ``"length"``
            (max_tokens, or the end of a learned table of positions); None while it is not finished.
        logprobs: one entry a token, if asked for.
        choice: which of the prompt's ``n`` choices it is; of beams the first is the best.
        score: of beams, the sum of the answer's log-probabilities over its length ** ``length_penalty``.
    """

    text: str
    tokens: list[int]
    finish_reason: str | None
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    choice: int = 0
    score: float | None = None


@dataclass(slots=True)
class Row:
    """One text that is being generated."""

    prompt: list[int]
    choice: int
    max_tokens: int
    decoder: DecodeStream | None
    gate: StopText
    n_read: int
    guide: Guide | None = None
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    score: float | None = None

    def take(self, token: int, stop_ids: frozenset[int]) -> str:
        """Take the next token; give back text that can be shown, and note if this was the end."""
        self.tokens.append(token)
        ended = token in stop_ids
        complete = self.guide is not None and self.guide.take(token)  # and the token is the last of the text
        piece = "" if ended or self.decoder is None else self.gate.push(self.decoder.push(token))
        if not self.gate.stopped and (ended or complete or len(self.tokens) >= self.max_tokens):
            self.finish_reason = "stop" if ended or complete else "length"
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
            usage=Usage(self.n_read, len(self.tokens)),
            logprobs=list(self.logprobs) if with_logprobs else None,
            choice=self.choice,
            score=self.score,
        )


class Run:
    """Prompts being continued together. Iterating, once, yields (row, text) as text becomes ready.

    Args:
        model: what generates.
        tokenizer: turns tokens into text; None gives tokens only.
        prompts: ids of each.
        sampling: how to choose and when to stop.
        sources: of an encoder–decoder, what its encoder reads for each; a prompt is what the decoder begins with.

    Raises:
        RequestError: an empty prompt, or an id outside the vocabulary.
        ContextExceeded: a prompt or source longer than a learned table of positions.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        sources: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._model = model
        self._sampling = _with_words(sampling, tokenizer)
        self._prompts = [check_ids(prompt, model.spec.vocab_size) for prompt in prompts]
        rows = model.spec.source_vocab_size or model.spec.vocab_size
        self._sources = None if sources is None else [check_ids(source, rows) for source in sources]
        if tokenizer is None and sampling.stop:
            raise RequestError("stop texts need a tokenizer, and this model has none", field="stop")
        guides = self._guides(tokenizer)
        if sampling.deterministic:
            promise(model)
        self.rows = [
            Row(
                prompt,
                choice,
                self._room(prompt),
                None if tokenizer is None else self._decoder(tokenizer),
                StopText(sampling.stop),
                n_read=len(read),
                guide=None if guides is None else guides.new(),
            )
            for prompt, read in zip(self._prompts, self._sources or self._prompts, strict=True)
            for choice in range(sampling.n)
        ]
        for row in self.rows:
            if not row.max_tokens:
                row.finish_reason = "length"
        self._steps = self._loop() if sampling.num_beams == 1 else self._search()

    def _guides(self, tokenizer: Tokenizer | None) -> Guides | None:
        sampling = self._sampling
        if sampling.constraint is None:
            return None
        if tokenizer is None:
            raise RequestError("needs a tokenizer, and this model has none", field=sampling.constraint.kind)
        words = tokenizer if self._sources is None else tokenizer.target
        return Guides(sampling.constraint, words, self._model.spec.vocab_size, sampling.stop_ids)

    def _room(self, prompt: list[int]) -> int:
        """Tokens that may be produced. The last is only predicted, never read, so it needs no position."""
        check_length(self._model, len(prompt), "prompt")
        spec, most = self._model.spec, self._sampling.max_tokens
        if most is None and self._sampling.max_length is not None:
            most = max(1, self._sampling.max_length - len(prompt))
        if most is None:
            return max(1, (spec.position_limit or spec.max_positions) - len(prompt) + 1)
        return most if spec.position_limit is None else min(most, spec.position_limit - len(prompt) + 1)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return self._steps

    def _loop(self) -> Iterator[tuple[int, str]]:
        if not self.rows or self.rows[0].finish_reason:
            return
        n = self._sampling.n
        session = self._session()
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

    def _session(self) -> Session:
        """A row for each prompt."""
        capacity = max(len(row.prompt) + min(row.max_tokens, 256) for row in self.rows)
        steady = self._sampling.deterministic
        source = None if self._sources is None else read_sources(self._model, self._sources, steady=steady)
        return Session(self._model, len(self._prompts), capacity, source, steady)

    def _decoder(self, tokenizer: Tokenizer) -> DecodeStream:
        """An answer goes on from its prompt; to a source it is a text of its own, perhaps in another vocabulary."""
        if self._sources is None:
            return tokenizer.stream(continuation=True)
        # The form of an answer is about all of its characters, a first space too.
        return tokenizer.target.stream(continuation=self._sampling.constraint is not None)

    def _search(self) -> Iterator[tuple[int, str]]:
        """Beams: a prompt's answers come whole, when the search for them is over."""
        if not self.rows or self.rows[0].finish_reason:
            return
        n = self._sampling.n
        rooms = [row.max_tokens for row in self.rows[::n]]
        for prompt, answers in beam_search(self._session(), self._prompts, rooms, self._sampling):
            for index, beam in enumerate(answers, prompt * n):
                row = self.rows[index]
                row.score, row.logprobs = beam.score, beam.logprobs
                yield index, "".join(row.take(token, self._sampling.stop_ids) for token in beam.tokens)

    def _choose(self, logits: Tensor, live: list[int]) -> list[tuple[int, str]]:
        """Give each row that goes on its next token: (row, text that can be shown)."""
        going = [place for place, index in enumerate(live) if self.rows[index].finish_reason is None]
        rows = [self.rows[live[place]] for place in going]
        if len(going) < len(live):
            logits = logits[going]
        guides = [row.guide for row in rows if row.guide is not None]
        tokens = self._sampling.choose(
            logits,
            [row.prompt for row in rows],
            [row.tokens for row in rows],
            [row.choice for row in rows],
            [row.max_tokens for row in rows],
            partial(mask, guides=guides) if guides else None,
        )
        if self._sampling.logprobs is not None:
            for row, entry in zip(rows, token_logprobs(logits, tokens, self._sampling.logprobs), strict=True):
                row.logprobs.append(entry)
        pieces = [row.take(token, self._sampling.stop_ids) for row, token in zip(rows, tokens, strict=True)]
        return [(live[place], piece) for place, piece in zip(going, pieces, strict=True)]

    def results(self) -> list[Generation]:
        """Each row's outcome so far."""
        return [row.result(self._sampling.logprobs is not None) for row in self.rows]


def _with_words(sampling: Sampling, tokenizer: Tokenizer | None) -> Sampling:
    """Forbidden texts as ids: of the text at a beginning, of it going on, and of it after a space."""
    if not sampling.bad_words:
        return sampling
    if tokenizer is None:
        raise RequestError("forbidden texts need a tokenizer, and this model has none", field="bad_words")
    found: dict[tuple[int, ...], None] = {}
    for word in sampling.bad_words:
        found[tuple(tokenizer.encode(word, bos=False))] = None
        for text in (word, " " + word):
            found[tuple(tokenizer.encode(text, continuation=True))] = None
    rules = replace(sampling.rules, bad_words=(*sampling.rules.bad_words, *(ids for ids in found if ids)))
    return replace(sampling, rules=rules, bad_words=())
