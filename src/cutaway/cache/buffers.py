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
from cutaway.cache.slots import Slots, SlotView
from cutaway.cache.state import take
from cutaway.errors import RequestError
from cutaway.spec import AttentionSpec

KvDtype: TypeAlias = Literal["int8"]


def check_kv_dtype(value: object) -> KvDtype | None:
    """A type to keep keys and values in; None for the model's own.

    Raises:
        RequestError: another.
    """
    if value is None or (isinstance(value, str) and value == "int8"):
        return None if value is None else "int8"
    raise RequestError("no type to keep keys and values in", field="kv_dtype", expected="None or int8", got=value)


def entries_of(
    dtype: torch.dtype, kv_dtype: KvDtype | None
) -> tuple[type[SlotView] | type[Int8View], list[tuple[str, torch.dtype, int | None]]]:
    """What reads a layer's tensors, and what those are: (name, type, width; None for that of a head)."""
    if kv_dtype is None:
        return SlotView, [("k", dtype, None), ("v", dtype, None)]
    scales = [("k_scale", torch.float32, 1), ("v_scale", torch.float32, 1)]
    return Int8View, [("k", torch.int8, None), ("v", torch.int8, None), *scales]


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
        self.device = device
        self._view, entries = entries_of(dtype, kv_dtype)
        self._layers = [
            {
                name: torch.zeros(
                    batch, layer.n_kv_heads, n_slots + 1, width or layer.d_head, dtype=kind, device=device
                )
                for name, kind, width in entries
            }
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

    def view(self, index: int, plan: MaskPlan, slots: Slots) -> LayerView:
        """Bundle of the index-th layer."""
        return self._view(plan, **self._layers[index], places=slots)

    def selected(self, rows: list[int]) -> Buffers:
        """These rows, in this order, in memory of their own."""
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        return self._with([{name: x.index_select(0, index) for name, x in layer.items()} for layer in self._layers])

    def clear(self, slots: Tensor) -> None:
        """Zeros in some slots: a weight of 0 makes nothing of a number, but not of NaN. True where. [batch, slot]"""
        rows, places = (x.to(self.device) for x in slots.nonzero(as_tuple=True))
        if len(rows):
            for layer in self._layers:
                for x in layer.values():
                    x[rows, :, places] = 0

    def joined(self, rows: int) -> Buffers:
        """The same with more rows, empty, after these."""

        def longer(buffer: Tensor) -> Tensor:
            return torch.cat([buffer, buffer.new_zeros(rows, *buffer.shape[1:])])

        return self._with([{name: longer(x) for name, x in layer.items()} for layer in self._layers])

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
