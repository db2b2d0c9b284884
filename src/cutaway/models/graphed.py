"""Steps of one token in each row as one CUDA graph: captured once, then replayed without Python between kernels.

A graph needs tensors that stay where they are. So keys and values have a place for every token from the beginning, a
token's place is its position, and who may read whom is a comparison of positions, on the device, in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cutaway.cache.mask import MaskKind, MaskPlan, allowed
from cutaway.errors import ContextExceeded, RequestError
from cutaway.models.batch import pad
from cutaway.models.transformer import Transformer
from cutaway.modules.attention import LayerInputs
from cutaway.modules.rotary import asks_length, rotary_table
from cutaway.shapes import Angles
from cutaway.spec import BlockSpec, HeadSpec, MlpSpec, RotarySpec


@dataclass(slots=True)
class FixedView:
    """One layer's keys and values: a place for each position, and one more for pads. [batch, kv_head, place, d_head]"""

    plan: MaskPlan
    k: Tensor
    v: Tensor
    rows: Tensor  # [batch, 1]
    places: Tensor  # [batch, query]

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write this pass's, and give back all places; the plan says which hold something that may be read."""
        self.k[self.rows, :, self.places] = k.transpose(1, 2)
        self.v[self.rows, :, self.places] = v.transpose(1, 2)
        return self.k, self.v


class GraphedDecoder:
    """Reads prompts as usual, then writes a token in each row by replaying a graph.

    Away from CUDA the same operations run one by one.

    Args:
        model: a decoder of attention and feed-forward networks whose positions are in the embedding or rotary.
        batch: rows.
        capacity: tokens of a row, prompt and answer.

    Raises:
        RequestError: the model has something that a graph cannot hold, by its name.
    """

    def __init__(self, model: Transformer, batch: int, capacity: int) -> None:
        for layer in model.spec.decoder.layers:
            if why := _hinders(layer):
                raise RequestError("this model's steps cannot be one graph", field="model", got=why)
        if not isinstance(model.spec.head, HeadSpec) or model.spec.source is not None:
            raise RequestError("this model's steps cannot be one graph", field="model", got="no plain decoder")
        self._model, self._batch, self._capacity = model, batch, capacity
        at, layers = model.device, model.spec.decoder.layers
        self._buffers = [
            torch.zeros(2, batch, a.n_kv_heads, capacity + 1, a.d_head, dtype=model.dtype, device=at)
            for a in (layer.attention for layer in layers)
        ]
        self._keys = torch.arange(capacity + 1, device=at).expand(batch, -1).clone()
        self._keys[:, capacity] = -1  # where pads go
        self._rows = torch.arange(batch, device=at)[:, None]
        every = torch.arange(capacity, device=at)[None]
        rotaries = {layer.attention.rotary for layer in layers if layer.attention.rotary is not None}
        self._turns = {spec: [t[0] for t in rotary_table(spec, every, model.dtype)] for spec in rotaries}
        # What a replay reads and writes.
        self._x = torch.zeros(batch, 1, model.spec.d_model, dtype=model.dtype, device=at)
        self._positions = torch.zeros(batch, 1, dtype=torch.long, device=at)
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._lengths = [0] * batch

    @torch.no_grad()
    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read a prompt in each row, from its beginning; logits after its last token. [batch, vocab]

        Raises:
            ContextExceeded: one is longer than there is room for.
        """
        self._check(max(map(len, prompts)))
        ids, positions = (t.to(self._model.device) for t in pad(prompts))
        hidden = self._hidden(self._model.embed(ids, positions), positions)
        self._lengths = [len(prompt) for prompt in prompts]
        ends = torch.tensor(self._lengths, device=hidden.device) - 1
        return self._model.unembed(hidden[self._rows[:, 0], ends][:, None])[:, 0]

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """One more token in each row; logits after it, which the next step overwrites. [batch] → [batch, vocab]

        Raises:
            ContextExceeded: there is no more room.
        """
        self._check(max(self._lengths) + 1)
        self._positions.copy_(torch.tensor(self._lengths)[:, None])
        self._x.copy_(self._model.embed(tokens[:, None], self._positions))
        self._lengths = [n + 1 for n in self._lengths]
        if self._graph is None and self._model.device.type == "cuda":
            self._capture()
        if self._graph is None:
            self._logits = self._compute()
        else:
            self._graph.replay()
        assert self._logits is not None
        return self._logits

    def _compute(self) -> Tensor:
        return self._model.unembed(self._hidden(self._x, self._positions))[:, 0]

    def _capture(self) -> None:
        """Run it some times on a stream of its own, as capturing asks for, then capture it. Writing twice is harmless:
        a step writes only its own tokens' places."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._compute()
        self._graph = graph

    def _hidden(self, x: Tensor, positions: Tensor) -> Tensor:
        """The layers, and the norm after them. [batch, query, d_model] → the same"""
        stack, plans = self._model.decoder, dict[object, MaskPlan]()
        places = torch.where(positions < 0, self._capacity, positions)
        turns: dict[RotarySpec, tuple[Angles, Angles]] = {}
        for kind, (cos, sin) in self._turns.items():
            at = positions.clamp(min=0)
            turns[kind] = (cos[at], sin[at])
        for layer, spec, (k, v) in zip(stack.layers, stack.spec.layers, self._buffers, strict=True):
            rule, rotary = spec.attention.mask, spec.attention.rotary
            if rule not in plans:
                mask = allowed(rule, positions, self._keys)
                plans[rule] = MaskPlan(MaskKind.RULE, rule, positions, self._keys, mask=mask)
            view = FixedView(plans[rule], k, v, self._rows, places)
            x = layer(x, LayerInputs(view, None if rotary is None else turns[rotary]))
        return stack.norm(x)

    def _check(self, length: int) -> None:
        if length > self._capacity:
            raise ContextExceeded("no room for so many tokens", expected=f"at most {self._capacity}", got=length)


def _hinders(layer: BlockSpec) -> str:
    """What of a layer a graph cannot hold: sizes that depend on the numbers, or tensors made on the way."""
    a = layer.attention
    if layer.cross is not None:
        return "attention to a source"
    if a.bias is not None or a.relative is not None:
        return "scores that depend on the distance"
    if a.soft_cap is not None:
        return "a cap on scores"
    if asks_length(a.rotary):
        return "rotary positions that change with the length"
    if not a.mask.causal or a.mask.prefix:
        return "attention in both directions"
    if any(not isinstance(branch.body, MlpSpec) for branch in layer.branches if branch.body is not a):
        return "experts"
    return ""
