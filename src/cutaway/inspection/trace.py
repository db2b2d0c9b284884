"""What was seen of a run: name → tensor, with words for its axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import NameNotFound, RequestError
from cutaway.formats.files import StrPath
from cutaway.inspection import traced_file
from cutaway.inspection.figure import Figure, Part, Rows, Words
from cutaway.inspection.shown import Shown, for_json
from cutaway.inspection.traced_file import Facts
from cutaway.spec import ModelSpec
from cutaway.spec.names import match

ROWS, NAMES = 8, 40  # texts that a figure shows, names that a repr has
PIECE = 1 << 20  # numbers that are looked at at a time


class Trace(Mapping[str, Tensor], Shown):
    """Name → tensor, with the words for its axes. A pattern will do where it means one name.

    Where rows differ in length a row's own tokens come first, and after them NaN (−1 in whole numbers): "nothing
    here". :meth:`row` gives one without.

    Attributes:
        axes: name → axis words.
        tokens: the ids that were run, the generated ones included. [batch][query]
        sources: of an encoder–decoder, the ids that its encoder read. [batch][source]
        pieces, source_pieces: a text for each of these, or None where there was no tokenizer.
        spec: of the model.
    """

    def __init__(self, kept: Mapping[str, Tensor], facts: Facts) -> None:
        self._kept = dict(kept)
        self._facts = facts
        self.axes = {name: facts.axes[name] for name in kept}
        self.tokens, self.sources = facts.tokens, facts.sources
        self.pieces, self.source_pieces = facts.pieces, facts.source_pieces

    @property
    def spec(self) -> ModelSpec:
        """Of the model that was run."""
        return self._facts.spec

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row) for row in self.tokens]

    @property
    def source_lengths(self) -> list[int] | None:
        """Tokens of each row's source."""
        return None if self.sources is None else [len(row) for row in self.sources]

    @property
    def positions(self) -> Tensor:
        """Where each token stands in its text, −1 where a row has ended. [batch, query]"""
        lengths = torch.tensor(self.lengths)
        steps = torch.arange(int(lengths.max()))
        return torch.where(steps < lengths[:, None], steps, -1)

    def row(self, index: int) -> Trace:
        """One row, with nothing past its end; the batch axis stays, 1 long.

        Raises:
            RequestError: there is no such row.
        """
        rows = len(self.tokens)
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < rows:
            raise RequestError("there is no such row", field="row", expected=f"0…{rows - 1}", got=index)
        ends = {"query": len(self.tokens[index]), "key": len(self.tokens[index])}
        if self.sources is not None:
            ends |= dict.fromkeys(("source", "source_key"), len(self.sources[index]))
        kept = {}
        for name, tensor in self._kept.items():
            cut = [slice(index, index + 1), *(slice(ends.get(word)) for word in self.axes[name][1:])]
            kept[name] = tensor[tuple(cut)]
        return Trace(kept, self._facts.row(index))

    def save(self, path: StrPath) -> None:
        """Write it as one file, usually ``NAME.cut``; ``path`` is the old file or the whole new one at every moment.

        The file is safetensors, with tokens, axes and the model's description as JSON in its metadata.

        Raises:
            StorageError: the disk refuses.
        """
        traced_file.write(path, self._kept, self._facts)

    @classmethod
    def open(cls, path: StrPath) -> Trace:
        """Read what :meth:`save` wrote, without the model.

        Raises:
            FormatError: no trace, cut off, or changed since it was written.
            StorageError: there is no such file.
        """
        return cls(*traced_file.read(path))

    def __getitem__(self, name: str) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        if name in self._facts.axes:
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

    def figure(self) -> Figure:
        """The texts, and what is kept of them."""
        parts: list[Part] = []
        for i, row in enumerate(self.tokens[:ROWS]):
            pieces = [str(token) for token in row] if self.pieces is None else self.pieces[i]
            parts.append(Words(f"Text {i}" if len(self.tokens) > 1 else "Text", pieces, [None] * len(row)))
            if self.sources is not None:
                read = (
                    [str(token) for token in self.sources[i]] if self.source_pieces is None else self.source_pieces[i]
                )
                parts.append(Words("Its source", read, [None] * len(read)))
        rows: list[list[str | int | float]] = [
            [
                name,
                " × ".join(f"{word} {n}" for word, n in zip(self.axes[name], tensor.shape, strict=True)),
                _rms(tensor),
            ]
            for name, tensor in self.items()
        ]
        parts.append(Rows("Kept", ["quantity", "axes", "rms"], rows))
        notes = [
            "rms: the root of the mean square of what is there.",
            "Numbers are the model's own, unless it was edited.",
        ]
        if len(self.tokens) > ROWS:
            notes.insert(0, f"The first {ROWS} of {len(self.tokens)} texts are shown.")
        return Figure(f"Trace of {_size(self.lengths)}", parts, notes)

    @for_json
    def as_dict(self) -> dict[str, Any]:
        """What is kept and of what, without the numbers: those are in the file."""
        kept = [{"name": k, "axes": [*self.axes[k]], "shape": [*t.shape], "rms": _rms(t)} for k, t in self.items()]
        texts = {"tokens": self.tokens, "pieces": self.pieces, "sources": self.sources}
        return {**texts, "source_pieces": self.source_pieces, "kept": kept}

    def __repr__(self) -> str:
        """Every name with its axes and their sizes, as a table."""
        width = max(map(len, self._kept), default=0)
        sizes = (_sizes(self.axes[k], t) for k, t in self.items())
        lines = [f"  {name:<{width}}  {words}" for name, words in zip(self._kept, sizes, strict=True)]
        kept = len(self)
        if kept > NAMES:
            lines[NAMES:] = [f"  … and {kept - NAMES} more"]
        return "\n".join(
            [f"Trace of {_size(self.lengths)}: {kept} {'quantity' if kept == 1 else 'quantities'}", *lines]
        )


def _sizes(axes: Sequence[str], tensor: Tensor) -> str:
    return " × ".join(f"{word} {n}" for word, n in zip(axes, tensor.shape, strict=True))


def _rms(tensor: Tensor) -> float:
    """Of what is there and finite; a piece at a time, since weights of a long text are as much as memory holds."""
    total, count = 0.0, 0
    for piece in tensor.detach().flatten().split(PIECE):
        there = piece[piece.isfinite()].double()
        total, count = total + float(there.square().sum()), count + len(there)
    return math.sqrt(total / count) if count else 0.0


def _size(lengths: Sequence[int]) -> str:
    low, high = min(lengths), max(lengths)
    return f"{len(lengths)} × {low if low == high else f'{low}…{high}'} token{'' if high == 1 else 's'}"
