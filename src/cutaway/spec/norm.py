"""Normalisation of one vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class NormSpec:
    """``y = (x - mean?) / sqrt(var + eps) * (offset + weight) + bias?``

    Attributes:
        kind: ``"layer"`` subtracts the mean (Ba et al. 2016), ``"rms"`` does not (Zhang & Sennrich 2019).
        eps: added to the mean square before the root.
        bias: whether a learned shift follows.
        offset: added to the stored weight: 1.0 for Gemma, which stores the weight minus one.
        cast: in half precision, whether the normalised vector is cast down ``"before"`` the product with
            the weight (Llama, T5) or ``"after"`` it (Gemma, OLMo 2). No difference in fp32, and none for
            LayerNorm, which everybody casts at the end.
    """

    kind: Literal["layer", "rms"]
    eps: float
    bias: bool = False
    offset: float = 0.0
    cast: Literal["before", "after"] = "before"
