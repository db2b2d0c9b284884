"""Layers one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.cache import Cache
from cutaway.modules.attention import How, LayerInputs
from cutaway.modules.bias import ScoreBias
from cutaway.modules.block import Block
from cutaway.modules.norm import Norm, norm_or_identity
from cutaway.modules.part import Part
from cutaway.modules.rotary import rotary_table
from cutaway.modules.tap import Tap
from cutaway.shapes import Positions, Stream
from cutaway.spec import StackSpec

Runner: TypeAlias = Callable[[Stream, LayerInputs, Tap | None], Stream]
Whole: TypeAlias = Callable[[Stream, Cache, Callable[[int], LayerInputs]], Stream]


class Stack(Part):
    """Blocks, and the norm after the last.

    Args:
        spec: each layer's block.
        d_model: width of the residual stream.
    """

    def __init__(self, spec: StackSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.layers = nn.ModuleList(Block(layer, d_model) for layer in spec.layers)
        self.norm = norm_or_identity(spec.norm, d_model)
        # Layers whose biases are specified alike share one.
        kinds = dict.fromkeys((layer.attention.bias, layer.attention.n_heads) for layer in spec.layers)
        self.biases = nn.ModuleList(ScoreBias(bias, n_heads) for bias, n_heads in kinds if bias is not None)
        self._rotaries = {layer.attention.rotary for layer in spec.layers if layer.attention.rotary is not None}
        # What is called in place of each layer, if anything is: see models.compiled.
        self.runners: list[Runner] | None = None
        # What is called in place of all of them, if nobody looks: see models.fused.
        self.whole: Whole | None = None

    def forward(
        self,
        x: Stream,
        positions: Positions,
        cache: Cache,
        tap: Tap | None = None,
        how: How = "fused",
        lengths: Tensor | None = None,
        first: int = 0,
    ) -> Stream:
        """Run a pass that ``cache.begin`` has planned, from the ``first`` layer on.

        Taps ``layers.{i}.…`` and ``norm.out``. ``lengths``, of each token's text, is for rotary positions that ask.
        [batch, query]
        """
        tables = {spec: rotary_table(spec, positions, x.dtype, lengths) for spec in self._rotaries}
        biases = {
            (bias.spec, bias.n_heads): bias.table(x.device) for bias in self.biases if isinstance(bias, ScoreBias)
        }

        def inputs(index: int) -> LayerInputs:
            attention = self.spec.layers[index].attention
            turn = None if attention.rotary is None else tables[attention.rotary]
            bias = None if attention.bias is None else biases[attention.bias, attention.n_heads]
            return LayerInputs(cache.layer(index), turn, bias, how, cache.cross(index))

        if self.whole is not None and tap is None and not first and not self.training:
            return self.whole(x, cache, inputs)
        runners: Iterable[Runner] = self.layers if self.runners is None else self.runners
        for index, run in islice(enumerate(runners), first, None):
            x = run(x, inputs(index), None if tap is None else tap.at(f"layers.{index}"))
        inner = None if tap is None else tap.at("norm")
        x = self.norm(x, inner) if isinstance(self.norm, Norm) else x
        if self.spec.dropout:
            x = F.dropout(x, self.spec.dropout, self.training)
        return x if inner is None else inner("out", x)

    def read(self, memory: Stream, tap: Tap | None = None) -> list[tuple[Tensor, Tensor] | None]:
        """Each layer's keys and values of an encoder's output. Taps ``layers.{i}.cross.k`` and ``v``."""
        blocks = [block for block in self.layers if isinstance(block, Block)]
        return [block.read(memory, None if tap is None else tap.at(f"layers.{i}")) for i, block in enumerate(blocks)]
