"""Rotary positions: speeds of every scaling, and turning that depends on distance alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference import tiny

from cutaway.modules.rotary import rotary_table, rotate, speeds
from cutaway.spec import FactorScaling, LinearScaling, Llama3Scaling, RotarySpec, YarnScaling
from cutaway.spec.position import RotaryScaling

SCALINGS: list[RotaryScaling | None] = [
    None,
    LinearScaling(4.0),
    Llama3Scaling(8.0, 1.0, 4.0, 16),
    YarnScaling(4.0, 16, beta_fast=4.0, beta_slow=0.3),
    FactorScaling((1.0, 1.5, 2.0, 8.0)),
]


def test_worked_speeds() -> None:
    case = tiny.WORKED["rotary"]
    speed, magnitude = speeds(RotarySpec(case["base"], case["d_head"]))
    assert magnitude == 1.0
    assert 2 * math.pi / float(speed[0]) == pytest.approx(case["fastest_positions_per_turn"], rel=1e-6)
    assert 2 * math.pi / float(speed[-1]) == pytest.approx(case["slowest_positions_per_turn"], rel=1e-5)
    ratios = (speed[1:] / speed[:-1]).tolist()
    assert ratios == pytest.approx([case["speed_ratio"]] * 63, rel=1e-5)
    # The fastest pair after 44 positions: 44 radians are seven turns and a bit.
    assert 44 * float(speed[0]) / (2 * math.pi) == pytest.approx(case["speed_1_position_44_turns"], rel=1e-6)


def test_position_interpolation() -> None:
    """Every position is read as if it stood ``trained / target`` as far."""
    case = tiny.WORKED["position_interpolation"]
    factor = case["target"] / case["trained"]
    plain, scaled = (speeds(RotarySpec(1e4, 128, s))[0] for s in (None, LinearScaling(factor)))
    assert (scaled / plain).tolist() == pytest.approx([case["theta_scale"]] * 64)


def test_yarn_keeps_the_fast_and_slows_the_slow() -> None:
    case = tiny.WORKED["yarn"]
    assert case["target"] / case["trained"] == case["factor"]
    plain, _ = speeds(RotarySpec(1e6, 128))
    scaled, magnitude = speeds(RotarySpec(1e6, 128, YarnScaling(case["factor"], case["trained"])))
    ratio = scaled / plain
    assert float(ratio[0]) == 1.0
    assert float(ratio[-1]) == pytest.approx(1 / case["factor"])
    assert bool((ratio[1:] <= ratio[:-1] + 1e-6).all())
    assert magnitude == pytest.approx(0.1 * math.log(4) + 1)


def test_llama3_by_its_turns() -> None:
    """Kept where a pair turns at least four times in the original length, slowed where less than once."""
    spec = RotarySpec(5e5, 128)
    plain, _ = speeds(spec)
    scaled, _ = speeds(RotarySpec(5e5, 128, Llama3Scaling(8.0, 1.0, 4.0, 8192)))
    turns = 8192 * plain / (2 * math.pi)
    assert torch.equal(scaled[turns >= 4], plain[turns >= 4])
    torch.testing.assert_close(scaled[turns <= 1], plain[turns <= 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert bool(between.any())
    assert bool(((scaled < plain) & (scaled > plain / 8))[between].all())


@given(
    scaling=st.sampled_from(SCALINGS),
    first=st.integers(0, 500),
    second=st.integers(0, 500),
    shift=st.integers(0, 3000),
    rest=st.sampled_from([0, 4]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_scores_depend_on_distance_alone(
    scaling: RotaryScaling | None, first: int, second: int, shift: int, rest: int
) -> None:
    spec = RotarySpec(1e4, 8, scaling)
    generator = torch.Generator().manual_seed(first + second)
    q, k = (torch.randn(1, 1, 2, 8 + rest, generator=generator).double() for _ in "qk")

    def score(i: int, j: int) -> torch.Tensor:
        turned = [rotate(x, *rotary_table(spec, torch.tensor([[at]]), torch.float64)) for x, at in ((q, i), (k, j))]
        return (turned[0] * turned[1]).sum(-1)

    # Angles are fp32 as in the reference: at position p they carry p · 6e-8 of rounding.
    torch.testing.assert_close(score(first, second), score(first + shift, second + shift), atol=2e-2, rtol=0)


def test_lengths_are_kept_and_the_rest_stays() -> None:
    """A turn changes no length; channels past the pairs do not turn (case L07's rule)."""
    x = torch.randn(2, 5, 3, 12)
    positions = torch.arange(5).expand(2, -1)
    turned = rotate(x, *rotary_table(RotarySpec(1e4, 8), positions, torch.float32))
    assert torch.equal(turned[..., 8:], x[..., 8:])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, 0], x[:, 0])
    pairs = x[..., :8].unflatten(-1, (2, 4))
    torch.testing.assert_close(turned[..., :8].unflatten(-1, (2, 4)).norm(dim=-2), pairs.norm(dim=-2))


def test_a_pad_has_the_table_of_position_zero() -> None:
    cos, sin = rotary_table(RotarySpec(1e4, 8), torch.tensor([[-1, 0, 3]]), torch.float32)
    assert torch.equal(cos[0, 0], cos[0, 1])
    assert torch.equal(sin[0, 0], sin[0, 1])
    assert bool(cos.isfinite().all())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_longer_text_changes_no_speed(scaling: RotaryScaling | None) -> None:
    """Nothing here depends on how long the text or the buffer is (case L06's rule)."""
    spec = RotarySpec(1e4, 8, scaling)
    short, long = (rotary_table(spec, torch.arange(n)[None], torch.float32) for n in (10, 5000))
    assert torch.equal(short[0], long[0][:, :10])
    assert torch.equal(short[1], long[1][:, :10])
