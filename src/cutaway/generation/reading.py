"""What comes before a text is read: whether it can be, and of an encoder–decoder, what its encoder makes of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from cutaway.cache import Source
from cutaway.errors import ContextExceeded
from cutaway.generation.unmixed import unmixed
from cutaway.models import Transformer
from cutaway.models.batch import pad
from cutaway.modules.steady import ROWS
from cutaway.modules.tap import Tap


@torch.no_grad()
def read_sources(
    model: Transformer, rows: Sequence[Sequence[int]], tap: Tap | None = None, *, steady: bool = False
) -> Source:
    """What an encoder–decoder's encoder makes of several texts, once for all that the decoder will write.

    Args:
        model: with an encoder.
        rows: ids of each text.
        tap: reads or edits what is computed on the way.
        steady: the same bits for a text in any company.

    Raises:
        ContextExceeded: a text longer than a learned table of positions.
    """
    check_length(model, max(map(len, rows)), "prompt", of_source=True)
    ids, positions = pad(rows, multiple=ROWS if steady else 1)
    with unmixed(model.device):
        return model.read(ids, positions, tap=tap, how="steady" if steady else None)


def check_length(model: Transformer, longest: int, field: str | None = None, *, of_source: bool = False) -> None:
    """Refuse what has no position; say, once for each model, that a text is longer than it was trained for.

    Raises:
        ContextExceeded: longer than a learned table of positions.
    """
    limit = model.spec.source_limit if of_source else model.spec.position_limit
    if limit is not None and longest > limit:
        raise ContextExceeded(
            "longer than the model's table of positions", field=field, expected=f"at most {limit} tokens", got=longest
        )
    if longest > model.spec.max_positions and not model.warned_length:
        model.warned_length = True
        warnings.warn(
            f"{longest} tokens are more than the {model.spec.max_positions} this model was trained for; "
            "what it says may get worse from there",
            stacklevel=4,
        )
