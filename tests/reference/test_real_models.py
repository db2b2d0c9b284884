"""Two real models against transformers, on the same dequantised weights in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import cutaway
from cutaway.families import family_of
from cutaway.formats.rules import saved
from tests.reference.prompts import PROMPTS

pytestmark = pytest.mark.real
NEAR_TIE = 1e-3


class Pair:
    """A model of ours and transformers' with the same weights."""

    def __init__(self, path: Path) -> None:
        self.ours = cutaway.load(path)
        spec = self.ours.spec
        family = family_of(spec.family)
        config = transformers.AutoConfig.for_model(**family.config(spec))
        with torch.device("meta"):
            self.theirs = transformers.AutoModelForCausalLM.from_config(config)
        weights = saved(family.rules(spec), dict(self.ours.transformer.state_dict()))
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        self.theirs.load_state_dict(weights, assign=True)
        # What is computed rather than stored is still on the meta device: make it anew.
        fresh = type(self.theirs.model.rotary_emb)(config)
        self.theirs.model.rotary_emb = fresh
        if spec.embedding.scale != 1.0:
            self.theirs.model.embed_tokens.embed_scale = torch.tensor(spec.embedding.scale)
        self.theirs.eval()

    @torch.no_grad()
    def logits(self, ids: list[int], attention: str = "sdpa") -> torch.Tensor:
        self.theirs.set_attn_implementation(attention)
        return self.theirs(torch.tensor([ids])).logits[0]

    @torch.no_grad()
    def greedy(self, ids: list[int], n: int) -> tuple[list[int], list[float]]:
        """Their continuation with the distance between the two best logits at each step."""
        self.theirs.set_attn_implementation("sdpa")
        cache = transformers.DynamicCache(config=self.theirs.config)
        step, out, margins = torch.tensor([ids]), [], []
        for _ in range(n):
            best = self.theirs(step, cache=cache, use_cache=True).logits[0, -1].topk(2)
            out.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            step = torch.tensor([[out[-1]]])
        return out, margins


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.getfixturevalue(f"{request.param}_path"))


def _compare_logits(pair: Pair, prompts: list[str]) -> list[int]:
    """max |Δlogit| ≤ 1e-3, and no more than twice what transformers' two attention paths differ by."""
    lengths, worst, own = [], 0.0, 0.0
    for prompt in prompts:
        ids = pair.ours.encode_prompt(prompt)
        lengths.append(len(ids))
        theirs = pair.logits(ids)
        worst = max(worst, float((pair.ours.logits(ids)[0] - theirs).abs().max()))
        own = max(own, float((pair.logits(ids, "eager") - theirs).abs().max()))
    print(f"\n{pair.ours.spec.family}: max |Δ| {worst:.2e}, transformers' own two paths {own:.2e}, lengths {lengths}")
    assert worst <= 1e-3
    assert worst <= 2 * own
    return lengths


def test_logits_short(pair: Pair) -> None:
    """Five of the prompts, one of them past Gemma's window."""
    assert max(_compare_logits(pair, [*PROMPTS[:9:4], PROMPTS[14], PROMPTS[18]])) > 512


@pytest.mark.slow
def test_logits_all(pair: Pair) -> None:
    lengths = _compare_logits(pair, PROMPTS)
    assert min(lengths) <= 2
    assert max(lengths) > 600


def _compare_greedy(pair: Pair, prompts: list[str], n: int) -> None:
    ties = 0
    for prompt in prompts:
        ids = pair.ours.encode_prompt(prompt)
        theirs, margins = pair.greedy(ids, n)
        run = pair.ours.generate(ids, max_tokens=n, temperature=0, stop=None)
        ours = run.tokens
        if run.finish_reason == "stop":  # transformers' loop above goes on past an end token
            theirs, margins = theirs[: len(ours)], margins[: len(ours)]
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if first is not None:
            assert margins[first] < NEAR_TIE, (prompt, first, margins[first])
            ties += 1
    print(f"\n{pair.ours.spec.family}: {len(prompts)} continuations of {n} tokens the same, {ties} after a near-tie")


def test_greedy_short(pair: Pair) -> None:
    _compare_greedy(pair, [PROMPTS[2], PROMPTS[6], PROMPTS[12]], 16)


@pytest.mark.slow
def test_greedy_all(pair: Pair) -> None:
    _compare_greedy(pair, PROMPTS, 64)
