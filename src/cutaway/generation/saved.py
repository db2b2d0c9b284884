"""A session as one safetensors file: its tokens, what its cache holds of them, and which model that is of.

Keys and values mean something to the model that made them only. So the file says which it was: the spec, the type
of its numbers, and a hash of its weights' names, shapes and some of their values.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cutaway.cache import KvDtype, Source, StoredCache, restore_source
from cutaway.cache.state import inside, take, within
from cutaway.errors import CutawayError, FormatError, ResourceError, ResumeMismatch
from cutaway.formats.files import StrPath, sweep
from cutaway.formats.safetensors import SafetensorsFile, save_safetensors
from cutaway.generation.fingerprint import model_facts, put, spec_difference
from cutaway.models import Transformer

FORMAT = "cutaway session"
VERSION = "1"
_BOTH = ("True", "False")


@dataclass(frozen=True, slots=True)
class Saved:
    """What was read from a file.

    Attributes:
        tokens: of each row.
        steady: whether it was a steady session.
        kv_dtype: in which smaller type its keys and values are.
        paged: whether they are in pages.
        source: what an encoder has read for each row.
        state: of the cache.
    """

    tokens: list[list[int]]
    steady: bool
    kv_dtype: KvDtype | None
    paged: bool
    source: Source | None
    state: dict[str, Tensor]

    def fill(self, cache: StoredCache, path: StrPath) -> None:
        """Put the state into a cache made for it.

        Raises:
            ShapeMismatch, FormatError: it does not fit there.
            ResourceError: there is too little memory.
        """
        try:
            # Before room is made for them.
            lengths = take(self.state, "lengths", torch.long, (len(self.tokens),)).tolist()
            if any(n > len(row) for n, row in zip(lengths, self.tokens, strict=True)):
                raise FormatError("keys of more tokens than there are", field="cache.lengths")
            cache.restore(self.state)
        except CutawayError as error:
            raise error.at(path) from error
        except RuntimeError as error:  # what torch says of memory that there is none of
            raise ResourceError("does not fit into memory", path=path) from error


def write(
    path: StrPath,
    model: Transformer,
    tokens: Sequence[Sequence[int]],
    cache: StoredCache,
    steady: bool,
    kv_dtype: KvDtype | None,
    paged: bool,
) -> None:
    """Write a session, so that ``path`` is the old file or the whole new one at every moment."""
    tensors = {
        "tokens": torch.tensor([token for row in tokens for token in row], dtype=torch.long),
        "rows": torch.tensor([len(row) for row in tokens], dtype=torch.long),
        **within("cache", cache.state()),
    }
    if cache.source is not None:
        tensors |= within("source", cache.source.state())
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"steady": str(steady), "kv_dtype": str(kv_dtype), "paged": str(paged), **_fingerprint(model)}
    sweep(Path(os.path.realpath(path)).parent)  # what a killed writer left, an hour ago or more
    save_safetensors(path, tensors, {**metadata, "sha256": _digest(metadata, tensors)})


def read(path: StrPath, model: Transformer) -> Saved:
    """Read a session that the same model can go on with.

    Raises:
        ResumeMismatch: another model, other weights, another version; the field says what differs.
        FormatError: no saved session, cut off, or changed since it was written.
        ShapeMismatch: its tensors are not those of this model's cache.
    """
    with SafetensorsFile(path) as file:
        metadata = dict(file.metadata)
        stated = metadata.pop("sha256", None)
        _check_model(path, metadata, model)
        tensors = {name: file.read(name) for name in file.names()}
    if stated != _digest(metadata, tensors):
        raise FormatError("was changed since it was written", path=path, field="sha256")
    for key, values in (("steady", _BOTH), ("kv_dtype", ("None", "int8")), ("paged", _BOTH)):
        if metadata.get(key) not in values:
            raise FormatError("unknown value", path=path, field=key, expected=values, got=metadata.get(key))
    try:
        tokens = _tokens(tensors, model.spec.vocab_size)
        state, held = inside("cache", tensors), inside("source", tensors)
        source = None
        if model.spec.source is not None:
            source = restore_source(model.spec.decoder, held, len(tokens), model.dtype, model.device)
    except CutawayError as error:
        raise error.at(path) from error
    kv_dtype: KvDtype | None = "int8" if metadata["kv_dtype"] == "int8" else None
    return Saved(tokens, metadata["steady"] == "True", kv_dtype, metadata["paged"] == "True", source, state)


def _tokens(tensors: Mapping[str, Tensor], vocab_size: int) -> list[list[int]]:
    lengths = take(tensors, "rows", torch.long, (None,))
    flat = take(tensors, "tokens", torch.long, (None,))
    if not len(lengths) or bool((lengths < 0).any() | (lengths > len(flat)).any()) or int(lengths.sum()) != len(flat):
        raise FormatError("not how the tokens lie in rows", field="rows", got=lengths.tolist())
    if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < vocab_size:
        raise FormatError("not tokens of this vocabulary", field="tokens", expected=f"0…{vocab_size - 1}")
    return [row.tolist() for row in flat.split(lengths.tolist())]


def _fingerprint(model: Transformer) -> dict[str, str]:
    """What a file says of its model, in the order in which it is compared."""
    return {"format": FORMAT, "version": VERSION, **model_facts(model)}


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name in sorted(tensors):
        put(found, name, tensors[name], [*tensors[name].shape])
    return found.hexdigest()


def _check_model(path: StrPath, metadata: Mapping[str, str], model: Transformer) -> None:
    mine = _fingerprint(model)
    if metadata.get("format") != FORMAT:
        raise FormatError("is no saved session", path=path, field="format", expected=FORMAT, got=metadata.get("format"))
    for key, value in mine.items():
        theirs = metadata.get(key)
        if theirs is None:
            raise FormatError("missing", path=path, field=key)
        if theirs != value:
            _differs(path, key, value, theirs)


def _differs(path: StrPath, key: str, mine: str, theirs: str) -> None:
    what = {
        "version": "is of another version of this format",
        "spec": "was saved with another model",
        "dtype": "was saved with another type of numbers",
        "weights": "was saved with other weights",
    }[key]
    hint = "Read the tokens again with this model." if key != "version" else None
    if key == "spec":
        found = spec_difference(path, mine, theirs)
        if found is None:
            return  # written otherwise, and the same
        place, mine, theirs = found
        raise ResumeMismatch(what, path=path, field=place, expected=mine, got=theirs, hint=hint)
    raise ResumeMismatch(what, path=path, field=key, expected=mine, got=theirs, hint=hint)
