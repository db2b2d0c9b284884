"""Layers one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
Inputs: TypeAlias = Callable[[int], LayerInputs]
# Some layers, whether the norm too, and whether only each row's last token is asked for.
Whole: TypeAlias = Callable[[Stream, Cache, Inputs, range, bool, bool], Stream]


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
        # What is called in place of those that nobody looks into: see models.fused.
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
        ends: bool = False,
    ) -> Stream:
        """Run a pass that ``cache.begin`` has planned, from the ``first`` layer on.

        Taps ``layers.{i}.…`` and ``norm.out``; layers that it does not look into run as if it were not there.
        ``lengths``, of each token's text, is for rotary positions that ask. [batch, query] Where only the rows'
        ``ends`` are asked for, what comes for other tokens means nothing.
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

        last = len(self.layers)
        if self.whole is not None and tap is None and first < last and not self.training:
            return self.whole(x, cache, inputs, range(first, last), True, ends)
        if tap is not None:
            x, first = self._watched(x, cache, inputs, first, tap)
        x = self._unwatched(x, cache, inputs, range(first, last))
        inner = None if tap is None else tap.at("norm")
        x = self.norm(x, inner) if isinstance(self.norm, Norm) else x
        if self.spec.dropout:
            x = F.dropout(x, self.spec.dropout, self.training)
        return x if inner is None else inner("out", x)

    def _watched(self, x: Stream, cache: Cache, inputs: Inputs, first: int, tap: Tap) -> tuple[Stream, int]:
        """As far as anything is wanted, and the layer to go on from."""
        for index, block in enumerate(self.layers):
            if index < first or (inner := tap.at(f"layers.{index}")) is None:
                continue
            x = self._unwatched(x, cache, inputs, range(first, index))
            if not isinstance(block, Block) or block.looked_into(inner):
                x, first = block(x, inputs(index), inner), index + 1
                continue
            x, first = inner("resid_in", x), index
            if (leaving := inner.at(block.last)) is not None:
                x, first = self._unwatched(x, cache, inputs, range(index, index + 1)), index + 1
                x = leaving("resid", x)
        return x, first

    def _unwatched(self, x: Stream, cache: Cache, inputs: Inputs, layers: range) -> Stream:
        """Some layers that nobody looks into."""
        if self.whole is not None and layers and not self.training:
            return self.whole(x, cache, inputs, layers, False, False)
        runners: Sequence[Runner] = [*self.layers] if self.runners is None else self.runners
        for index in layers:
            x = runners[index](x, inputs(index), None)
        return x

    def read(self, memory: Stream, tap: Tap | None = None) -> list[tuple[Tensor, Tensor] | None]:
        """Each layer's keys and values of an encoder's output. Taps ``layers.{i}.cross.k`` and ``v``."""
        blocks = [block for block in self.layers if isinstance(block, Block)]
        return [block.read(memory, None if tap is None else tap.at(f"layers.{i}")) for i, block in enumerate(blocks)]
