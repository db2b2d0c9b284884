"""One text through a model with its graph kept or not, for those that explain an answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.reading import check_length
from cutaway.inspection.listed import listed
from cutaway.inspection.record import Recorder
from cutaway.inspection.target import row_of
from cutaway.models import Transformer
from cutaway.models.head import Classifier, Head, Pooler
from cutaway.modules.tap import Tap


@dataclass(frozen=True, slots=True)
class Text:
    """What a model reads: a text, and of an encoder–decoder what its encoder reads beside it.

    Attributes:
        ids: of the text; of an encoder–decoder, the decoder's. [query]
        source: the encoder's, of an encoder–decoder. [source]
        types: each token's type, where the model has types. [query]
    """

    ids: tuple[int, ...]
    source: tuple[int, ...] | None = None
    types: tuple[int, ...] | None = None


def text_of(
    model: Transformer,
    ids: Sequence[int],
    source: Sequence[int] | None,
    types: Sequence[int] | None,
    field: str = "ids",
) -> Text:
    """The same, checked: that the model can read it, and that nothing is left to chance.

    Raises:
        RequestError: no ids, one outside the vocabulary, a source too many or missing, or a model in training mode.
        ContextExceeded: more tokens than a learned table has positions.
    """
    spec = model.spec
    if model.training:
        raise RequestError("the model is in training mode", field="model", hint="Call model.eval() first.")
    row = row_of(ids, spec.vocab_size, field)
    check_length(model, len(row), field)
    if (source is not None) != (spec.source is not None):
        what = "an encoder–decoder needs a source to read" if source is None else "this model reads one text"
        raise RequestError(what, field="source", got=source)
    read = None
    if source is not None:
        read = tuple(row_of(source, spec.source_vocab_size or spec.vocab_size, "source"))
        check_length(model, len(read), "source", of_source=True)
    if types is not None and (not spec.embedding.types or len(types) != len(row)):
        wanted = len(row) if spec.embedding.types else None
        raise RequestError("not a type for each token", field="types", expected=wanted, got=len(types))
    kinds = None if types is None else tuple(row_of(types, spec.embedding.types, "types"))
    return Text(tuple(row), read, kinds)


def named(pieces: Sequence[str] | None, ids: Sequence[int], field: str) -> tuple[str, ...]:
    """A text for each token: those that were given, or the ids.

    Raises:
        RequestError: not one for each.
    """
    if pieces is None:
        return tuple(map(str, ids))
    if len(listed(field, pieces, "texts")) != len(ids):
        raise RequestError("not a text for each token", field=field, expected=len(ids), got=len(pieces))
    return tuple(pieces)


def watching(names: Collection[str], see: Callable[[str, Tensor], Tensor]) -> Recorder:
    """A tap that shows each of these quantities to a function and goes on with what that gives back."""
    return Recorder((), {name: [partial(see, name)] for name in names})


def streamed(model: Transformer, text: Text, tap: Tap | None, batch: int = 1) -> Tensor:
    """What the head reads, of a text as many times over. [batch, query, d_model]"""
    ids = torch.tensor([text.ids]).expand(batch, -1)
    types = None if text.types is None else torch.tensor([text.types]).expand(batch, -1)
    source = None
    if text.source is not None:
        source = model.read(torch.tensor([text.source]).expand(batch, -1), tap=tap)
    return model.hidden(ids, tap=tap, source=source, types=types)


def answered(model: Transformer, text: Text, tap: Tap | None, batch: int = 1, position: int | None = None) -> Tensor:
    """What the head says of it, at a position or at all.

    Returns:
        Scores of tokens ([batch, query, vocab]; at a position [batch, vocab]), of labels ([batch, label], or as for
        tokens where each is labelled), or a vector; without a head the stream.
    """
    x = streamed(model, text, tap, batch)
    if isinstance(model.head, Head):
        return model.unembed(x, tap) if position is None else model.unembed(x[:, position : position + 1], tap)[:, 0]
    if not isinstance(model.head, Pooler | Classifier):
        return x
    positions = torch.arange(len(text.ids)).expand(batch, -1)
    out = model.answer(x, positions, tap)
    return out if out.dim() == 2 or position is None else out[:, position]
