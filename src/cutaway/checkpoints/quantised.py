"""Matrices on their way into a file as blocks: what each becomes, and what that costs in precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod, sqrt

import torch
from torch import Tensor

from cutaway.errors import CutawayError, RequestError
from cutaway.formats.mixes import Mix
from cutaway.formats.quantise import quantise, type_for
from cutaway.formats.quants import BLOCK_TYPES, BlockType, block_type, dequantise
from cutaway.formats.rules import WeightRule, by_rows
from cutaway.kernels import Stored
from cutaway.spec import ModelSpec

_CHUNK = 1 << 20  # numbers compared at a time


@dataclass(slots=True)
class Loss:
    """What became of the tensors of one type.

    Attributes:
        tensors, numbers, nbytes: how many, how many numbers they hold, and their bytes in the file.
        measured: numbers that were rounded now; those that were of this type before stay as they are.
        largest, absolute, square: of these, the largest error, and the sums of errors and of their squares.
        weight: and the sum of the squares of the numbers themselves.
    """

    tensors: int = 0
    numbers: int = 0
    nbytes: int = 0
    measured: int = 0
    largest: float = 0.0
    absolute: float = 0.0
    square: float = 0.0
    weight: float = 0.0

    @property
    def mean(self) -> float:
        """The mean error, without its sign."""
        return self.absolute / self.measured if self.measured else 0.0

    @property
    def relative(self) -> float:
        """The root of the mean square error, as a share of the numbers' own."""
        return sqrt(self.square / self.weight) if self.weight else 0.0


@dataclass(slots=True)
class Losses:
    """What quantizing a model cost.

    Attributes:
        types: type → its tensors.
        others: (tensor, type it should have had, type it has, numbers in a row): rows that are not whole blocks.
    """

    types: dict[str, Loss] = field(default_factory=dict)
    others: list[tuple[str, str, str, int]] = field(default_factory=list)

    def add(
        self, kind: BlockType, rows: int, cols: int, numbers: Tensor | None = None, raw: Tensor | None = None
    ) -> None:
        """Count a tensor in; with its numbers before and its bytes after, what lies between."""
        loss = self.types.setdefault(kind.name, Loss())
        loss.tensors += 1
        loss.numbers += rows * cols
        loss.nbytes += rows * kind.row_bytes(cols)
        if numbers is None or raw is None:
            return
        loss.measured += rows * cols
        step = max(1, _CHUNK // cols)
        for start in range(0, rows, step):
            x = numbers[start : start + step].double()
            error = (torch.from_numpy(dequantise(raw[start : start + step].numpy(), kind, cols)) - x).abs()
            loss.largest = max(loss.largest, float(error.max()))
            loss.absolute += float(error.sum())
            loss.square += float(error.square().sum())
            loss.weight += float(x.square().sum())


@dataclass(frozen=True, slots=True)
class Target:
    """What matrices become.

    Attributes:
        mix: the types that were asked for, or None.
        plain: what they are otherwise, and where rows are not whole blocks.
        keep: where nothing was asked for, whether stored ones stay as they are.
    """

    mix: Mix | None
    plain: BlockType
    keep: bool = True


@dataclass(frozen=True, slots=True)
class Planned:
    """A matrix of a file, or several of one size: its type, and whether the model has it so already."""

    rule: WeightRule
    place: int
    name: str
    rows: int
    cols: int
    type: BlockType
    wanted: BlockType
    kept: bool

    def make(self, parts: tuple[Tensor, ...], losses: Losses | None = None) -> Tensor:
        """The matrix: rows of bytes where it has or gets a type, else its numbers.

        Args:
            parts: the model's tensors that it is made of.
            losses: told what it cost.

        Raises:
            CutawayError: a number that the type cannot hold, by the tensor's name.
        """
        if losses is not None and self.type is not self.wanted:
            losses.others.append((self.name, self.wanted.name, self.type.name, self.cols))
        with torch.no_grad():
            if self.kept:
                if losses is not None:
                    losses.add(self.type, self.rows, self.cols)
                return self.rule.save(tuple(part.blocks()[0] for part in parts if isinstance(part, Stored)))[self.place]
            numbers = self.rule.save(tuple(dense(part) for part in parts))[self.place]
            try:
                raw = encoded(numbers, self.type)
            except CutawayError as error:
                raise type(error)(
                    error.what, field=self.name, expected=error.expected, got=error.got, hint=error.hint
                ) from error
            if losses is not None:
                losses.add(self.type, self.rows, self.cols, numbers.flatten(0, -2), raw.flatten(0, -2))
            return raw


def planned(
    rule: WeightRule,
    place: int,
    name: str,
    shape: tuple[int, ...],
    parts: tuple[Tensor, ...],
    spec: ModelSpec,
    to: Target,
) -> Planned:
    """What a matrix becomes.

    Args:
        rule: how it is made of the model's tensors.
        place, name, shape: which of the rule's it is, what it is called, [..., rows, cols].
        parts: the model's tensors.
        spec: the model.
        to: what was asked for.
    """
    formats = {part.blocks()[1] if isinstance(part, Stored) else -1 for part in parts}
    (number,) = formats if len(formats) == 1 else (-1,)
    have = block_type(number) if number >= 0 and by_rows(rule) else None
    if to.mix is not None:
        wanted = to.mix.type_of(rule.ours, spec)
    else:
        wanted = have if have is not None and to.keep else to.plain
    kind = type_for(wanted, shape[-1]) or to.plain
    return Planned(rule, place, name, prod(shape[:-1]), shape[-1], kind, wanted, kept=kind is have)


def encoded(numbers: Tensor, kind: BlockType) -> Tensor:
    """Rows of numbers as bytes. [..., rows, cols] → uint8 [..., rows, bytes]

    Raises:
        DtypeError, RequestError: a number that the type cannot hold.
    """
    if kind.dtype is None:
        return quantise(numbers, kind)
    turned = numbers.to(kind.dtype).contiguous()
    if kind.dtype is torch.float16 and bool((turned.isinf() & numbers.isfinite()).any()):
        raise RequestError("a number is too large for F16", hint="bfloat16 reaches as far as float32")
    return turned.view(torch.uint8)


def dense(tensor: Tensor) -> Tensor:
    """A tensor's numbers in fp32, on the CPU."""
    return tensor.dense() if isinstance(tensor, Stored) else tensor.detach().float().cpu()


F32 = BLOCK_TYPES["F32"]
