"""Many texts through a model that reads whole texts, like lengths together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cutaway.errors import ContextExceeded, RequestError
from cutaway.generation.reading import check_length
from cutaway.models import Transformer
from cutaway.models.batch import pad

BUDGET = 8192  # tokens of a pass, pads included


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text as a model reads it.

    Attributes:
        ids: its tokens, those that the tokenizer adds included.
        types: each token's type, where the model has types.
    """

    ids: Sequence[int]
    types: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """Some of the texts, read.

    Attributes:
        rows: which of the texts these are.
        hidden: final vectors. [batch, query, d_model]
        positions: −1 for a pad. [batch, query]
    """

    rows: list[int]
    hidden: Tensor
    positions: Tensor


@torch.no_grad()
def passes(model: Transformer, texts: Sequence[Encoded], budget: int = BUDGET) -> Iterator[Pass]:
    """Read texts, the longest first, as many at once as the budget allows.

    An encoder–decoder's encoder reads them. Pads are nothing: a text's vectors do not depend on what is beside it.

    Raises:
        ContextExceeded: a text longer than a learned table of positions.
        RequestError: the weights make no numbers.
    """
    limit = model.spec.position_limit if model.spec.source is None else model.spec.source_limit
    for i, text in enumerate(texts):
        if limit is not None and len(text.ids) > limit:
            raise ContextExceeded(
                "longer than the model's table of positions",
                field=f"texts/{i}",
                expected=f"at most {limit} tokens",
                got=len(text.ids),
            )
    if texts:
        check_length(model, max(len(text.ids) for text in texts), "texts", of_source=model.spec.source is not None)
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i].ids))
    while order:
        width = max(1, len(texts[order[0]].ids))
        rows, order = order[: max(1, budget // width)], order[max(1, budget // width) :]
        ids, positions = pad([texts[i].ids for i in rows])
        types = None
        if any(texts[i].types for i in rows):
            types, _ = pad([texts[i].types or [0] * len(texts[i].ids) for i in rows])
        reads = model.encode if model.spec.encoder.layers else model.hidden
        hidden = reads(ids, positions, types=types)
        fine = hidden.isfinite().all(-1).cpu() | (positions < 0)
        if not bool(fine.all()):
            hint = "Check the weights for NaN or infinity (`cutaway show MODEL TENSOR`), or use float32."
            bad = rows[int((~fine).any(1).nonzero()[0])]
            raise RequestError("the model's vectors hold NaN or infinity", field=f"texts/{bad}", hint=hint)
        yield Pass(rows, hidden, positions)
