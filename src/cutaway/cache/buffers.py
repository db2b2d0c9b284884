"""The memory of a store: keys and values of its layers, in slots."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from cutaway.cache.base import LayerView
from cutaway.cache.int8 import Int8View
from cutaway.cache.mask import MaskPlan
from cutaway.cache.slots import SlotView
from cutaway.cache.state import take
from cutaway.spec import AttentionSpec

KvDtype: TypeAlias = Literal["int8"]


class Buffers:
    """Named tensors for each layer, all [batch, kv_head, slot, …]; the slot after the last takes what has no place.

    Args:
        layers: the attention of each layer.
        batch: rows.
        n_slots: slots of each row.
        dtype, device: of keys and values.
        kv_dtype: a smaller type to keep them in; None keeps them as they are.
    """

    def __init__(
        self,
        layers: list[AttentionSpec],
        batch: int,
        n_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: KvDtype | None = None,
    ) -> None:
        def empty(layer: AttentionSpec, width: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(batch, layer.n_kv_heads, n_slots + 1, width, dtype=kind, device=device)

        self.device = device
        self._view: type[SlotView] | type[Int8View] = SlotView
        kinds = {"k": dtype, "v": dtype}
        if kv_dtype == "int8":
            self._view = Int8View
            kinds = {"k": torch.int8, "v": torch.int8, "k_scale": torch.float32, "v_scale": torch.float32}
        self._layers = [
            {name: empty(layer, 1 if "scale" in name else layer.d_head, kind) for name, kind in kinds.items()}
            for layer in layers
        ]

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return sum(tensor.nbytes for layer in self._layers for tensor in layer.values())

    @property
    def plain(self) -> bool:
        """Whether keys and values lie here as the numbers that they are."""
        return self._view is SlotView

    def view(self, index: int, plan: MaskPlan, slots: Tensor, join: bool = False) -> LayerView:
        """Bundle of the index-th layer."""
        return self._view(plan, **self._layers[index], slots=slots, join=join)

    def selected(self, rows: list[int]) -> Buffers:
        """These rows, in this order, in memory of their own."""
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        return self._with([{name: x.index_select(0, index) for name, x in layer.items()} for layer in self._layers])

    def grown(self, n_slots: int) -> Buffers:
        """The same in more slots."""

        def wider(buffer: Tensor) -> Tensor:
            wide = buffer.new_zeros(*buffer.shape[:2], n_slots + 1, buffer.shape[3])
            wide[:, :, : buffer.shape[2] - 1] = buffer[:, :, :-1]
            return wide

        return self._with([{name: wider(x) for name, x in layer.items()} for layer in self._layers])

    def packed(self, held: Tensor) -> dict[str, Tensor]:
        """What lies in some slots, row after row, by ``layer.name``. [batch, slot] → each [token, kv_head, …]"""
        held = held.to(self.device)
        n = held.shape[1]
        return {
            f"{i}.{name}": buffer[:, :, :n].transpose(1, 2)[held]
            for i, layer in enumerate(self._layers)
            for name, buffer in layer.items()
        }

    def unpack(self, held: Tensor, state: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`packed` gave.

        Raises:
            ShapeMismatch: a tensor is missing, or of another shape or type.
        """
        held = held.to(self.device)
        n, tokens = held.shape[1], int(held.sum())
        for i, layer in enumerate(self._layers):
            for name, buffer in layer.items():
                found = take(state, f"{i}.{name}", buffer.dtype, (tokens, buffer.shape[1], buffer.shape[3]))
                buffer[:, :, :n].transpose(1, 2)[held] = found.to(self.device)

    def _with(self, layers: list[dict[str, Tensor]]) -> Buffers:
        other = copy(self)
        other._layers = layers
        return other
