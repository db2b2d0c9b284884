"""Keys and values in eight bits: a whole number for each, and a scale for each token and head.

A scale is the largest number's size over 127, so that nothing is cut off and no number moves by more than half a
scale. A pass reads its own tokens as later ones will, so that it does not matter how a text was split over calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cutaway.cache.mask import MaskPlan
from cutaway.cache.slots import Places

LARGEST = 127  # −128 is left out, so that a number and its negative are equally near


@dataclass(slots=True)
class Int8View:
    """A layer's tensors, and the places in them that this pass writes and reads; see ``SlotView``.

    Attributes:
        plan: the mask plan; as many keys are read as it names.
        k, v: codes. int8, d_head wide
        k_scale, v_scale: what one step of a code is. float32, one wide
        places: where they are.
    """

    plan: MaskPlan
    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    places: Places

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write once, and give back every key and value that a query of this pass may see, in the type of ``k``."""
        return self._exchange(self.k, self.k_scale, k), self._exchange(self.v, self.v_scale, v)

    def _exchange(self, codes: Tensor, scales: Tensor, values: Tensor) -> Tensor:
        n, (fresh, sizes) = self.plan.keys.shape[1], quantize(values)
        found = self.places.exchange(codes, fresh, n)
        return dequantize(found, self.places.exchange(scales, sizes, n), values.dtype)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (int8 […, d_head]) and scales (float32 […, 1]); what is not finite gives a scale that is not.

    >>> codes, scales = quantize(torch.tensor([[1.0, -0.5, 0.0]]))
    >>> codes.tolist(), round(1 / scales.item())
    ([[127, -64, 0]], 127)
    """
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / LARGEST
    steps = x / scales.clamp(min=torch.finfo(torch.float32).tiny)
    return steps.round().clamp(-LARGEST, LARGEST).to(torch.int8), scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What the codes stand for."""
    return (codes * scales).to(dtype)
