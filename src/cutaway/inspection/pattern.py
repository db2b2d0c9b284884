"""Who reads whom: the attention weights of one branch, drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import NameNotFound, RequestError
from cutaway.inspection.ablation import heads_of
from cutaway.inspection.figure import Figure, Grid, Part
from cutaway.inspection.heads import NOT_WHY
from cutaway.inspection.readout import labels, numbers
from cutaway.inspection.running import trace
from cutaway.inspection.shown import Shown, for_json
from cutaway.models import Transformer


@dataclass(frozen=True, slots=True, repr=False)
class Pattern(Shown):
    """The weights of a branch with attention.

    Attributes:
        branch: ``decoder.layers.3.attn``.
        heads: which of its heads are here.
        weights: what each token reads. [head, query, key]
        pieces: a text for each token that reads. keys: for each that is read.
    """

    branch: str
    heads: tuple[int, ...]
    weights: Tensor
    pieces: tuple[str, ...]
    keys: tuple[str, ...]

    def figure(self) -> Figure:
        """Of one head, every token by every token; of several, what each reads for the last token."""
        parts: list[Part] = []
        if len(self.heads) == 1:
            title = "What each token (row) reads of each (column)"
            values = numbers(self.weights[0])
            parts.append(Grid(title, self.pieces, self.keys, values, None, "share", "key", "query"))
            name = f"{self.branch}, head {self.heads[0]}"
        else:
            title = f"What “{self.pieces[-1]}”, the last token, reads by each head"
            rows = [f"head {i}" for i in self.heads]
            values = numbers(self.weights[:, -1])
            parts.append(Grid(title, rows, self.keys, values, None, "share", "key", "head"))
            name = self.branch
        return Figure(f"Attention of {name}", parts, ("Weights are the model's own; a row adds up to 1.", NOT_WHY))

    @for_json
    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        words = {"pieces": [*self.pieces], "keys": [*self.keys]}
        notes = {"notes": [NOT_WHY]}
        return {"branch": self.branch, "heads": [*self.heads], **words, "weights": numbers(self.weights), **notes}


@torch.no_grad()
def pattern(
    model: Transformer,
    ids: Sequence[int],
    branch: str,
    heads: Sequence[int] | None = None,
    *,
    source: Sequence[int] | None = None,
    pieces: Sequence[str] | None = None,
    source_pieces: Sequence[str] | None = None,
) -> Pattern:
    """The attention weights of a branch, of one text.

    Args:
        model: any with attention.
        ids: of an encoder–decoder, what its decoder reads.
        branch: such as ``decoder.layers.3.attn``, ``encoder.layers.0.attn``, ``decoder.layers.3.cross``.
        heads: which; all by default.
        source: of an encoder–decoder, what its encoder reads.
        pieces, source_pieces: a text for each token.

    Raises:
        NameNotFound: no branch with attention has this name.
        RequestError: no such head.
    """
    known = {name: n for stack in model.spec.stacks for name, n in heads_of(model, stack).items()}
    if not isinstance(branch, str) or branch not in known:
        hint = f"A name is such as {next(iter(known), 'decoder.layers.0.attn')}."
        raise NameNotFound("no branch with heads has this name", field=branch, hint=hint)
    chosen = list(range(known[branch])) if heads is None else list(heads) if isinstance(heads, Iterable) else [heads]
    if not chosen:
        raise RequestError("no head was named", field="heads", expected="at least one")
    for head in chosen:
        if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < known[branch]:
            raise RequestError("no such head", field=branch, expected=f"0…{known[branch] - 1}", got=head)
    name = f"{branch}.weights"
    sources = None if source is None else [list(source)]
    found = trace(model, [list(ids)], (name,), sources=sources, stop=True)
    of_source = source is not None and branch.startswith("encoder.")
    own, read = labels(ids, pieces), [] if source is None else labels(source, source_pieces)
    keys = read if of_source or branch.endswith(".cross") else own
    return Pattern(branch, tuple(chosen), found[name][0, chosen], tuple(read if of_source else own), tuple(keys))
