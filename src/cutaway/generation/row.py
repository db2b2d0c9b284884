"""One answer while it is being written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from cutaway.generation.constrain import Guide
from cutaway.generation.logprobs import TokenLogprob
from cutaway.generation.pace import Pace
from cutaway.generation.result import Generation, Timing, Usage
from cutaway.generation.sampling import Sampling
from cutaway.generation.stop import StopText
from cutaway.tokenizers.stream import DecodeStream


@dataclass(slots=True)
class Row:
    """One text that is being generated.

    Attributes:
        seed, choice: what a draw depends on, beside the position.
        pace: how far ahead its tokens are guessed.
        first, last: when its first and its last token came, on the clock of ``perf_counter``.
    """

    prompt: list[int]
    choice: int
    seed: int
    max_tokens: int
    decoder: DecodeStream | None
    gate: StopText
    n_read: int
    guide: Guide | None = None
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    processed: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    score: float | None = None
    pace: Pace = field(default_factory=Pace)
    first: float | None = None
    last: float | None = None

    @property
    def unread(self) -> list[int]:
        """What the model has to read next: the last token, unless it ended the text."""
        return self.tokens[-1:] if self.finish_reason is None else []

    def key(self, ahead: int = 0) -> tuple[int, int, int]:
        """What the draw of its next token depends on, or of the one so many after that."""
        return self.seed, self.choice, len(self.prompt) + len(self.tokens) + ahead

    def take(self, token: int, stop_ids: frozenset[int]) -> str:
        """Take the next token; give back text that can be shown, and note if this was the end."""
        self.tokens.append(token)
        self.last = perf_counter()
        self.first = self.last if self.first is None else self.first
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

    def result(self, asked: Sampling, read: Sequence[TokenLogprob | None] | None, timing: Timing) -> Generation:
        """What has come of it so far; ``read`` is of its prompt."""
        return Generation(
            text="".join(self.pieces),
            tokens=list(self.tokens),
            finish_reason=self.finish_reason,
            usage=Usage(self.n_read, len(self.tokens)),
            logprobs=None if asked.logprobs is None else list(self.logprobs),
            choice=self.choice,
            score=self.score,
            prompt_logprobs=None if read is None else list(read),
            processed_logprobs=None if asked.processed_logprobs is None else list(self.processed),
            timing=timing,
            speculation=self.pace.done if self.pace.most else None,
        )
