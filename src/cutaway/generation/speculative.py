"""Speculative decoding: guesses at the next tokens, read in one pass, and kept as far as they turn out right.

    text … last ─► proposed  a b c ─► one pass reads   last  a  b  c
                                      logits after each   ▼  ▼  ▼  ▼
                                      chosen from these   a  b  x       c came after b, not x: it is taken back
                                      the text goes on with  a  b  x

What is chosen at a place is what would be chosen there without proposals: a function of the logits, the seed, the
choice and the place. So a proposal decides how many passes an answer takes, and nothing about its tokens: the
distribution is the model's (Leviathan et al. 2023), and the draw itself is the same (Daliri et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, final

from cutaway.generation.drafting import Drafting
from cutaway.generation.sampling import Sampling

if TYPE_CHECKING:
    from cutaway.generation.row import Row


class Proposer(Protocol):
    """Guesses how texts go on."""

    def propose(self, rows: Sequence[Row], most: Sequence[int]) -> list[list[int]]:
        """The next tokens of each text, as far as there is a guess, and no more than ``most``."""
        ...

    def select(self, places: Sequence[int]) -> None:
        """Keep these texts, in this order; one may be taken twice."""
        ...


@final
class Guesses:
    """One run's guesses. Who makes them is called in when they are first wanted: a first token waits for nobody.

    Args:
        asked: who guesses; None for nobody.
        vocab_size: of the answers.
        sampling: how they are chosen.
        prompts: what they go on from.
        sources: of an encoder–decoder, what they are answers to.

    Attributes:
        between: called before each pass of a model that guesses; what it raises breaks off.
    """

    def __init__(
        self,
        asked: Drafting | None,
        vocab_size: int,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        sources: Sequence[Sequence[int]] | None,
    ) -> None:
        self._asked, self._vocab_size, self._sampling = asked, vocab_size, sampling
        self._prompts, self._sources = prompts, sources
        self._places = [place for place in range(len(prompts)) for _ in range(sampling.n)]
        self._proposer: Proposer | None = None
        self.between: Callable[[], None] | None = None

    def ahead(self, rows: Sequence[Row]) -> list[list[int]]:
        """The next tokens of each answer, as far as there is a guess."""
        if self._asked is None:
            return [[] for _ in rows]
        if self._proposer is None:
            self._proposer = self._called(self._asked)
            self._proposer.select(self._places)
        rooms = [0 if row.finish_reason else row.max_tokens - len(row.tokens) for row in rows]
        return self._proposer.propose(rows, [row.pace.ahead(room) for row, room in zip(rows, rooms, strict=True)])

    def select(self, places: Sequence[int]) -> None:
        """Keep these answers, in this order."""
        self._places = [self._places[place] for place in places]
        if self._proposer is not None:
            self._proposer.select(places)

    def _called(self, asked: Drafting) -> Proposer:
        from cutaway.generation.draft import DraftModel
        from cutaway.generation.lookup import LookUp

        if asked.model is not None:
            return DraftModel(asked.model, self._sampling, self._prompts, self._sources, self.between)
        before = self._sources or [()] * len(self._prompts)
        texts = [[*source, *prompt] for source, prompt in zip(before, self._prompts, strict=True)]
        return LookUp(texts, self._vocab_size)
