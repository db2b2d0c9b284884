"""Running a text and keeping named quantities of it, through prefill and every cached step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.errors import NameNotFound, RequestError
from cutaway.generation.params import check_ids
from cutaway.generation.session import check_length
from cutaway.inspection.record import Edit, Recorder
from cutaway.models import Transformer
from cutaway.spec.names import match, tap_names


class Trace(Mapping[str, Tensor]):
    """Name → tensor, with the words for its axes. A pattern will do where it means one name.

    Attributes:
        tokens: the ids that were run, the generated ones included. [batch][query]
        axes: name → axis words.
    """

    def __init__(
        self, kept: Mapping[str, Tensor], axes: Mapping[str, tuple[str, ...]], tokens: list[list[int]]
    ) -> None:
        self._kept = dict(kept)
        self.axes = {name: axes[name] for name in kept}
        self.tokens = tokens

    def __getitem__(self, name: str) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        found = match([name], self._kept)
        if len(found) > 1:
            shown = ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
            raise NameNotFound("several quantities match", field=name, expected="one", got=len(found), hint=f"{shown}.")
        return self._kept[found[0]]

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def get(self, name: str, default: Any = None) -> Any:
        """The quantity of exactly this name, or the default."""
        return self._kept.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        """Every name with its axes and their sizes, as a table."""
        width = max(map(len, self._kept), default=0)
        sizes = (
            " × ".join(f"{word} {n}" for word, n in zip(self.axes[k], t.shape, strict=True)) for k, t in self.items()
        )
        lines = [f"  {name:<{width}}  {words}" for name, words in zip(self._kept, sizes, strict=True)]
        return "\n".join(
            [f"Trace of {len(self.tokens)} × {len(self.tokens[0])} tokens: {len(self)} quantities", *lines]
        )


@torch.no_grad()
def trace(
    model: Transformer,
    ids: list[list[int]],
    names: tuple[str, ...],
    edits: Mapping[str, Edit] | None = None,
    max_tokens: int = 0,
    stop_ids: Collection[int] = (),
) -> Trace:
    """Run texts of equal length and keep the quantities that ``names`` match.

    Args:
        model: what to run.
        ids: token ids, rows of equal length. [batch][query]
        names: names or patterns; see ``cutaway show --taps``.
        edits: name or pattern → function of the tensor to the one used instead. Where several match, all are
            applied, in their order here.
        max_tokens: how many tokens to go on with, greedily, with a cache. The last is read too.
        stop_ids: tokens that end a text; going on ends when every text has met one.

    Raises:
        NameNotFound: a pattern matches nothing.
        ContextExceeded: more tokens, with those to come, than a learned table has positions.
        RequestError: rows of different lengths, or an edit that gives back another shape.
    """
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0:
        raise RequestError("not a whole number in range", field="max_tokens", expected="an int ≥ 0", got=max_tokens)
    axes = tap_names(model.spec)
    wanted = match(names, axes)
    by_name: dict[str, list[Edit]] = {}
    for pattern, edit in (edits or {}).items():
        for name in match([pattern], axes):
            by_name.setdefault(name, []).append(edit)
    rows = [check_ids(row, model.spec.vocab_size) for row in ids]
    lengths = [len(row) for row in rows]
    if len(set(lengths)) != 1:
        what = "only texts of equal length are traced together"
        raise RequestError(what, field="prompt", got=lengths, hint="Trace them one by one.")
    check_length(model, lengths[0] + max_tokens, "prompt")

    recorder = Recorder(wanted, by_name)
    # Slots of a ring are out of order; here the key axis must be that of the text.
    cache = model.new_cache(len(rows), lengths[0] + max_tokens, sliding=False)
    step = torch.tensor(rows)
    left = max_tokens
    while True:
        hidden = model.hidden(step, cache=cache, tap=recorder)
        # Logits of every place only for whom asks: with a large vocabulary they are by far the largest tensor.
        if recorder.wants("logits"):
            logits = model.unembed(hidden, recorder)
        elif left:
            logits = model.unembed(hidden[:, -1:])
        if not left:
            break
        step = logits[:, -1:].argmax(-1).cpu()
        for row, token in zip(rows, step[:, 0].tolist(), strict=True):
            row.append(token)
        ended = all(any(token in stop_ids for token in row[lengths[0] :]) for row in rows)
        left = 0 if ended else left - 1
    return Trace({name: _joined(name, axes[name], recorder.kept[name]) for name in wanted}, axes, rows)


def _joined(name: str, axes: tuple[str, ...], passes: list[Tensor]) -> Tensor:
    """Passes one after the other along the queries; keys that an earlier query could not see are filled in."""
    if len(passes) > 1 and "key" in axes:
        most, empty = passes[-1].shape[-1], float("-inf") if name.endswith("scores") else 0.0
        passes = [F.pad(tensor, (0, most - tensor.shape[-1]), value=empty) for tensor in passes]
    return torch.cat(passes, dim=axes.index("query"))
