"""A trace as one file: safetensors, with what the tensors mean as JSON in its metadata."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from cutaway.errors import CutawayError, FormatError
from cutaway.formats.files import StrPath, parse_json, sweep
from cutaway.formats.paths import usable_path
from cutaway.formats.safetensors import SafetensorsFile, save_safetensors
from cutaway.generation.fingerprint import put
from cutaway.spec import ModelSpec
from cutaway.spec.names import axis_sizes, tap_names
from cutaway.spec.serial import spec_from_json, spec_to_json

FORMAT = "cutaway trace"
VERSION = "1"
LARGEST = 1 << 27  # bytes of one text in the metadata

Pieces = list[list[str]]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a trace says beside its tensors; see :class:`cutaway.inspection.Trace`."""

    spec: ModelSpec
    axes: Mapping[str, tuple[str, ...]]
    tokens: list[list[int]]
    pieces: Pieces | None = None
    sources: list[list[int]] | None = None
    source_pieces: Pieces | None = None

    def row(self, index: int) -> Self:
        """Of one row."""

        def one(rows: Any) -> Any:
            return None if rows is None else [rows[index]]

        mine = {name: one(getattr(self, name)) for name in ("tokens", "pieces", "sources", "source_pieces")}
        return replace(self, **mine)


def write(path: StrPath, kept: Mapping[str, Tensor], facts: Facts) -> None:
    """Write a trace, so that ``path`` is the old file or the whole new one at every moment."""
    path = usable_path(path)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in kept.items()}
    metadata = {"format": FORMAT, "version": VERSION, "spec": json.dumps(spec_to_json(facts.spec), sort_keys=True)}
    metadata["axes"] = json.dumps({name: facts.axes[name] for name in kept})
    for name in ("tokens", "pieces", "sources", "source_pieces"):
        metadata[name] = json.dumps(getattr(facts, name), ensure_ascii=False)
    sweep(Path(os.path.realpath(path)).parent)  # what a killed writer left
    save_safetensors(path, tensors, {**metadata, "sha256": _digest(metadata, tensors)})


def read(path: StrPath) -> tuple[dict[str, Tensor], Facts]:
    """Read a trace.

    Raises:
        FormatError: no trace, cut off, changed since it was written, of another version, or of no model or text.
    """
    path = usable_path(path)
    with SafetensorsFile(path) as file:
        metadata = dict(file.metadata)
        for key, expected in (("format", FORMAT), ("version", VERSION)):
            if metadata.get(key) != expected:
                what = "is no saved trace" if key == "format" else "is of another version of this format"
                raise FormatError(what, path=path, field=key, expected=expected, got=metadata.get(key))
        stated = metadata.pop("sha256", None)
        tensors = {name: file.read(name) for name in file.names()}
    if stated != _digest(metadata, tensors):
        raise FormatError("was changed since it was written", path=path, field="sha256")

    def said(key: str) -> Any:
        if key not in metadata:
            raise FormatError("missing", path=path, field=key)
        return parse_json(metadata[key].encode(), path=path, limit=LARGEST)

    try:
        spec = spec_from_json(said("spec"))
    except CutawayError as error:
        raise error.at(path) from error
    tokens, sources = _ids(path, "tokens", said("tokens"), spec.vocab_size), said("sources")
    if (sources is not None) != (spec.source is not None):
        wanted = "none: this model reads one text" if sources is not None else "a text for each row"
        raise FormatError("not what this model reads", path=path, field="sources", expected=wanted)
    facts = Facts(
        spec,
        tap_names(spec),
        tokens,
        _pieces(path, "pieces", said("pieces"), tokens),
        None if sources is None else _ids(path, "sources", sources, spec.source_vocab_size or spec.vocab_size),
        _pieces(path, "source_pieces", said("source_pieces"), sources),
    )
    _check(path, tensors, facts, said("axes"))
    return {name: tensors[name] for name in facts.axes if name in tensors}, facts


def _rows(path: str, field: str, value: Any, kind: type) -> list[list[Any]]:
    rows = isinstance(value, list) and bool(value) and all(isinstance(row, list) and row for row in value)
    if not rows or not all(type(one) is kind for row in value for one in row):
        raise FormatError("not a text for each row", path=path, field=field)
    return value


def _ids(path: str, field: str, value: Any, size: int) -> list[list[int]]:
    """Texts of a vocabulary of so many tokens."""
    rows = _rows(path, field, value, int)
    for row in rows:
        for one in row:
            if not 0 <= one < size:
                raise FormatError(
                    "not a token of this model", path=path, field=field, expected=f"0…{size - 1}", got=one
                )
    return rows


def _pieces(path: str, field: str, value: Any, tokens: Sequence[Sequence[int]] | None) -> Pieces | None:
    if value is None:
        return None
    rows = _rows(path, field, value, str)
    if tokens is None or [len(row) for row in rows] != [len(row) for row in tokens]:
        raise FormatError("not a text for each token", path=path, field=field)
    return rows


def _check(path: str, tensors: Mapping[str, Tensor], facts: Facts, axes: Any) -> None:
    """Refuse what is no quantity of this model, or not of these texts."""
    if axes != {name: [*facts.axes.get(name, ())] for name in tensors}:
        raise FormatError("not the axes of these quantities", path=path, field="axes")
    longest = max(map(len, facts.tokens))
    sizes = {"batch": len(facts.tokens), "query": longest, "key": longest}
    if facts.sources is not None:
        if len(facts.sources) != len(facts.tokens):
            raise FormatError("not a source for each row", path=path, field="sources")
        sizes |= dict.fromkeys(("source", "source_key"), max(map(len, facts.sources)))
    for name in tensors:
        if name not in facts.axes:
            raise FormatError("is no quantity of this model", path=path, field=name)
    for name, words in facts.axes.items():
        if (tensor := tensors.get(name)) is None:
            continue
        known = sizes | axis_sizes(facts.spec, name)
        wanted = [known.get(word, n) for word, n in zip(words, tensor.shape, strict=False)]
        if len(words) != tensor.dim() or [*tensor.shape] != wanted:
            raise FormatError("not of these texts", path=path, field=name, expected=wanted, got=[*tensor.shape])


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name in sorted(tensors):
        put(found, name, tensors[name], [*tensors[name].shape])
    return found.hexdigest()
