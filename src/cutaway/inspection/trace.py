"""Running a text and keeping named quantities of it, through prefill and every cached step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.inspection.record import Edit, Recorder
from cutaway.models import Transformer
from cutaway.spec.names import match, tap_names


class Trace(Mapping[str, Tensor]):
    """Name → tensor, with the words for its axes.

    Attributes:
        tokens: the ids that were run, the generated ones included. [batch][query]
        axes: name → axis words.
    """

    def __init__(self, kept: Mapping[str, Tensor], axes: Mapping[str, tuple[str, ...]], tokens: list[list[int]]) -> None:
        self._kept = dict(kept)
        self.axes = {name: axes[name] for name in kept}
        self.tokens = tokens

    def __getitem__(self, name: str) -> Tensor:
        return self._kept[match([name], self._kept)[0]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        lines = [f"  {name}: {dict(zip(self.axes[name], t.shape, strict=True))}" for name, t in self._kept.items()]
        return "\n".join([f"Trace of {len(self._kept)} quantities", *lines])


@torch.no_grad()
def trace(
    model: Transformer,
    ids: list[list[int]],
    names: tuple[str, ...],
    edits: Mapping[str, Edit] | None = None,
    max_tokens: int = 0,
) -> Trace:
    """Run texts of equal length and keep the quantities that ``names`` match.

    Args:
        model: what to run.
        ids: token ids, rows of equal length. [batch][query]
        names: names or patterns; see ``cutaway show --taps``.
        edits: name or pattern → function of the tensor to the one used instead.
        max_tokens: how many tokens to go on with, greedily, with a cache.

    Raises:
        NameNotFound: a pattern matches nothing.
        RequestError: rows of different lengths.
    """
    axes = tap_names(model.spec)
    wanted = match(names, axes)
    by_name = {name: edit for pattern, edit in (edits or {}).items() for name in match([pattern], axes)}
    if len({len(row) for row in ids}) != 1 or not ids[0]:
        raise RequestError("rows of one length, and not empty, are traced together", field="prompt")
    recorder = Recorder(wanted, by_name)
    rows = [list(row) for row in ids]
    # Slots of a ring are out of order; here the key axis must be that of the text.
    cache = model.new_cache(len(rows), len(rows[0]) + max_tokens, sliding=False)
    step = torch.tensor(rows)
    for _ in range(max_tokens + 1):
        logits = model(step, cache=cache, tap=recorder)
        if len(rows[0]) == len(ids[0]) + max_tokens:
            break
        step = logits[:, -1:].argmax(-1).cpu()
        for row, token in zip(rows, step[:, 0].tolist(), strict=True):
            row.append(token)
    return Trace({name: _joined(name, axes[name], recorder.kept[name]) for name in wanted}, axes, rows)


def _joined(name: str, axes: tuple[str, ...], passes: list[Tensor]) -> Tensor:
    """Passes one after the other along the queries; keys that an earlier query could not see are filled in."""
    if len(passes) > 1 and "key" in axes:
        most, empty = passes[-1].shape[-1], float("-inf") if name.endswith("scores") else 0.0
        passes = [F.pad(tensor, (0, most - tensor.shape[-1]), value=empty) for tensor in passes]
    return torch.cat(passes, dim=axes.index("query"))
