"""Reading more of some texts, in passes of bounded length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from cutaway.cache import StoredCache
from cutaway.models import Transformer
from cutaway.models.batch import pad
from cutaway.modules.attention import How
from cutaway.modules.steady import ROWS
from cutaway.modules.tap import Tap

# Final states of each row's next tokens, [batch, piece, d_model], and how many of them are real.
Seen: TypeAlias = Callable[[Tensor, Sequence[int]], None]
Scored: TypeAlias = Callable[[Tensor], Tensor]  # final states of a pass to logits of all its tokens
CHUNK = 512  # tokens of a prompt that are run at once: bounds the memory of a long one


@dataclass(slots=True)
class Passes:
    """How a session's rows are read.

    Attributes:
        model, cache: what reads, and what remembers.
        steady: with sums of one order.
        paged: rows share pages, and are told what was read.
        between: called before each pass; what it raises breaks off.
    """

    model: Transformer
    cache: StoredCache
    steady: bool
    paged: bool
    between: Callable[[], None] | None

    def read(
        self,
        rows: Sequence[Sequence[int]],
        tap: Tap | None = None,
        seen: Seen | None = None,
        scored: Scored | None = None,
    ) -> Tensor:
        """The final hidden state of each row's last new token, or its logits. [batch, d_model] or [batch, vocab]"""
        last = self._nothing(len(rows))
        unseen = tap is None and seen is None and scored is None
        for hidden, counts in self._passes(rows, tap, ends=unseen):
            lengths = counts.tolist()
            if seen is not None:
                seen(hidden, lengths)
            if scored is not None:
                hidden = scored(hidden)
                last = last if last.shape[1] == hidden.shape[2] else hidden.new_zeros(len(rows), hidden.shape[2])
            if len(set(lengths)) == 1:  # as in every step of a single answer: fewer small operations
                last = hidden[:, lengths[0] - 1]
                continue
            ends = hidden[torch.arange(len(rows), device=hidden.device), (counts - 1).clamp(min=0)]
            last = torch.where(counts[:, None] > 0, ends, last)
        return last

    def read_each(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """That of each new token, row after row. [new tokens, d_model]"""
        states, owners = [self._nothing(0)], [torch.zeros(0, dtype=torch.long, device=self.model.device)]
        for hidden, counts in self._passes(rows, None, one_by_one=True):
            real = torch.arange(hidden.shape[1], device=hidden.device) < counts[:, None]
            states.append(hidden[real])
            owners.append(real.nonzero()[:, 0])
        return torch.cat(states)[torch.cat(owners).argsort(stable=True)]

    def _nothing(self, n: int) -> Tensor:
        """[n, d_model]"""
        return torch.zeros(n, self.model.spec.d_model, dtype=self.model.dtype, device=self.model.device)

    def _passes(
        self, rows: Sequence[Sequence[int]], tap: Tap | None, *, one_by_one: bool = False, ends: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Read in passes of bounded length: the final hidden states, or each row's last, and how many are tokens.

        [batch, query, d_model] and [batch]
        """
        model = self.model
        lengths = torch.tensor([n + len(new) for n, new in zip(self.cache.lengths, rows, strict=True)])
        for start in range(0, max(map(len, rows)), CHUNK):
            if self.between is not None:
                self.between()
            pieces = [list(new[start : start + CHUNK]) for new in rows]
            ids, steps = pad(pieces, multiple=ROWS if self.steady else 1)
            positions = torch.where(steps >= 0, torch.tensor(self.cache.lengths)[:, None] + steps, -1)
            reach = positions + 1 if one_by_one else lengths
            how: How | None = "steady" if self.steady else None
            hidden = model.hidden(ids, positions, cache=self.cache, tap=tap, lengths=reach, how=how, ends=ends)
            if self.paged and tap is None:  # an edit makes keys and values that are not the model's own
                self.cache.note(pieces)
            yield hidden, torch.tensor([len(piece) for piece in pieces], device=model.device)
