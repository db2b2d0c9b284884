"""Guesses from another model, smaller than the one that answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, final

from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.constrain import Guide, mask
from cutaway.generation.logits import check_finite
from cutaway.generation.reading import read_sources
from cutaway.generation.sampling import Sampling
from cutaway.generation.session import Session
from cutaway.models import Transformer

if TYPE_CHECKING:
    from cutaway.generation.row import Row


@final
class DraftModel:
    """Proposes what a model of the same vocabulary would write under the same settings.

    It draws with the very numbers that the answer's draws will take: where two distributions agree, so do the draws.
    Past the length that it was trained for it proposes nothing.

    Args:
        model: what guesses.
        sampling: the answer's.
        prompts: what each text begins with.
        sources: of an encoder–decoder, what it reads for each.
        between: called before each pass; what it raises breaks off.

    Raises:
        ContextExceeded: a source longer than its table of positions.
    """

    def __init__(
        self,
        model: Transformer,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        sources: Sequence[Sequence[int]] | None,
        between: Callable[[], None] | None,
    ) -> None:
        self._sampling = sampling
        self._reach = min(model.spec.max_positions, model.spec.position_limit or model.spec.max_positions)
        source = None if sources is None else read_sources(model, sources)
        self._session = Session(model, len(prompts), max(map(len, prompts)) + 256, source)
        self._session.between = between
        read = [prompt if len(prompt) <= self._reach else [] for prompt in prompts]
        if any(read):
            self._session.feed(read)

    def select(self, places: Sequence[int]) -> None:
        """See :class:`cutaway.generation.speculative.Proposer`."""
        self._session.select(places)

    def propose(self, rows: Sequence[Row], most: Sequence[int]) -> list[list[int]]:
        """See :class:`cutaway.generation.speculative.Proposer`.

        Raises:
            RequestError: its logits hold no numbers.
        """
        texts = [[*row.prompt, *row.tokens] for row in rows]
        # What was read here of a text, beside its last token, was proposed and accepted, or is older than that.
        kept = [min(len(held), len(text) - 1) for held, text in zip(self._session.tokens, texts, strict=True)]
        self._session.rewind(kept)
        # The last proposal is not read.
        sketches = [
            _Sketch(row, min(n, self._reach - len(text) + 1)) for row, n, text in zip(rows, most, texts, strict=True)
        ]
        unread = [text[n:] for text, n in zip(texts, kept, strict=True)]
        while going := [place for place, sketch in enumerate(sketches) if sketch.open]:
            logits = self._session.feed([new if place in going else [] for place, new in enumerate(unread)])[going]
            _check(logits)
            try:
                self._go_on(logits, [sketches[place] for place in going])
            except RequestError:
                break  # a dead end of rules or form, on a way that the answer need not take
            unread = [sketch.tokens[-1:] for sketch in sketches]
        return [sketch.tokens for sketch in sketches]

    def _go_on(self, logits: Tensor, sketches: Sequence[_Sketch]) -> None:
        """Each by a token."""
        guides = [sketch.guide for sketch in sketches if sketch.guide is not None]
        processed = self._sampling.processed(
            logits,
            [sketch.row.prompt for sketch in sketches],
            [[*sketch.row.tokens, *sketch.tokens] for sketch in sketches],
            [sketch.row.max_tokens for sketch in sketches],
            partial(mask, guides=guides) if guides else None,
        )
        tokens = self._sampling.take(processed, [sketch.row.key(len(sketch.tokens)) for sketch in sketches])
        for sketch, token in zip(sketches, tokens, strict=True):
            sketch.take(token, self._sampling.stop_ids)


@dataclass(slots=True)
class _Sketch:
    """How an answer may go on, by no more than ``room`` tokens."""

    row: Row
    room: int
    guide: Guide | None = None
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.open and self.row.guide is not None:
            self.guide = self.row.guide.fork()

    @property
    def open(self) -> bool:
        """Whether there is room."""
        return len(self.tokens) < self.room

    def take(self, token: int, ends: frozenset[int]) -> None:
        """Go on; nothing follows an end."""
        self.tokens.append(token)
        if token in ends or (self.guide is not None and self.guide.take(token)):
            self.room = len(self.tokens)


def _check(logits: Tensor) -> None:
    try:
        check_finite(logits)
    except RequestError as error:
        what = "the draft model's logits hold NaN or infinity"
        raise RequestError(what, field="draft", hint="Leave it out, or use float32.") from error
