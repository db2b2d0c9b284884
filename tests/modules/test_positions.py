"""Positions that are not rotary: ALiBi's slopes, T5's buckets, Shaw's vectors, the paper's waves."""

from __future__ import annotations

import math

import pytest
import torch
from tests.reference import tiny
from torch import Tensor

from cutaway.modules.bias import ScoreBias, alibi_slopes, buckets, score_bias
from cutaway.modules.embedding import Embedding, sinusoids
from cutaway.spec import AlibiBias, BucketBias, EmbeddingSpec, SinusoidalPositions

# ---- ALiBi ------------------------------------------------------------------------------------------------


def powers(n: int, max_bias: float = 8.0) -> list[float]:
    """The published sequence for a power of two (Press et al. 2022, section 3)."""
    return [2 ** (-max_bias * (i + 1) / n) for i in range(n)]


@pytest.mark.parametrize("order", ["append", "interleave"])
@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32, 64])
def test_slopes_of_a_power_of_two(n: int, order: str) -> None:
    """Both orders are the paper's sequence: 1/2, 1/4 … 1/256 for eight heads."""
    assert alibi_slopes(n, AlibiBias(order)).tolist() == pytest.approx(powers(n), rel=1e-6)  # type: ignore[arg-type]


def test_slopes_of_eight_heads() -> None:
    assert alibi_slopes(8, AlibiBias()).tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


@pytest.mark.parametrize("n", [3, 5, 6, 7, 12, 20, 71, 112])
def test_slopes_of_other_counts(n: int) -> None:
    """BLOOM's reference: the power below, then every second slope of the power above. MPT's: those first."""
    below = 2 ** math.floor(math.log2(n))
    appended = powers(below) + powers(2 * below)[0::2][: n - below]
    interleaved = (powers(2 * below)[1::2] + powers(2 * below)[0::2])[:n]
    assert alibi_slopes(n, AlibiBias("append")).tolist() == pytest.approx(appended, rel=1e-6)
    assert alibi_slopes(n, AlibiBias("interleave")).tolist() == pytest.approx(interleaved, rel=1e-6)


def test_the_two_orders_in_numbers() -> None:
    """The heads beyond the power below have the same slopes either way: they differ in rounding at most."""
    twelve = [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    for order in ("append", "interleave"):
        assert alibi_slopes(12, AlibiBias(order)).tolist() == pytest.approx(twelve, rel=1e-6)  # type: ignore[arg-type]
    # With another steepest slope MPT's still follow the same rule, of that one.
    wanted = [2**-2.0, 2**-4.0, 2**-1.0]
    assert alibi_slopes(3, AlibiBias("interleave", max_bias=4.0)).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_alibi_is_the_slope_times_the_distance(scaled: bool, half: bool) -> None:
    """Up to what each query adds to all keys alike, which no softmax sees."""
    spec = AlibiBias(scaled=scaled, half=half)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8]])
    bias = score_bias(spec, alibi_slopes(4, spec), 0.3, positions, positions)
    bias = bias - bias[..., :1] if half else bias - bias.diagonal(dim1=-2, dim2=-1)[..., None]
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, (2, 4, 6, 6))).tolist():
        distance = j if half else -abs(j - i)  # lower the further away, on either side
        wanted = 2.0 ** (-2 * (h + 1)) * distance * (0.3 if scaled else 1.0)
        assert float(bias[b, h, i, j].expand(()) if bias.shape[2] > 1 else bias[b, h, 0, j]) == pytest.approx(wanted)


# ---- T5 ---------------------------------------------------------------------------------------------------

OFFSETS = [-200, -20, -16, -8, -1, 0, 1, 8, 20, 128]


def test_worked_buckets() -> None:
    """Case L17: 32 buckets up to 128, of key minus query."""
    offsets = torch.tensor(OFFSETS)
    both = buckets(offsets, BucketBias(32, 128, both_ways=True))
    assert both.tolist() == [15, 10, 10, 8, 1, 0, 17, 24, 26, 31]
    assert buckets(offsets, BucketBias(32, 128)).tolist() == [31, 17, 16, 8, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("spec", [BucketBias(32, 128), BucketBias(32, 128, True), BucketBias(8, 20, True)])
def test_buckets_by_the_formula(spec: BucketBias) -> None:
    """Raffel et al. 2020, one distance at a time in double precision; never past the table, never falling."""
    n = spec.n_buckets // 2 if spec.both_ways else spec.n_buckets
    exact = n // 2
    seen = []
    for distance in range(-300, 301):
        far = abs(distance) if spec.both_ways else max(-distance, 0)
        wanted = far
        if far >= exact:
            wanted = exact + int(math.log(far / exact) / math.log(spec.max_distance / exact) * (n - exact) + 1e-9)
        wanted = min(wanted, n - 1) + (n if spec.both_ways and distance > 0 else 0)
        got = int(buckets(torch.tensor(distance), spec))
        assert got == wanted, distance
        seen.append(got)
    assert set(seen) == set(range(spec.n_buckets)) - ({n} if spec.both_ways else set())  # 0 has no other side
    assert seen[:300] == sorted(seen[:300], reverse=True)


def test_a_bucket_bias_is_read_by_head() -> None:
    bias = ScoreBias(BucketBias(8, 16), 3)
    assert bias.weight is not None
    torch.nn.init.normal_(bias.weight)
    positions = torch.tensor([[4, 5, 6, 20]])
    out = score_bias(bias.spec, bias.table(torch.device("cpu")), 1.0, positions, positions)
    assert out.shape == (1, 3, 4, 4)
    for i, j in torch.cartesian_prod(torch.arange(4), torch.arange(4)).tolist():
        bucket = int(buckets(positions[0, j] - positions[0, i], BucketBias(8, 16)))
        assert torch.equal(out[0, :, i, j], bias.weight[bucket])


# ---- the paper's waves -----------------------------------------------------------------------------------


def test_worked_sinusoids() -> None:
    case = tiny.WORKED["sinusoidal_d8"]
    table = sinusoids(SinusoidalPositions(), torch.arange(3)[None], 8)[0]
    for row, key in zip(table, ("pos0", "pos1", "pos2"), strict=True):
        assert row.tolist() == pytest.approx(case[key], abs=5.1e-4)
    halves = sinusoids(SinusoidalPositions("halves"), torch.arange(3)[None], 8)[0]
    assert torch.equal(halves, torch.cat([table[:, 0::2], table[:, 1::2]], -1))


def test_sinusoids_by_the_formula() -> None:
    """PE(p, 2i) = sin(p / 10000^(2i/d)), PE(p, 2i+1) = cos of the same (Vaswani et al. 2017, section 3.5)."""
    table = sinusoids(SinusoidalPositions(), torch.arange(50)[None], 6)[0]
    for p in range(50):
        for i in range(3):
            angle = p / 10000 ** (2 * i / 6)
            assert table[p, 2 * i : 2 * i + 2].tolist() == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-5)


def test_sinusoids_are_added() -> None:
    embed = Embedding(EmbeddingSpec(scale=3.0, positions=SinusoidalPositions()), 7, 8)
    torch.nn.init.normal_(embed.tokens)
    ids, positions = torch.tensor([[1, 5, 5]]), torch.tensor([[-1, 0, 9]])
    out = embed(ids, positions)
    waves: Tensor = sinusoids(SinusoidalPositions(), torch.tensor([[0, 0, 9]]), 8)
    torch.testing.assert_close(out, embed.tokens[ids] * 3 + waves)
