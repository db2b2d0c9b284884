"""Rows of tokens with the cache that remembers them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from cutaway.errors import ContextExceeded
from cutaway.models import Transformer
from cutaway.modules.tap import Tap

CHUNK = 512  # tokens of a prompt that are run at once: bounds the memory of a long one


class Session:
    """Texts, row by row, that a model has read so far.

    Args:
        model: what reads.
        batch: rows.
        capacity: tokens of a row to make room for; grows when needed.
    """

    def __init__(self, model: Transformer, batch: int = 1, capacity: int = 256) -> None:
        self._model = model
        self._cache = model.new_cache(batch, capacity)
        self.tokens: list[list[int]] = [[] for _ in range(batch)]

    @torch.no_grad()
    def feed(self, rows: Sequence[Sequence[int]], tap: Tap | None = None) -> Tensor:
        """Read more tokens, not the same number in each row, and predict what follows each row.

        Args:
            rows: new tokens of each row; a row with none keeps still, and its result means nothing.
            tap: reads or edits what is computed on the way.

        Returns:
            Logits after each row's last token. [batch, vocab]

        Raises:
            ContextExceeded: a row would outgrow a learned table of positions.
        """
        lengths = [len(held) + len(new) for held, new in zip(self.tokens, rows, strict=True)]
        self._check_length(max(lengths))
        device = self._model.device
        last = torch.zeros(len(rows), self._model.spec.d_model, dtype=self._model.dtype, device=device)
        longest = max(len(new) for new in rows)
        for start in range(0, longest, CHUNK):
            pieces = [list(new[start : start + CHUNK]) for new in rows]
            width = max(map(len, pieces))
            ids = torch.tensor([[*piece, *[0] * (width - len(piece))] for piece in pieces])
            positions = torch.full_like(ids, -1)
            for row, piece in enumerate(pieces):
                begin = len(self.tokens[row])
                positions[row, : len(piece)] = torch.arange(begin, begin + len(piece))
            before = self._cache.lengths
            try:
                hidden = self._model.hidden(ids, positions, cache=self._cache, tap=tap)
            except BaseException:
                self._forget(before)
                raise
            for row, piece in enumerate(pieces):
                self.tokens[row].extend(piece)
                if piece:
                    last[row] = hidden[row, len(piece) - 1]
        return self._model.unembed(last[:, None], tap)[:, 0]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may be taken twice."""
        self._cache.select(list(rows))
        self.tokens = [list(self.tokens[row]) for row in rows]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Go back to each row's first tokens. What a ring has dropped is read again."""
        wanted = [held[:length] for held, length in zip(self.tokens, lengths, strict=True)]
        left = self._cache.rewind([len(held) for held in wanted])
        self.tokens = [held[:n] for held, n in zip(wanted, left, strict=True)]
        again = [held[n:] for held, n in zip(wanted, left, strict=True)]
        if any(again):
            self.feed(again)

    def _forget(self, lengths: list[int]) -> None:
        """A pass broke off: nothing that it half wrote may be read."""
        left = self._cache.rewind(lengths)
        self.tokens = [held[:n] for held, n in zip(self.tokens, left, strict=True)]

    def _check_length(self, longest: int) -> None:
        spec = self._model.spec
        limit = spec.position_limit
        if limit is not None and longest > limit:
            raise ContextExceeded(
                "longer than the model's table of positions", expected=f"at most {limit} tokens", got=longest
            )
        if longest > spec.max_positions:
            warn_once(self._model, longest)


def warn_once(model: Transformer, longest: int) -> None:
    """Say, once for each model, that a text is longer than it was trained for."""
    if not model.warned_length:
        model.warned_length = True
        warnings.warn(
            f"{longest} tokens are more than the {model.spec.max_positions} this model was trained for; "
            "what it says may get worse from there",
            stacklevel=4,
        )
