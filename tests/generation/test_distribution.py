"""Must show 2: what is drawn has the distribution that was asked for, by χ² over 100,000 draws each time.

The draw is a function of (seed, choice, position), so draws are taken along each of the three with the others still:
each series alone must follow the softmax, and neighbours must have nothing to do with each other.

A check passes if χ² is neither larger nor smaller than it would be by chance once in 10,000 times: draws that come too
evenly are no draws either. About a hundred checks are made, so that a perfect sampler would have had one chance in
fifty to fail one of them on the day they were written; keys are fixed, so what passed that day passes for ever. What
they can see is in ``test_the_check_can_fail``: 100,000 draws show a probability of 0.3 that is off by 0.006.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
import transformers.generation.logits_process as hf
from torch import Tensor

from cutaway.generation import logits as steps
from cutaway.generation.generate import Run
from cutaway.generation.params import resolve
from cutaway.model import Model
from cutaway.spec import GenerationSettings
from tests.generation.scripted import VOCAB, Scripted
from tests.reference import tiny

N = 100_000
RARE = 1e-4
NEVER = float("-inf")
AXES = ("seed", "choice", "position")
LOGITS = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, NEVER, -2.0, 1.5, 0.1, 1.9, -0.3]])
IDS = torch.tensor([[3, 7, 9, 3, 1, 1, 8]])  # two of the prompt, five produced


def chance(counts: Tensor, expected: Tensor) -> float:
    """How often χ² would be larger by chance (Pearson 1900)."""
    real = expected > 0
    assert not counts[~real].any()  # what cannot come never comes
    assert float(expected[real].min()) > 5
    x = ((counts - expected)[real] ** 2 / expected[real]).sum()
    freedom = torch.tensor(float(real.sum()) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, x / 2))


def fits(value: float) -> bool:
    return RARE < value < 1 - RARE


def histogram(tokens: Sequence[int], size: int) -> Tensor:
    return torch.tensor(tokens).bincount(minlength=size).double()


# ── one number after another ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def numbers() -> dict[str, list[float]]:
    """The uniform numbers along each axis, made once: most of the time goes there."""
    return {
        "seed": [steps.uniform(i, 0, 7) for i in range(N)],
        "choice": [steps.uniform(5, i, 7) for i in range(N)],
        "position": [steps.uniform(5, 0, i) for i in range(N)],
    }


@pytest.fixture(params=AXES)
def along(request: pytest.FixtureRequest, numbers: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Tensor]:
    """Draws from one row of logits, along one axis."""
    series, axis = numbers[request.param], AXES.index(request.param)
    monkeypatch.setattr(steps, "uniform", lambda *key: series[key[axis]])
    keys = [(i, i, i) for i in range(N)]
    return lambda row: histogram(steps.sample(row.expand(N, -1), keys), row.shape[1])


@dataclass
class Method:
    """Arguments of a call, and transformers' processors for the same."""

    call: dict[str, Any]
    theirs: Sequence[Any] = ()
    change: Tensor | float = 0.0


COUNTS = torch.bincount(IDS[0, 2:], minlength=LOGITS.shape[1])
METHODS = {
    "plain": Method({}),
    "temperature 0.5": Method({"temperature": 0.5}, [hf.TemperatureLogitsWarper(0.5)]),
    "temperature 2": Method({"temperature": 2.0}, [hf.TemperatureLogitsWarper(2.0)]),
    "top-k": Method({"top_k": 4}, [hf.TopKLogitsWarper(4)]),
    "top-p": Method({"top_p": 0.5}, [hf.TopPLogitsWarper(0.5)]),
    "min-p": Method({"min_p": 0.2}, [hf.MinPLogitsWarper(0.2)]),
    "repetition penalty": Method({"repetition_penalty": 1.5}, [hf.RepetitionPenaltyLogitsProcessor(1.5)]),
    "frequency penalty": Method({"frequency_penalty": 0.7}, change=-0.7 * COUNTS),
    "presence penalty": Method({"presence_penalty": 0.9}, change=-0.9 * (COUNTS > 0)),
    "logit bias": Method(
        {"logit_bias": {2: 2.5, 3: -1.0, 5: 9.0}}, [hf.SequenceBiasLogitsProcessor({(2,): 2.5, (3,): -1.0, (5,): 9.0})]
    ),
    "forbidden": Method({"bad_words": [3, [8, 9]]}, [hf.NoBadWordsLogitsProcessor([[3], [8, 9]])]),
    "all at once": Method(
        {"repetition_penalty": 1.2, "temperature": 0.6, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
        [
            hf.RepetitionPenaltyLogitsProcessor(1.2),
            hf.TemperatureLogitsWarper(0.6),
            hf.TopKLogitsWarper(7),
            hf.TopPLogitsWarper(0.9),
            hf.MinPLogitsWarper(0.05),
        ],
    ),
}


def wanted(method: Method) -> Tensor:
    """Probabilities, in fp64. [vocab]"""
    x = LOGITS.double() + method.change
    for step in method.theirs:
        x = step(IDS, x)
    return x[0].softmax(-1)


def drawn_from(method: Method) -> Tensor:
    """Ours: the logits that a token is drawn from. [1, vocab]"""
    sampling = resolve(GenerationSettings(), LOGITS.shape[1], **{"temperature": 1.0, "seed": 0, **method.call})
    return sampling.processed(LOGITS, IDS[:, :2].tolist(), IDS[:, 2:].tolist())


@pytest.mark.parametrize("name", METHODS)
def test_each_method(name: str, along: Callable[[Tensor], Tensor]) -> None:
    method = METHODS[name]
    found = chance(along(drawn_from(method)), wanted(method) * N)
    print(f"\n{name}: p = {found:.4f}")
    assert fits(found)


def test_methods_differ() -> None:
    """Or one would stand for another: between any two some probability differs by more than the check can see."""
    for one, other in combinations(METHODS, 2):
        assert float((wanted(METHODS[one]) - wanted(METHODS[other])).abs().max()) > 0.02, (one, other)


@pytest.mark.parametrize("axis", AXES)
def test_the_numbers_are_uniform(axis: str, numbers: dict[str, list[float]]) -> None:
    for cells in (2, 16, 1000):
        counts = torch.tensor(numbers[axis]).mul(cells).floor().long().bincount(minlength=cells).double()
        assert fits(chance(counts, torch.full((cells,), N / cells).double()))
    low_bits = [int(u * 2**53) & 15 for u in numbers[axis]]
    assert fits(chance(histogram(low_bits, 16), torch.full((16,), N / 16).double()))


# ── neighbours ───────────────────────────────────────────────────────────────────────────────────────────────

# Where two draws might come of one number: the next of each kind, across kinds, and the same two exchanged.
STEPS = {
    "next seed": ((1, 0, 0), (0, 0, 0)),
    "next choice": ((0, 1, 0), (0, 0, 0)),
    "next position": ((0, 0, 1), (0, 0, 0)),
    "position after next": ((0, 0, 2), (0, 0, 0)),
    "fourth position": ((0, 0, 4), (0, 0, 0)),
    "choice or position": ((0, 1, 0), (0, 0, 1)),
    "seed or choice": ((1, 0, 0), (0, 1, 0)),
    "seed or position": ((1, 0, 0), (0, 0, 1)),
    "far seeds": ((2**32, 0, 0), (0, 0, 0)),
    "opposite": ((0, 1, 0), (0, -1, 0)),
}
PAIR = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)


def independent(name: str, n: int) -> float:
    """How often n pairs would be further from independent by chance. No two pairs meet."""
    places = [(8 * (i % 100), 8 * (i // 100 % 10) + 1, 8 * (i // 1000)) for i in range(n)]
    rows = PAIR.log().expand(n, -1)
    one, other = (
        steps.sample(rows, [(s + step[0], c + step[1], p + step[2]) for s, c, p in places]) for step in STEPS[name]
    )
    joint = histogram([4 * a + b for a, b in zip(one, other, strict=True)], 16)
    return chance(joint, (PAIR[:, None] * PAIR).flatten() * n)


@pytest.mark.parametrize("name", STEPS)
def test_neighbours_are_independent(name: str) -> None:
    found = independent(name, 10_000)
    print(f"\n{name}: p = {found:.4f}")
    assert fits(found)


# ── the check itself ─────────────────────────────────────────────────────────────────────────────────────────


def drawn(logits: Tensor, u: Sequence[float], sums: Callable[[Tensor], Tensor] = lambda p: p.cumsum(-1)) -> Tensor:
    """A draw written once more, to be spoilt. [vocab], [n] → counts"""
    edges = sums(logits[0].double().softmax(-1)).double()
    tokens = torch.searchsorted(edges, torch.tensor(u, dtype=torch.float64), right=True).clamp(max=logits.shape[1] - 1)
    return tokens.bincount(minlength=logits.shape[1]).double()


def test_the_check_can_fail(numbers: dict[str, list[float]]) -> None:
    """Faults that samplers have had, each of which it sees."""
    u, expected, row = numbers["seed"], wanted(METHODS["plain"]) * N, LOGITS
    assert fits(chance(drawn(row, u), expected))
    finite = LOGITS[:, [i for i in range(11) if i != 5]]
    level, many = finite[0].double().softmax(-1) * N, torch.zeros(1, 200)
    hot = drawn_from(Method({"temperature": 0.5, "top_p": 0.8}))
    swapped = drawn_from(Method({"temperature": 0.5}))
    swapped = swapped.masked_fill(hf.TopPLogitsWarper(0.8)(IDS, LOGITS) == NEVER, NEVER)
    faults = {
        "one token on": chance(drawn(finite, u).roll(1), level),
        "numbers that end at 0.98": chance(drawn(finite, [x * 0.98 for x in u]), level),
        "a running sum in bf16": chance(
            drawn(many, u, lambda p: p.bfloat16().cumsum(-1)), torch.full((200,), N / 200).double()
        ),
        "seven bits": chance(drawn(finite, [int(x * 128) / 128 for x in u]), level),
        "too even": chance(drawn(finite, [(i + 0.5) / N for i in range(N)]), level),
        "filters first": chance(drawn(swapped, u).where(hot[0] > NEVER, 0), hot[0].double().softmax(-1) * N),
    }
    print("", *(f"{name}: p = {value:.1e}" for name, value in faults.items()), sep="\n")
    assert not any(map(fits, faults.values()))


@pytest.mark.parametrize(
    ("spoilt", "seen_by"),
    [
        (lambda s, c, p: (s, 0, p), {"next choice", "opposite"}),
        (lambda s, c, p: (s, 0, c + p), {"choice or position"}),
        (lambda s, c, p: (s + c, 0, p), {"seed or choice"}),
        (lambda s, c, p: (s + p, c, 0), {"seed or position"}),
        (lambda s, c, p: (s & 0xFFFFFFFF, c, p), {"far seeds"}),
        (lambda s, c, p: (s, c, p // 4), {"next position", "position after next"}),
        (lambda s, c, p: (s, abs(c - 1), p), {"opposite"}),
    ],
)
def test_pairs_can_fail(spoilt: Any, seen_by: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that run into each other."""
    real = steps.uniform
    monkeypatch.setattr(steps, "uniform", lambda *key: real(*spoilt(*key)))
    for name in seen_by:
        assert not fits(independent(name, 2000))


def test_a_large_vocabulary_is_drawn_exactly() -> None:
    """Gemma's 262,144 tokens, most of them a little more likely than fp32's last bit of the running sum."""
    size, few = 262_144, 40
    tail = 1.3 * 2.0**-24
    logits = torch.full((1, size), tail).log()
    logits[0, 0] = torch.tensor(1 - (size - 1) * tail).log()
    exact = np.exp(logits[0].double().numpy().astype(np.longdouble))
    edges = exact.cumsum() / exact.sum()
    tokens = np.random.default_rng(0).integers(1, size, few)
    middles = [float((edges[token - 1] + edges[token]) / 2) for token in tokens]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "uniform", lambda seed, choice, position: middles[position])
        assert steps.sample(logits.expand(few, -1), [(0, 0, i) for i in range(few)]) == tokens.tolist()
    single = (exact / exact.sum()).astype(np.float32).cumsum()  # and this is why it is in fp64
    assert (np.searchsorted(single / single[-1], middles, side="right") != tokens).mean() > 0.9


# ── through all of it ────────────────────────────────────────────────────────────────────────────────────────


def test_many_answers_to_one_prompt() -> None:
    """``n``: 98 calls of 1,024 choices each, against the softmax of the model's own logits."""
    model = Model(tiny.transformer("llama"))
    prompt = tiny.ids(9).tolist()
    probabilities = (model.logits(prompt)[0, -1].double() / 3).softmax(-1)
    how = {"n": 1024, "max_tokens": 1, "temperature": 3.0}
    tokens = [one.tokens[0] for seed in range(98) for one in model.generate(prompt, seed=seed, **how)]
    assert len(tokens) > N
    found = chance(histogram(tokens, 64), probabilities * len(tokens))
    print(f"\np = {found:.4f}")
    assert fits(found)


class Still(Scripted):
    """Says the same of every next token."""

    def unembed(self, x: Tensor, tap: Any = None) -> Tensor:
        logits = torch.full((VOCAB,), NEVER)
        logits[: LOGITS.shape[1]] = LOGITS[0]
        return logits.expand(*x.shape[:-1], VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["position", "seed"])
def test_one_after_another(axis: str) -> None:
    """One answer of 100,000 tokens, and the first token of 100,000 calls."""
    model: Any = Still([0])
    model.spec.max_positions = 2 * N
    tokens: list[int] = []
    for seed in range(1 if axis == "position" else N):
        sampling = resolve(
            GenerationSettings(), VOCAB, temperature=1.0, seed=seed, max_tokens=N if axis == "position" else 1
        )
        run = Run(model, None, [[7, 8, 9]], sampling)
        for _ in run:
            pass
        tokens += run.rows[0].tokens
    assert len(tokens) == N
    found = chance(histogram(tokens, 11), wanted(METHODS["plain"]) * N)
    print(f"\n{axis}: p = {found:.4f}")
    assert fits(found)
