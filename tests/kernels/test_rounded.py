"""Products of whole numbers: what they round, and that they round it alike in any company."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import cutaway
from cutaway.formats.quantise import quantise
from cutaway.formats.quants import BLOCK_TYPES
from cutaway.kernels import NativeLibrary, Stored, library, stored_matrix, together
from cutaway.kernels.compiling import FOLDER, VARIANTS
from tests.reference import tiny


def q8_0(rows: int, cols: int, seed: int = 0) -> Stored:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 0.1
    return stored_matrix(quantise(weight, BLOCK_TYPES["Q8_0"]), 8, cols)


def rounded(x: Tensor) -> Tensor:
    """To 127 steps of the largest in each 32, in double precision."""
    groups = x.unflatten(-1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    steps = torch.round(groups * torch.where(scale > 0, 1 / scale, 0.0))
    return (steps.double() * scale.double()).flatten(-2)


@pytest.mark.parametrize("cols", [32, 96, 576, 2080])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 13, 200])
def test_products(n: int, cols: int) -> None:
    native = library()
    assert native is not None
    weight = q8_0(48, cols)
    laid = together(weight)
    assert laid.format != weight.format
    x = torch.randn(n, cols, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, n)[:, None]
    x[0, :32] = 0.0  # a group with nothing in it
    expected = rounded(x) @ weight.dense().double().T
    found = native.product(x, laid.matrix)
    size = rounded(x).abs() @ weight.dense().double().abs().T
    assert ((found - expected).abs() <= 1e-6 * size).all()
    alone = torch.cat([native.product(row[None], laid.matrix) for row in x])
    assert torch.equal(found, alone)


def test_the_same_bytes() -> None:
    """What a file has comes back bit for bit, and stands for the same numbers; the least number, −128, too."""
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (32, 5 * 34), dtype=np.uint8))
    raw.view(32, 5, 34)[..., 1] &= 0x3B  # no scale that is no number
    weight = stored_matrix(raw, 8, 160)
    laid = together(weight)
    assert torch.equal(laid.blocks()[0], raw)
    assert laid.blocks()[1] == 8
    assert torch.equal(laid.dense(), weight.dense())
    rows = torch.tensor([[0, 31], [16, 15]])
    assert torch.equal(torch.nn.functional.embedding(rows, laid), weight.dense()[rows])
    x = torch.randn(3, 160)
    native = library()
    assert native is not None
    expected = rounded(x) @ weight.dense().double().T
    assert torch.allclose(native.product(x, laid.matrix).double(), expected, rtol=1e-4, atol=1e-4)


def test_on_other_processors() -> None:
    """Eight lanes give the bits that sixteen do."""
    weight = together(q8_0(64, 320))
    x = torch.randn(11, 320)
    found = []
    for name, _ in VARIANTS.values():
        try:
            found.append(NativeLibrary(Path(FOLDER) / name).product(x, weight.matrix))
        except OSError:  # not for this processor
            pytest.skip(f"{name} is not for this processor")
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_none(wrong: float) -> None:
    native = library()
    assert native is not None
    x = torch.randn(2, 96)
    x[1, 40] = wrong
    y = native.product(x, together(q8_0(16, 96)).matrix)
    assert y[0].isfinite().all()
    assert not y[1].isfinite().any()


def test_rows_that_are_no_whole_tiles_stay() -> None:
    weight = q8_0(24, 64)
    assert together(weight) is weight


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_a_model(name: str, tmp_path: Path) -> None:
    """Near the model of the same blocks, the same in any company, and saved as those blocks."""
    folder = tiny.write(tiny.config(name), tmp_path / "m")
    blocks, model = (cutaway.load(folder, quantize=kind) for kind in ("q8_0", "int8"))
    ids = [[3, 4, 5, 6, 7, 8, 9], [9, 8, 7]]
    found, exact, alone = model.hidden(ids), blocks.hidden(ids), [model.hidden([row]) for row in ids]
    kinds = {p.format for p in model.transformer.parameters() if isinstance(p, Stored)}
    assert 1000 in kinds
    for one, plain, by_itself in zip(found, exact, alone, strict=True):
        assert not torch.equal(one, plain)
        assert (one - plain).abs().max() < 0.05 * plain.abs().max()
        assert torch.equal(one, by_itself[0])  # type: ignore[index]
    cutaway.save(blocks, tmp_path / "q8_0", format="cutaway")
    with pytest.warns(UserWarning, match="not that products round"):
        cutaway.save(model, tmp_path / "int8", format="cutaway")
    again = cutaway.load(tmp_path / "int8").transformer.state_dict()
    for key, value in cutaway.load(tmp_path / "q8_0").transformer.state_dict().items():
        assert torch.equal(again[key], value)
