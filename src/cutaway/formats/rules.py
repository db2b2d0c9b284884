"""How stored tensors become the model's, and back: each rule with its exact inverse.

A rule names tensors on both sides, ``ours`` (the model's parameters) and ``theirs`` (a file's), and
turns one tuple of tensors into the other. ``{i}`` in a name stands for every layer; :func:`expand`
writes them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor


class Rule(Protocol):
    """A reversible step between a file's tensors and the model's."""

    @property
    def ours(self) -> tuple[str, ...]: ...
    @property
    def theirs(self) -> tuple[str, ...]: ...
    def load(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A file's tensors, in the order of ``theirs``, as the model's, in the order of ``ours``."""
        ...

    def save(self, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The inverse of :meth:`load`."""
        ...


@dataclass(frozen=True)
class Rename:
    """The same tensor under another name."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]

    def load(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """As it is."""
        return stored

    def save(self, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """As it is."""
        return own


@dataclass(frozen=True)
class Transpose:
    """A matrix stored [in, out] instead of [out, in] (GPT-2's Conv1D)."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]

    def load(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Turned."""
        return tuple(tensor.t().contiguous() for tensor in stored)

    def save(self, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Turned back."""
        return tuple(tensor.t().contiguous() for tensor in own)


@dataclass(frozen=True)
class Fuse:
    """Several of our tensors stored as one, one after the other along the outputs.

    Attributes:
        sizes: rows of each of ours.
        transposed: the stored matrix is [in, out].
        groups: the rows come in this many groups, each with its part of every one of ours, in order: q·k·v of the
            first head, then of the second (BLOOM, GPT-NeoX).
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    sizes: tuple[int, ...]
    transposed: bool = False
    groups: int = 1

    def load(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Cut apart."""
        whole = stored[0].t() if self.transposed and stored[0].dim() == 2 else stored[0]
        rows = whole.unflatten(0, (self.groups, -1)).split([size // self.groups for size in self.sizes], dim=1)
        return tuple(part.flatten(0, 1).contiguous() for part in rows)

    def save(self, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Joined."""
        whole = torch.cat([tensor.unflatten(0, (self.groups, -1)) for tensor in own], dim=1).flatten(0, 1)
        return ((whole.t() if self.transposed and whole.dim() == 2 else whole).contiguous(),)


@dataclass(frozen=True)
class Stack:
    """Stored tensors of one shape that are one of ours along a new first axis: a layer's experts."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]

    def load(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Put on one another."""
        return (torch.stack(stored),)

    def save(self, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Taken apart."""
        return own[0].unbind(0)


@dataclass(frozen=True)
class Row:
    """A vector stored as a matrix of one row (the shift of BART's logits)."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]

    def load(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The row."""
        return (stored[0].squeeze(0),)

    def save(self, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """As a matrix."""
        return (own[0][None],)


@dataclass(frozen=True)
class Interleave:
    """Rotary pairs stored side by side (2j, 2j + 1) where ours stand half a head apart (j, j + half).

    Attributes:
        n_heads: heads along the rows.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    n_heads: int

    def load(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Pairs pulled apart."""
        tensor = stored[0]
        return (tensor.unflatten(0, (self.n_heads, -1, 2)).transpose(1, 2).reshape(tensor.shape),)

    def save(self, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Pairs put together."""
        tensor = own[0]
        return (tensor.unflatten(0, (self.n_heads, 2, -1)).transpose(1, 2).reshape(tensor.shape),)


@dataclass(frozen=True)
class Offset:
    """Stored plus a constant (GGUF keeps Gemma's norm weights as they multiply: one more than ours)."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    delta: float

    def load(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Taken off."""
        return (stored[0] - self.delta,)

    def save(self, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Put on."""
        return (own[0] + self.delta,)


@dataclass(frozen=True)
class Tie:
    """A tensor that need not be stored, since it is one of ours again; where it is, it must be equal.

    Attributes:
        same_as: ours, which it repeats.
    """

    theirs: tuple[str, ...]
    same_as: str
    ours: tuple[str, ...] = ()

    def load(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Nothing of it is used."""
        return ()

    def save(self, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Not stored."""
        return ()


@dataclass(frozen=True)
class Drop:
    """A stored tensor that this model has no use for, known by name, left behind on purpose.

    Attributes:
        learned: weights that something else may want, so that leaving them behind is worth a word.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...] = ()
    learned: bool = False

    def load(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Left behind."""
        return ()

    def save(self, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Not stored."""
        return ()


AnyRule = TypeVar("AnyRule", Rename, Transpose, Fuse, Stack, Row, Interleave, Offset, Tie, Drop)
WeightRule = Rename | Transpose | Fuse | Stack | Row | Interleave | Offset | Tie | Drop


def by_rows(rule: WeightRule) -> bool:
    """Whether a rule only moves whole rows of matrices, so that it does the same to rows of stored blocks."""
    return isinstance(rule, Rename | Interleave) or (isinstance(rule, Fuse) and not rule.transposed)


def at_layer(rule: AnyRule, i: int) -> AnyRule:
    """The rule with ``{i}`` filled in."""
    fill = {"{i}": str(i)}

    def named(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.replace("{i}", fill["{i}"]) for name in names)

    return replace(rule, ours=named(rule.ours), theirs=named(rule.theirs))


def saved(rules: Iterable[WeightRule], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor that a file holds, from the model's parameters."""
    out: dict[str, Tensor] = {}
    for rule in rules:
        if rule.ours:
            stored = rule.save(tuple(own[name] for name in rule.ours))
            out.update(zip(rule.theirs, stored, strict=True))
    return out


def rename(ours: str, theirs: str) -> Rename:
    """One tensor under another name."""
    return Rename((ours,), (theirs,))
