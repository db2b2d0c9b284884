"""Whole texts in one pass, a rectangle or ragged, to the numbers of every token."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.reading import check_length
from cutaway.models import Transformer
from cutaway.models.batch import pad
from cutaway.models.head import Classifier, Head


def final(model: Transformer, rows: Sequence[Sequence[int]], targets: Sequence[Sequence[int]] | None) -> Ragged:
    """The stream that the head reads; of an encoder–decoder without targets, what the encoder makes of the rows.

    Args:
        model: what reads.
        rows: ids of each text.
        targets: of an encoder–decoder, the decoder's ids for each.

    Raises:
        RequestError: targets for a model without a source, or not one for each row.
        ContextExceeded: more tokens than a learned table has positions.
    """
    ids, positions = _table(model, rows, "ids", of_source=model.spec.source is not None)
    if targets is None:
        hidden = model.encode(ids, positions) if model.spec.encoder.layers else model.hidden(ids, positions)
        return Ragged(hidden, positions, [len(row) for row in rows])
    if model.spec.source is None:
        raise RequestError("this model reads one text, not a source and a target", field="target", expected=None)
    if len(targets) != len(rows):
        what = "each source has one target"
        raise RequestError(what, field="target", expected=f"{len(rows)} lists of ids", got=len(targets))
    mine, places = _table(model, targets, "target")
    hidden = model.hidden(mine, places, source=model.read(ids, positions))
    return Ragged(hidden, places, [len(row) for row in targets])


class Ragged:
    """Numbers of every token of some texts, as one tensor with pads.

    Args:
        values: [batch, query, …]
        positions: −1 for a pad. [batch, query]
        lengths: tokens of each row.
    """

    def __init__(self, values: Tensor, positions: Tensor, lengths: list[int]) -> None:
        self.values = values
        self.positions = positions
        self.lengths = lengths

    def scored(self, model: Transformer) -> Tensor | list[Tensor]:
        """What the model's head makes of them.

        Raises:
            RequestError: it scores nothing.
        """
        if isinstance(model.head, Head):
            return Ragged(model.unembed(self.values), self.positions, self.lengths).rows()
        if not isinstance(model.head, Classifier):
            got = "no head" if model.head is None else "a pooler"
            raise RequestError("this model scores neither tokens nor labels", field="head", got=got)
        scores = model.answer(self.values, self.positions)
        return scores if scores.dim() == 2 else Ragged(scores, self.positions, self.lengths).rows()

    def rows(self) -> Tensor | list[Tensor]:
        """One tensor where all rows are of one length, else one for each."""
        if len(set(self.lengths)) == 1:
            return self.values
        return [row[:n] for row, n in zip(self.values, self.lengths, strict=True)]


def _table(
    model: Transformer, rows: Sequence[Sequence[int]], field: str, of_source: bool = False
) -> tuple[Tensor, Tensor]:
    check_length(model, max(map(len, rows)), field, of_source=of_source)
    return pad(rows)
