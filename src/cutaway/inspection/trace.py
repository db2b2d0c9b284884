"""Running a text and keeping named quantities of it, through prefill and every cached step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.cache import Source
from cutaway.errors import NameNotFound, RequestError
from cutaway.generation.checks import check_ids
from cutaway.generation.reading import check_length, read_sources
from cutaway.generation.sampling import Sampling
from cutaway.inspection.record import Edit, Recorder
from cutaway.models import Transformer
from cutaway.spec.names import match, tap_names

ROOM = 256  # tokens to come that a cache makes room for at once; it grows


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
        self._known = frozenset(axes)
        self.tokens = tokens

    def __getitem__(self, name: str) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        if name in self._known:
            raise NameNotFound("was not kept", field=name, hint="Name it in the call of trace.")
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
        long, kept = len(self.tokens[0]), len(self)
        size = f"{len(self.tokens)} × {long} token{'' if long == 1 else 's'}"
        return "\n".join([f"Trace of {size}: {kept} {'quantity' if kept == 1 else 'quantities'}", *lines])


@torch.no_grad()
def trace(
    model: Transformer,
    ids: list[list[int]],
    names: tuple[str, ...],
    edits: Mapping[str, Edit] | None = None,
    max_tokens: int = 0,
    stop_ids: Collection[int] = (),
    sources: list[list[int]] | None = None,
    sampling: Sampling | None = None,
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
        sampling: how the next token is chosen, and what ends a text; by default the likeliest, and ``stop_ids``.
        sources: of an encoder–decoder, what its encoder reads for each row; ``ids`` are the decoder's.

    Raises:
        NameNotFound: a pattern matches nothing.
        ContextExceeded: more tokens, with those to come, than a learned table has positions.
        RequestError: rows of different lengths, a name that is no text, an edit that is no function, or one that gives
            back another shape, dtype or device.
    """
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0:
        raise RequestError("not a whole number in range", field="max_tokens", expected="an int ≥ 0", got=max_tokens)
    axes = tap_names(model.spec)
    wanted = match(_names(names), axes)
    by_name: dict[str, list[Edit]] = {}
    for pattern, edit in _edits(edits).items():
        for name in match([pattern], axes):
            by_name.setdefault(name, []).append(_in_kind(edit, name))
    rows, length = _rectangle(ids, model.spec.vocab_size)
    check_length(model, length + max_tokens, "prompt")
    recorder = Recorder(wanted, by_name)
    if not model.spec.generates:
        if max_tokens:
            what = "this model does not say what comes next"
            raise RequestError(what, field="max_tokens", expected=0, got=max_tokens)
        model(torch.tensor(rows), tap=recorder)
    else:
        source = None
        if sources is not None:
            read, _ = _rectangle(sources, model.spec.source_vocab_size or model.spec.vocab_size)
            source = read_sources(model, read, recorder)
        chooses = sampling or Sampling(temperature=0.0, stop_ids=frozenset(stop_ids))
        _go_on(model, rows, recorder, max_tokens, chooses, source)
    return Trace({name: _joined(name, axes[name], recorder.kept[name]) for name in wanted}, axes, rows)


def _rectangle(ids: list[list[int]], vocab_size: int) -> tuple[list[list[int]], int]:
    rows = [check_ids(row, vocab_size) for row in ids]
    lengths = [len(row) for row in rows]
    if len(set(lengths)) != 1:
        what = "only texts of equal length are traced together"
        raise RequestError(what, field="prompt", got=lengths, hint="Trace them one by one.")
    return rows, lengths[0]


def _go_on(
    model: Transformer,
    rows: list[list[int]],
    recorder: Recorder,
    max_tokens: int,
    sampling: Sampling,
    source: Source | None,
) -> None:
    """Read the rows and go on, token by token; what is chosen is added to them."""
    length = len(rows[0])
    # Slots of a ring are out of order; here the key axis must be that of the text.
    cache = model.new_cache(len(rows), length + min(max_tokens, ROOM), sliding=False, source=source)
    step = torch.tensor(rows)
    left = max_tokens
    while True:
        hidden = model.hidden(step, cache=cache, tap=recorder)
        # Logits of every place only for whom asks: with a large vocabulary they are by far the largest tensor.
        if recorder.wants("logits") or recorder.at("head") is not None:
            logits = model.unembed(hidden, recorder)
        elif left:
            logits = model.unembed(hidden[:, -1:])
        if not left:
            break
        prompts, made = [row[:length] for row in rows], [row[length:] for row in rows]
        chosen = sampling.choose(logits[:, -1], prompts, made, [0] * len(rows), [max_tokens] * len(rows))
        step = torch.tensor(chosen)[:, None]
        for row, token in zip(rows, chosen, strict=True):
            row.append(token)
        ended = all(any(token in sampling.stop_ids for token in row[length:]) for row in rows)
        left = 0 if ended else left - 1


def _names(names: object) -> list[str]:
    """Names, if they are such."""
    if not isinstance(names, (list, tuple)):
        raise RequestError("not a list of names", field="names", expected="names or patterns", got=names)
    for place, name in enumerate(names):
        if not isinstance(name, str):
            hint = "Give the names one after another." if isinstance(name, (list, tuple)) else None
            raise RequestError("not a name", field=f"names/{place}", expected="a text", got=name, hint=hint)
    return list(names)


def _edits(edits: object) -> Mapping[str, Edit]:
    """Edits, if they are such."""
    if edits is None:
        return {}
    if not isinstance(edits, Mapping):
        raise RequestError("not a mapping", field="edits", expected="name → function of a tensor", got=edits)
    for name, edit in edits.items():
        if not isinstance(name, str):
            raise RequestError("not a name", field="edits", expected="a text", got=name)
        if not callable(edit):
            raise RequestError("not a function", field=f"edits/{name}", expected="a function of a tensor", got=edit)
    return edits


def _in_kind(edit: Edit, name: str) -> Edit:
    """An edit whose numbers must be of the kind it was given: what comes after computes with them as they are."""

    def checked(value: Tensor) -> Tensor:
        kind = (value.dtype, value.device)
        edited = edit(value)
        if isinstance(edited, Tensor) and (edited.dtype, edited.device) != kind:
            wanted, got = (" on ".join(map(str, pair)) for pair in (kind, (edited.dtype, edited.device)))
            raise RequestError(
                "an edit gave back other numbers", field=name, expected=wanted, got=got, hint="End it with .to(value)."
            )
        return edited

    return checked


def _joined(name: str, axes: tuple[str, ...], passes: list[Tensor]) -> Tensor:
    """Passes one after the other along the queries; keys that an earlier query could not see are filled in.

    What has no queries, such as all that an encoder–decoder computes of its source, is there once.
    """
    if "query" not in axes:
        return passes[0]
    if len(passes) > 1 and "key" in axes:
        most, empty = passes[-1].shape[-1], float("-inf") if name.endswith("scores") else 0.0
        passes = [F.pad(tensor, (0, most - tensor.shape[-1]), value=empty) for tensor in passes]
    return torch.cat(passes, dim=axes.index("query"))
