"""A fake model that says what it was told to, and a fake tokenizer whose tokens are given bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cutaway.generation.generate import Generation, Run
from cutaway.generation.params import resolve
from cutaway.spec import GenerationSettings
from cutaway.tokenizers.stream import ByteStream, DecodeStream

VOCAB = 300


@dataclass
class Spec:
    vocab_size: int = VOCAB
    d_model: int = 1
    max_positions: int = 10_000
    position_limit: int | None = None
    source_vocab_size: int | None = None
    source: None = None
    generates: bool = True
    family: str = "scripted"


@dataclass
class _Cache:
    lengths: list[int]

    def note(self, rows: list[list[int]]) -> None:
        """What the tokens are makes no difference here."""

    def select(self, rows: list[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]

    def rewind(self, lengths: list[int]) -> list[int]:
        self.lengths = [min(pair) for pair in zip(lengths, self.lengths, strict=True)]
        return self.lengths


@dataclass
class Scripted:
    """After token n of a text comes ``script[n]``: the first entries stand where the prompt is."""

    script: Sequence[int]
    spec: Spec = field(default_factory=Spec)
    dtype = torch.float32
    device = torch.device("cpu")
    warned_length: bool = False

    steps = None  # every pass is a whole one

    def new_cache(self, batch: int, capacity: int, **_: Any) -> _Cache:
        return _Cache([0] * batch)

    def hidden(self, ids: Tensor, positions: Tensor, cache: _Cache, tap: Any = None, **_: Any) -> Tensor:
        cache.lengths = [n + int((row >= 0).sum()) for n, row in zip(cache.lengths, positions, strict=True)]
        return positions[..., None].float()

    def unembed(self, x: Tensor, tap: Any = None) -> Tensor:
        said = torch.tensor(self.script)[x[..., 0].long().clamp(0, len(self.script) - 1)]
        return torch.zeros(*said.shape, self.spec.vocab_size).scatter_(-1, said[..., None], 9.0)


@dataclass
class Chain:
    """A Markov chain: what comes next depends on the last token alone, by a table of logits. [vocab, vocab]"""

    table: Tensor
    passes: int = 0
    warned_length: bool = False
    steps = None  # every pass is a whole one
    device = torch.device("cpu")

    @property
    def spec(self) -> Spec:
        return Spec(len(self.table), d_model=len(self.table))

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    def new_cache(self, batch: int, capacity: int, **_: Any) -> _Cache:
        return _Cache([0] * batch)

    def hidden(self, ids: Tensor, positions: Tensor, cache: _Cache, tap: Any = None, **_: Any) -> Tensor:
        self.passes += 1
        fresh = (positions >= 0).sum(1).tolist()
        cache.lengths = [n + more for n, more in zip(cache.lengths, fresh, strict=True)]
        return self.table[ids]

    def unembed(self, x: Tensor, tap: Any = None) -> Tensor:
        return x


@dataclass
class Bytes:
    """Tokens 0 to 255 are bytes; ``more`` names others, None where a token has no text."""

    more: Mapping[int, bytes | None] = field(default_factory=dict)

    def stream(self, *, continuation: bool) -> DecodeStream:
        assert continuation
        return DecodeStream(ByteStream(lambda token: self.more.get(token, bytes([token % 256])), start="", end=False))


def say(
    tokens: Sequence[int],
    *,
    more: Mapping[int, bytes | None] | None = None,
    eos_ids: Sequence[int] = (),
    text: bool = True,
    **arguments: Any,
) -> tuple[list[str], Generation]:
    """The pieces and the outcome of a model that says ``tokens`` to a prompt of three."""
    sampling = resolve(GenerationSettings(eos_ids=tuple(eos_ids)), VOCAB, temperature=0, **arguments)
    model: Any = Scripted([0, 0, *tokens])
    tokenizer: Any = Bytes(more or {}) if text else None
    run = Run(model, tokenizer, [[7, 8, 9]], sampling)
    pieces = [piece for _, piece in run]
    return pieces, run.results()[0]
