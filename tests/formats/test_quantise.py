"""Floats to blocks: the bytes of the format's own package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from cutaway.formats.quantise import quantise
from cutaway.formats.quants import BLOCK_TYPES


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_bytes_of_the_formats_own_package(name: str) -> None:
    """Over 131,072 random blocks, what they are after Q4_1 (whose numbers often lie half-way between two codes: there
    it shows how product and sum are rounded), and blocks of zeros, of one number, of numbers that underflow."""
    x = torch.randn(1 << 16, 64, generator=torch.Generator().manual_seed(5))
    odd = torch.stack([
        torch.zeros(64), torch.full((64,), -3.0), torch.arange(64) / 2, torch.arange(64) / -2,
        torch.arange(64) - 31.5,
        torch.full((64,), 1e-30), torch.eye(64)[3], -torch.eye(64)[40] * 1e-7, torch.linspace(-6e4, 6e4, 64),
    ])  # fmt: skip
    kind = gguf.GGMLQuantizationType.Q4_1
    twice = torch.from_numpy(gguf.dequantize(gguf.quantize(x.numpy(), kind), kind))
    x = torch.cat([x, twice, odd])
    wanted = gguf.quantize(x.numpy(), gguf.GGMLQuantizationType[name])
    assert np.array_equal(quantise(x, BLOCK_TYPES[name]).numpy(), wanted)
