"""Guesses from the text itself: what followed its last tokens where they stood before (Saxena 2023)."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from cutaway.generation.row import Row

SHORTEST, LONGEST = 2, 4  # tokens of a text's end that are looked for further up; one alone is seldom right


@final
class LookUp:
    """Proposes what followed a text's end further up in it: good at copying, quoting and editing.

    Args:
        texts: what each text begins with, ahead of its answer: its source, if it has one, and its prompt.
        vocab_size: of what is written; a source may have other tokens.
    """

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int) -> None:
        self._texts = [Indexed(text) for text in texts]
        self._vocab_size = vocab_size

    def propose(self, rows: Sequence[Row], most: Sequence[int]) -> list[list[int]]:
        """See :class:`cutaway.generation.speculative.Proposer`."""
        found = []
        for row, text, n in zip(rows, self._texts, most, strict=True):
            text.extend(row.tokens[text.more :])
            ids = text.guess(n)
            found.append(ids[: next((i for i, token in enumerate(ids) if token >= self._vocab_size), n)])
        return found

    def select(self, places: Sequence[int]) -> None:
        """See :class:`cutaway.generation.speculative.Proposer`."""
        self._texts = [self._texts[place].copy() for place in places]


class Indexed:
    """A text that knows where each of its short sequences of tokens was followed by something, and came last.

    >>> text = Indexed([1, 2, 3, 9, 2, 3, 4, 1, 2, 3])
    >>> text.guess(2), Indexed([7, 8, 7, 8]).guess(5)
    ([9, 2], [7, 8, 7, 8, 7])
    """

    def __init__(self, beginning: Sequence[int]) -> None:
        self._ids: list[int] = []
        self._followed: ChainMap[tuple[int, ...], int] = ChainMap()  # a sequence → the place after it
        self.extend(beginning)
        self._begun = len(beginning)

    @property
    def more(self) -> int:
        """Tokens since the beginning."""
        return len(self._ids) - self._begun

    def extend(self, ids: Sequence[int]) -> None:
        """Go on by some tokens."""
        for token in ids:
            end = len(self._ids)
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                self._followed[tuple(self._ids[end - n :])] = end
            self._ids.append(token)

    def guess(self, n: int) -> list[int]:
        """What followed the longest end that came before; what repeats itself is followed round and round."""
        ends = (tuple(self._ids[-size:]) for size in range(min(LONGEST, len(self._ids)), SHORTEST - 1, -1))
        start = next((self._followed[end] for end in ends if end in self._followed), None)
        if start is None:
            return []
        found = self._ids[start : start + n]
        period = len(found)
        while len(found) < n:
            found.append(found[-period])
        return found

    def copy(self) -> Indexed:
        """The same text, to go on by itself; what is known of it so far is shared."""
        other = Indexed(())
        other._ids, other._followed, other._begun = list(self._ids), self._followed.new_child(), self._begun
        return other
