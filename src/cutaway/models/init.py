"""How a new model's weights start: one table, each line with its source.

Every parameter draws from a generator of its own, seeded by the model's seed and the parameter's name. So a weight
does not depend on the order in which modules are made, nor on what other parts there are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import Tensor

from cutaway.errors import ResourceError
from cutaway.models.transformer import Transformer
from cutaway.modules.block import Branch
from cutaway.modules.norm import Norm
from cutaway.spec import ModelSpec

__all__ = ["TABLE", "built", "initialise"]

STD = 0.02


@dataclass(frozen=True, slots=True)
class Start:
    """What a line of the table may look at.

    Attributes:
        model: whose parameter it is.
        name: the parameter's.
        shape: its shape.
        random: its own source of numbers.
    """

    model: Transformer
    name: str
    shape: torch.Size
    random: torch.Generator

    def normal(self, std: float) -> Tensor:
        """Numbers ~ N(0, std²)."""
        return torch.randn(self.shape, generator=self.random) * std

    def uniform(self, most: float) -> Tensor:
        """Numbers from −most to most."""
        return (torch.rand(self.shape, generator=self.random) * 2 - 1) * most


Draw: TypeAlias = Callable[[Start], Tensor]


def _ones(start: Start) -> Tensor:
    norm = start.model.get_submodule(start.name.rpartition(".")[0])
    assert isinstance(norm, Norm)
    return torch.full(start.shape, 1.0 - norm.spec.offset)


def _tokens(start: Start) -> Tensor:
    spec = start.model.spec
    embedding = spec.source if start.name.startswith("source_") and spec.source is not None else spec.embedding
    scale = abs(embedding.scale)
    return start.normal(STD if scale in (0.0, 1.0) else 1.0 / scale)


def _residual(start: Start) -> Tensor:
    if _normed_after(start):
        return _glorot(start)
    stack = start.model.spec.stacks[start.name.partition(".")[0]]
    additions = sum(len(layer.branches) for layer in stack.layers)
    return start.normal(STD / math.sqrt(additions))


def _inner(start: Start) -> Tensor:
    return _glorot(start) if _normed_after(start) else start.normal(STD)


def _normed_after(start: Start) -> bool:
    """Whether the stream is normed after the sum with what this matrix's branch adds."""
    branch = start.model.get_submodule(start.name.partition(".body.")[0])
    assert isinstance(branch, Branch)
    return branch.spec.post_norm is not None


def _glorot(start: Start) -> Tensor:
    return start.uniform(math.sqrt(6 / sum(start.shape[-2:])))


def _plain(start: Start) -> Tensor:
    return start.normal(STD)


# Pattern of a parameter's name → how it starts, and who says so. The first line that fits counts.
TABLE: tuple[tuple[str, Draw, str], ...] = (
    ("*norm.weight", _ones, "the norm multiplies by one: Ba et al. 2016, section 3"),
    ("*.bias", lambda start: torch.zeros(start.shape), "zero: GPT-2's code, Radford et al. 2019"),
    (
        "*embed.tokens",
        _tokens,
        "N(0, 0.02): GPT-2's code; where rows are scaled by s, N(0, 1/s), so that the stream starts at unit spread: "
        "the code of Vaswani et al. 2017 (s is the root of d_model there)",
    ),
    ("*embed.positions", lambda start: start.normal(0.01), "N(0, 0.01): GPT-2's code"),
    ("*embed.types", _plain, "N(0, 0.02): BERT's code, Devlin et al. 2019"),
    (
        "*.biases.*.weight",
        lambda start: start.normal(start.model.spec.d_model**-0.5),
        "N(0, 1/√d_model): T5's code, Raffel et al. 2020",
    ),
    (
        "*.body.near_*",
        _glorot,
        "uniform by fan-in and fan-out: Glorot & Bengio 2010, what Shaw et al. 2018's code leaves to its library",
    ),
    (
        "*.body.out.weight",
        _residual,
        "N(0, 0.02/√n), n the branches that add to the stream (2 · layers): Radford et al. 2019, section 2.3; where a "
        "norm follows each sum, uniform by fan-in and fan-out: the code of Vaswani et al. 2017. With smaller ones the "
        "stream would stay the token that was read, and a tied head would say it again",
    ),
    ("*.body.down", _residual, "the same, of each expert"),
    ("*.body.down.weight", _residual, "the same"),
    ("*.body.[qkv].weight", _inner, "N(0, 0.02): GPT-2's code; where a norm follows each sum, as out"),
    ("*.body.gate*", _inner, "the same"),
    ("*.body.up*", _inner, "the same"),
    (
        "*.body.router.weight",
        _plain,
        "N(0, 0.02): GPT-2's code; Mixtral's and Qwen's config state it too (initializer_range)",
    ),
    ("head.weight", _plain, "the same"),
    ("head.*dense.weight", _plain, "the same: BERT's code"),
    ("head.out.weight", _plain, "the same"),
)


@torch.no_grad()
def initialise(model: Transformer, seed: int = 0) -> Transformer:
    """Give every parameter its first value, in place.

    Args:
        model: its parameters may hold anything, on any device.
        seed: another seed, other numbers.
    """
    for name, parameter in model.named_parameters():
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        random = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        draw = next(draw for pattern, draw, _ in TABLE if fnmatchcase(name, pattern))
        parameter.copy_(draw(Start(model, name, parameter.shape, random)))
    return model


def built(spec: ModelSpec, seed: int = 0) -> Transformer:
    """A new model, in evaluation mode.

    Raises:
        ResourceError: there is no memory for it.
    """
    try:
        model = Transformer(spec)
    except RuntimeError as error:
        raise ResourceError("the model does not fit into memory", got=str(error).splitlines()[0]) from error
    return initialise(model, seed).eval()
