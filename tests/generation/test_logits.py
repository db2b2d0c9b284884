"""Each step from logits to a token, against transformers' own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation import logits as steps
from cutaway.generation.params import Sampling, resolve
from cutaway.spec import GenerationSettings

NEVER = float("-inf")


def rows(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float32)


def probabilities(*values: float) -> Tensor:
    """Logits of these probabilities."""
    return torch.tensor([values], dtype=torch.float64).log().float()


def kept(logits: Tensor) -> list[int]:
    return (logits[0] > NEVER).nonzero()[:, 0].tolist()


@pytest.fixture(scope="module")
def hf() -> Any:
    import transformers.generation.logits_process as module

    return module


@pytest.fixture(scope="module", params=[0, 1, 2])
def scores(request: pytest.FixtureRequest) -> Tensor:
    """Spread out, flat, and with many exact ties (as bf16 logits have)."""
    noise = torch.randn(6, 257, generator=torch.Generator().manual_seed(request.param))
    return [noise * 4, noise * 0.05, (noise * 8).round() / 4][request.param]


NO_IDS = torch.zeros(6, 1, dtype=torch.long)


@pytest.mark.parametrize("value", [0.1, 0.7, 1.0, 1.5, 20.0])
def test_temperature(hf: Any, scores: Tensor, value: float) -> None:
    wanted = hf.TemperatureLogitsWarper(float(value))(NO_IDS, scores)
    assert torch.allclose(steps.temperature(scores, value).softmax(-1), wanted.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("value", [5e-324, 1e-45, 1e-30, 1e-9, 1e30, 1e308])
def test_extreme_temperatures_stay_numbers(scores: Tensor, value: float) -> None:
    out = steps.temperature(scores, value).softmax(-1)
    assert out.isfinite().all()
    assert torch.equal(out.gather(1, scores.argmax(-1, keepdim=True)), out.amax(-1, keepdim=True))


@pytest.mark.parametrize("k", [1, 2, 50, 256, 257, 258, 10**9])
def test_top_k(hf: Any, scores: Tensor, k: int) -> None:
    assert torch.equal(steps.top_k(scores, k), hf.TopKLogitsWarper(min(k, 2**31))(NO_IDS, scores))


def test_top_k_keeps_ties() -> None:
    assert kept(steps.top_k(rows(1, 3, 2, 3, 3), 2)) == [1, 3, 4]


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_top_p(hf: Any, scores: Tensor, p: float) -> None:
    """The same tokens are kept; where the border runs through equals, as many of them."""
    ours, theirs = steps.top_p(scores, p), hf.TopPLogitsWarper(p)(NO_IDS, scores)
    for row, one, other in zip(scores, ours, theirs, strict=True):
        assert torch.equal(row[one > NEVER].sort().values, row[other > NEVER].sort().values)
    # Of equals the first are kept, whatever the neighbours are.
    for row, one in zip(scores, ours, strict=True):
        assert torch.equal(steps.top_p(row[None], p)[0], one)
        border = row[one > NEVER].min()
        equals = one[row == border] > NEVER
        assert equals.int().diff().le(0).all()


@pytest.mark.parametrize(
    ("values", "p", "count"),
    [
        ((0.5, 0.41, 0.09), 0.9, 2),
        ((0.4, 0.3, 0.2, 0.1), 0.8, 3),
        ((0.5, 0.25, 0.25), 0.5, 1),
        ((0.5, 0.41, 0.09), 1, 3),
    ],
)
def test_the_token_that_crosses_the_line_is_kept(hf: Any, values: tuple[float, ...], p: float, count: int) -> None:
    """Case S01."""
    logits = probabilities(*values)
    assert len(kept(steps.top_p(logits, p))) == count
    assert len(kept(hf.TopPLogitsWarper(float(p))(NO_IDS[:1], logits))) == count


def test_top_p_of_nothing_is_the_best() -> None:
    """Case S02; of a row of equals it is the first."""
    assert kept(steps.top_p(probabilities(0.1, 0.6, 0.3), 0.0)) == [1]
    assert kept(steps.top_p(torch.zeros(1, 1000), 0.0)) == [0]


def test_top_p_after_top_k_takes_nothing_back() -> None:
    logits = steps.top_k(torch.arange(50.0)[None], 3)
    assert kept(steps.top_p(logits, 0.9999999)) == [47, 48, 49]


@pytest.mark.parametrize("p", [0.0, 0.01, 0.2, 0.9, 1.0])
def test_min_p(hf: Any, scores: Tensor, p: float) -> None:
    assert torch.equal(steps.min_p(scores, p), hf.MinPLogitsWarper(p)(NO_IDS, scores))


def test_min_p_follows_the_temperature() -> None:
    """Case S07."""
    logits = probabilities(0.5, 0.11, 0.09, 0.30)
    before = logits.clone()
    assert kept(steps.min_p(logits, 0.2)) == [0, 1, 3]
    assert kept(steps.min_p(steps.temperature(logits, 2.0), 0.2)) == [0, 1, 2, 3]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 2.0])
def test_repetition_penalty(hf: Any, scores: Tensor, penalty: float) -> None:
    ids = torch.randint(0, 257, (6, 30), generator=torch.Generator().manual_seed(3))
    ours = steps.repetition_penalty(scores, ids.tolist(), penalty)
    assert torch.equal(ours, hf.RepetitionPenaltyLogitsProcessor(penalty)(ids, scores))


def test_repetition_penalty_by_hand() -> None:
    """Case S05: negative ones go down too, and twice is as once."""
    logits = rows(4, -4, 3)
    assert steps.repetition_penalty(logits, [[0, 1, 1]], 2.0).tolist() == [[2, -8, 3]]
    assert steps.repetition_penalty(logits, [[]], 2.0).tolist() == [[4, -4, 3]]


def test_count_penalties() -> None:
    logits = torch.zeros(3, 4)
    out = steps.count_penalties(logits, [[1, 1, 3], [], [0]], frequency=0.5, presence=0.25)
    assert out.tolist() == [[0, -1.25, 0, -0.75], [0, 0, 0, 0], [-0.75, 0, 0, 0]]


def test_logit_bias(hf: Any, scores: Tensor) -> None:
    bias = {0: -100.0, 5: 2.5, 256: 100.0}
    theirs = hf.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    assert torch.equal(steps.logit_bias(scores, bias), theirs(NO_IDS, scores))


def test_filters_come_after_the_temperature() -> None:
    """Case S06: at T = 0.5 the best alone reaches 0.8; with the temperature last, two are needed for it."""
    drawn = {Sampling(temperature=0.5, top_p=0.8, seed=s).choose(rows(3, 2, 1), [[0]], [[]], [0])[0] for s in range(64)}
    assert drawn == {0}
    last = {"temperature": 0.5, "top_p": 0.8, "temperature_last": True}
    drawn = {Sampling(**last, seed=s).choose(rows(3, 2, 1), [[0]], [[]], [0])[0] for s in range(64)}
    assert drawn == {0, 1}
    two = Sampling(**last).processed(rows(3, 2, 1), [[0]], [[]]).softmax(-1)
    assert two.tolist()[0] == pytest.approx([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2)), 0])
    drawn = {Sampling(temperature=1.0, top_p=0.8, seed=s).choose(rows(3, 2, 1), [[0]], [[]], [0])[0] for s in range(64)}
    assert drawn == {0, 1}


def test_the_whole_chain(hf: Any, scores: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(0, 257, (6, 9), generator=torch.Generator().manual_seed(5))
    wanted = hf.RepetitionPenaltyLogitsProcessor(1.2)(ids, scores)
    for warper in (
        hf.TemperatureLogitsWarper(0.8),
        hf.TopKLogitsWarper(40),
        hf.TopPLogitsWarper(0.9),
        hf.MinPLogitsWarper(0.02),
    ):
        wanted = warper(ids, wanted)
    seen: list[Tensor] = []
    monkeypatch.setattr(steps, "sample", lambda logits, keys: seen.append(logits) or [0] * len(keys))
    before = scores.clone()
    Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.2).choose(
        scores, ids[:, :4].tolist(), ids[:, 4:].tolist(), [0] * 6
    )
    assert torch.allclose(seen[0].softmax(-1).sort().values, wanted.softmax(-1).sort().values, atol=1e-6)
    assert torch.equal(scores, before)  # log-probabilities are read from these afterwards


def test_greedy_takes_the_first_of_equals() -> None:
    assert steps.greedy(torch.zeros(3, 5000)) == [0, 0, 0]
    wide = torch.zeros(1, 5000)
    wide[0, [77, 300, 4999]] = 1.0
    assert steps.greedy(wide) == [77]


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [1.0, math.nan], [math.inf, 1.0], [NEVER, NEVER]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_can_be_chosen(bad: list[float], temperature: float) -> None:
    with pytest.raises(RequestError, match="NaN or infinity"):
        Sampling(temperature=temperature).choose(torch.tensor([[1.0, 2.0], bad]), [[0]] * 2, [[]] * 2, [0] * 2)


def test_a_ban_is_no_reason_to_stop() -> None:
    assert Sampling(temperature=1.0).choose(rows(NEVER, 1.0), [[0]], [[]], [0]) == [1]
    assert Sampling().choose(rows(NEVER, 1.0), [[0]], [[]], [0]) == [1]


def test_biases_that_leave_no_number() -> None:
    with pytest.raises(RequestError, match="leave no token") as caught:
        Sampling(logit_bias={0: 1e39}).choose(rows(1.0, 2.0), [[0]], [[]], [0])
    assert caught.value.field == "logit_bias"


# ── drawing ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_draw_depends_on_its_own_key_alone() -> None:
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(0))
    keys = [(i % 3 - 1, i % 5, i) for i in range(40)]
    together = steps.sample(logits, keys)
    assert together == [steps.sample(logits[i : i + 1], keys[i : i + 1])[0] for i in range(40)]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    assert steps.sample(logits[order], [keys[i] for i in order]) == [together[i] for i in order]


def test_the_random_number_is_pinned() -> None:
    """A seed means the same in every version and on every machine."""
    assert steps.uniform(1, 2, 5) == 0.9038186265875775
    assert steps.uniform(-1, 0, 0) == steps.uniform(2**64 - 1, 0, 0)
    assert len({steps.uniform(s, c, p) for s in range(5) for c in range(5) for p in range(5)}) == 125


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_range_fall_on_real_tokens(monkeypatch: pytest.MonkeyPatch, u: float) -> None:
    monkeypatch.setattr(steps, "uniform", lambda *key: u)
    logits = torch.tensor([[NEVER, 0.3, 1.0, 0.1, NEVER], [NEVER, NEVER, 0.0, NEVER, NEVER]])
    assert steps.sample(logits, [(0, 0, 0)] * 2) == [1 if u == 0 else 3, 2]


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────────

OWN = GenerationSettings(temperature=0.6, top_k=20, top_p=0.9, eos_ids=(2,))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("top_p", value) for value in (-0.1, 1.1, math.nan, True, "0.5", [0.5])],
        *[("min_p", value) for value in (-0.1, 1.1, math.nan, False)],
        *[("temperature", value) for value in (-1, math.nan, math.inf, 10**400, True, "hot")],
        *[("temperature_last", value) for value in (None, 1, "yes")],
        *[("top_k", value) for value in (-1, 1.5, True, math.nan, "3")],
        *[("repetition_penalty", value) for value in (0, -1.0, math.nan, math.inf, True)],
        *[("frequency_penalty", value) for value in (math.nan, math.inf, False, "1")],
        *[("presence_penalty", value) for value in (math.nan, -math.inf, False)],
        *[("max_tokens", value) for value in (-1, 1.5, True, "5", math.inf)],
        *[("n", value) for value in (0, -1, 1.0, True, None)],
        *[("logprobs", value) for value in (-1, True, 1.0)],
        *[("seed", value) for value in (2**63, -(2**63) - 1, 1.5, True, "a")],
        *[("stop", value) for value in ("", ["a", ""], b"ab", {"a": 1}, 1.5)],
        *[("stop/0", [value]) for value in (64, -1, True, 1.5, None, b"a")],
        *[("stop/0", value) for value in (64, -1, True)],
        *[("logit_bias", value) for value in ([(1, 2)], "a", 5)],
        *[("logit_bias/0", {key: 1.0}) for key in (64, -1, "3", True)],
        *[("logit_bias/3", {3: value}) for value in (math.nan, math.inf, "x", None, True)],
    ],
)
def test_arguments_that_make_no_sense(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(OWN, 64, **{name.split("/")[0]: value})
    assert caught.value.field == name


def test_what_is_left_out_comes_from_the_checkpoint() -> None:
    own = resolve(OWN, 64)
    assert (own.temperature, own.top_k, own.top_p, own.stop_ids) == (0.6, 20, 0.9, {2})
    assert own.seed != resolve(OWN, 64).seed
    mine = resolve(OWN, 64, temperature=0, top_k=0, top_p=1, stop=["a", 7], seed=-(2**63))
    assert (mine.temperature, mine.top_k, mine.top_p, mine.stop, mine.stop_ids) == (0, 0, 1, ("a",), {2, 7})
    assert resolve(OWN, 64, stop=0).stop_ids == {0, 2}
    assert resolve(OWN, 64, stop="end").stop == ("end",)
    assert resolve(OWN, 64, logit_bias={3: -100}).logit_bias == {3: -100.0}
    assert resolve(OWN, 64, max_tokens=None).max_tokens is None
