"""With a draft, tokens follow the model's softmax: χ² of 1e5 draws, and acceptance as it is to be expected.

A Markov chain says what comes next, so that each of its transitions is a sample of a distribution that is known.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor

from cutaway.generation.drafting import Drafting
from cutaway.generation.generate import Run
from cutaway.generation.params import resolve
from cutaway.spec import GenerationSettings
from tests.generation.scripted import Chain

SIZE = 9
ROWS, LONG = 1000, 100  # 1e5 draws, each with a number of its own
CHANCE = 1e-4  # a right sampler fails as often; seeds are fixed, so that it does so never or always


def table(seed: int) -> Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) * 1.5


TARGET = table(1)
NEAR = TARGET + 0.4 * table(2)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "cool": {"temperature": 0.6},
    "top-k": {"temperature": 1.2, "top_k": 4},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
}


def odds(logits: Tensor, how: dict[str, Any]) -> Tensor:
    """What each token's successors should be, written down anew. [vocab, vocab]"""
    x = logits.double() / how["temperature"]
    if "top_k" in how:
        x = torch.where(x >= x.sort(descending=True).values[:, how["top_k"] - 1 : how["top_k"]], x, -torch.inf)
    p = x.softmax(-1)
    if "top_p" in how:
        best, place = p.sort(descending=True)
        kept = torch.zeros_like(p).scatter(1, place, (best.cumsum(-1) - best < how["top_p"]).double())
        p = p * kept
    return p / p.sum(-1, keepdim=True)


DRAFTS: dict[str, Any] = {"prompt": None, "near": Chain(NEAR), "far": Chain(table(5))}


@cache
def write(who: str | None, how: str, most: int = 4, long: int = LONG, by: str = "target") -> tuple[Tensor, Run]:
    """Counts of (token, next token) in what is written with a draft. [vocab, vocab]"""
    chain: Any = Chain(TARGET if by == "target" else NEAR)
    sampling = resolve(GenerationSettings(), SIZE, max_tokens=long, seed=11, n=ROWS, **WAYS[how])
    run = Run(chain, None, [[0, 3, 5, 0]], sampling, drafting=None if who is None else Drafting(DRAFTS[who], most))
    for _ in run:
        pass
    counts = torch.zeros(SIZE, SIZE)
    for row in run.rows:
        text = torch.tensor([row.prompt[-1], *row.tokens])
        counts.index_put_((text[:-1], text[1:]), torch.ones(long), accumulate=True)
    assert int(counts.sum()) == ROWS * long
    return counts, run


def chi_square(counts: Tensor, p: Tensor) -> tuple[float, float]:
    """How far off they are, and where a right sampler is hardly ever."""
    expected = counts.sum(1, keepdim=True) * p
    real = p > 0
    assert not bool(counts[~real].any()), "a token that has no probability"
    off = float(((counts - expected)[real] ** 2 / expected[real]).sum())
    return off, float(scipy.stats.chi2.isf(CHANCE, int(real.sum()) - SIZE))


def share(run: Run) -> float:
    found = [one.speculation for one in run.results()]
    return sum(one.accepted for one in found if one) / sum(one.proposed for one in found if one)


CASES = [
    pytest.param(how, who, marks=() if (how, who) in (("plain", "prompt"), ("plain", "near")) else pytest.mark.slow)
    for how in WAYS
    for who in DRAFTS
]


@pytest.mark.parametrize(("how", "who"), CASES)
def test_draws_follow_the_softmax(how: str, who: str) -> None:
    counts, run = write(who, how)
    off, bound = chi_square(counts, odds(TARGET, WAYS[how]))
    print(f"\n{who}, {how}: χ² {off:.0f} of {bound:.0f}; {share(run):.0%} of the guesses accepted")
    assert off < bound
    assert 0.02 < share(run) < 0.98


def test_the_test_can_tell() -> None:
    """What the near draft would write by itself is found out, with a third of the draws."""
    counts, _ = write(None, "plain", long=LONG // 3, by="near")
    off, bound = chi_square(counts, odds(TARGET, WAYS["plain"]))
    assert off > 10 * bound
    assert chi_square(counts, odds(NEAR, WAYS["plain"]))[0] < bound


@pytest.mark.parametrize(
    "how", ["plain", *(pytest.param(how, marks=pytest.mark.slow) for how in WAYS if how != "plain")]
)
def test_acceptance_is_what_the_two_distributions_have_in_common_of_a_draw(how: str) -> None:
    """One guess at a time, drawn with the number of the answer's own draw: where both fall on the same token."""
    counts, run = write("near", how, most=1, long=LONG // 3)
    p, q = odds(TARGET, WAYS[how]), odds(NEAR, WAYS[how])
    p_sum, q_sum = p.cumsum(-1), q.cumsum(-1)
    both = (torch.minimum(p_sum, q_sum) - torch.maximum(p_sum - p, q_sum - q)).clamp(min=0).sum(-1)
    visits = (counts.sum(1) / counts.sum()).double()
    expected, most = float(visits @ both), float(visits @ torch.minimum(p, q).sum(-1))
    print(f"\n{how}: {share(run):.3f} accepted, {expected:.3f} expected; no way of guessing exceeds {most:.3f}")
    # Guesses are made at about half of the places, and not after every token alike.
    assert share(run) == pytest.approx(expected, abs=0.02)
    assert share(run) < most


@pytest.mark.parametrize("who", ["prompt", "near"])
def test_the_very_draws(who: str) -> None:
    """Not the distribution alone: the same tokens as without."""
    (_, plain), (_, run) = write(None, "plain", long=LONG // 3), write(who, "plain")
    assert [row.tokens[: LONG // 3] for row in run.rows] == [row.tokens for row in plain.rows]
