"""Block types against the gguf package, bit for bit: D10, G21, P07."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from cutaway.errors import DtypeError
from cutaway.formats import quants
from cutaway.formats.quants import BLOCK_TYPES, BlockType, block_type, dequantise

# Where the half-precision scales of each type lie in its block.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
# inf, -inf, quiet and signalling NaN, ±0, largest, smallest, smallest normal, 1
ODD = [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0x0000, 0x8000, 0x7BFF, 0x0001, 0x8001, 0x0400, 0x3C00]

PLAIN = {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "F64": np.float64}


def bits_differ(got: npt.NDArray[np.float32], want: npt.NDArray[np.float32]) -> int:
    """How many floats differ in any bit, NaN being NaN whatever its payload."""
    same = (got.view(np.uint32) == np.ascontiguousarray(want).view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    return int((~same).sum())


def blocks_of(kind: BlockType, rows: int, seed: int, per_row: int = 8) -> npt.NDArray[np.uint8]:
    """Random bytes, with every odd scale in some block."""
    raw = np.random.default_rng(seed).integers(0, 256, (rows * per_row, kind.nbytes), dtype=np.uint8)
    places = SCALES.get(kind.name, [])
    pairs = [(a, b) for a in ODD for b in ODD] if len(places) == 2 else [(a,) for a in ODD]
    for block, scales in zip(raw, pairs if places else [], strict=False):
        for place, scale in zip(places, scales, strict=True):
            block[place : place + 2] = np.array([scale], np.uint16).view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_d10_g21_bits_equal_the_reference(name: str) -> None:
    kind = BLOCK_TYPES[name]
    raw = blocks_of(kind, 256, seed=kind.id)
    got = dequantise(raw, kind, 8 * kind.block)
    assert got.dtype == np.float32
    assert got.shape == (256, 8 * kind.block)
    with np.errstate(all="ignore"):
        if name in PLAIN:
            want = raw.view(PLAIN[name]).astype(np.float32)
        else:
            want = gguf.dequantize(raw, gguf.GGMLQuantizationType(kind.id))
    assert bits_differ(got, want) == 0
    if name in SCALES:
        assert np.isnan(got).any()
        assert np.isinf(got).any()


@pytest.mark.parametrize("name", [name for name in BLOCK_TYPES if name not in PLAIN])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_any_number_of_rows_any_memory(name: str, count: int) -> None:
    kind = BLOCK_TYPES[name]
    raw = blocks_of(kind, 9, seed=1, per_row=1)
    want = dequantise(raw, kind, kind.block)[:count]
    locked = raw[:count].copy()
    locked.setflags(write=False)
    apart = np.repeat(raw, 2, axis=0)[::2][:count]
    for part in (raw[:count], locked, apart):
        assert bits_differ(dequantise(part, kind, kind.block), want) == 0


def test_chunks_meet_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in BLOCK_TYPES.values():
        raw = blocks_of(kind, 30, seed=2)
        whole = dequantise(raw, kind, 8 * kind.block)
        monkeypatch.setattr(quants, "_CHUNK", 7 * 256)
        assert bits_differ(dequantise(raw, kind, 8 * kind.block), whole) == 0
        monkeypatch.undo()


def test_p07_the_table_agrees_with_ggml() -> None:
    for name, kind in BLOCK_TYPES.items():
        ggml = gguf.GGMLQuantizationType[name]
        assert (kind.name, kind.id) == (name, int(ggml))
        assert (kind.block, kind.nbytes) == gguf.GGML_QUANT_SIZES[ggml]
        assert block_type(kind.id) is kind
    bits = {name: BLOCK_TYPES[name].bits for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16")}
    assert bits == {"Q4_0": 4.5, "Q4_1": 5, "Q8_0": 8.5, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625, "F16": 16}
    assert BLOCK_TYPES["Q4_K"].row_bytes(512) == 288


@pytest.mark.parametrize(("id", "name"), [(20, "IQ4_NL"), (4, "removed"), (33, "removed"), (39, "MXFP4"), (999, "999")])
def test_g10_other_types_are_named(id: int, name: str) -> None:
    with pytest.raises(DtypeError, match=name) as caught:
        block_type(id, path="m.gguf", tensor="blk.0.w")
    assert caught.value.field == "blk.0.w"
    assert str(id) in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(("shape", "n_cols"), [((2, 18), 33), ((2, 17), 32), ((2, 36), 32), ((18,), 32), ((0, 0), 32)])
def test_bytes_that_are_no_rows(shape: tuple[int, ...], n_cols: int) -> None:
    with pytest.raises(DtypeError, match="Q4_0"):
        dequantise(np.zeros(shape, np.uint8), BLOCK_TYPES["Q4_0"], n_cols)


def test_what_the_reference_quantises_comes_back_near() -> None:
    # The layouts above are checked on noise; this checks that they mean the numbers they should.
    weights = np.random.default_rng(3).standard_normal((16, 256)).astype(np.float32)
    for name, error in {"Q4_0": 0.45, "Q4_1": 0.3, "Q5_0": 0.25, "Q5_1": 0.15, "Q8_0": 0.02, "BF16": 0.02}.items():
        raw = gguf.quantize(weights, gguf.GGMLQuantizationType[name])
        assert np.abs(dequantise(raw, BLOCK_TYPES[name], 256) - weights).max() < error


def test_several_threads_give_the_same_bits() -> None:
    kind = BLOCK_TYPES["Q4_K"]
    raw = blocks_of(kind, 512, seed=4)
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            results.append(dequantise(raw, kind, 8 * 256))
    finally:
        torch.set_num_threads(threads)
    assert bits_differ(*results) == 0
