"""Chunks, prefixes and packed documents: against lone runs and a Boolean mask written down pair by pair."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.reference import tiny
from torch import Tensor

from cutaway.cache import MaskKind, allowed, build
from cutaway.cache.mask import plan_mask
from cutaway.models import Transformer
from cutaway.spec import MaskRule, ModelSpec

WAYS = ("fused", "explicit", "blockwise")
# A rotation, a bias by distance, a learned row: each kind of position a model may have.
NAMES = ("llama", "bloom", "gpt2")
SPLITS = ([1] * 20, [7, 8, 5], [13, 7], [20])


def with_rule(name: str, rule: MaskRule) -> Transformer:
    """A tiny model whose layers all follow ``rule``."""
    spec: ModelSpec = tiny.spec_of(tiny.config(name))
    layers = []
    for layer in spec.decoder.layers:
        attn, *rest = layer.branches
        layers.append(replace(layer, branches=(replace(attn, body=replace(layer.attention, mask=rule)), *rest)))
    model = Transformer(replace(spec, decoder=replace(spec.decoder, layers=tuple(layers))))
    tiny.scale_randomly(model, norm_mean=1.0)
    return model.eval()


def naive(rule: MaskRule, positions: list[int], segments: list[int]) -> list[list[bool]]:
    """Pair by pair, in words."""

    def may(i: int, j: int) -> bool:
        p, q = positions[j], positions[i]
        document = [s if s >= 0 else -1 - s for s in (segments[i], segments[j])]
        if p < 0 or q < 0 or document[0] != document[1]:
            return False
        if rule.prefix and segments[i] < 0 and segments[j] < 0:
            return True
        if rule.causal and p > q:
            return False
        if rule.window is not None and abs(p - q) >= rule.window:
            return False
        return rule.chunk is None or p // rule.chunk == q // rule.chunk

    return [[may(i, j) for j in range(len(positions))] for i in range(len(positions))]


RULES = {
    "causal": MaskRule(),
    "both ways": MaskRule(causal=False),
    "window": MaskRule(window=3),
    "window both ways": MaskRule(causal=False, window=3),
    "chunk": MaskRule(chunk=4),
    "chunk both ways": MaskRule(causal=False, chunk=4),
    "chunk and window": MaskRule(chunk=4, window=2),
    "prefix": MaskRule(prefix=True),
    "prefix and window": MaskRule(prefix=True, window=2),
    "prefix and chunk": MaskRule(prefix=True, chunk=3),
}
# Three documents, two of them with a prefix; pads between.
POSITIONS = [0, 1, 2, 3, 4, 5, -1, 0, 1, 2, 3, -1, 0, 1, 2, 3, 4]
SEGMENTS = [-1, -1, -1, 0, 0, 0, 0, 1, 1, 1, 1, 1, -3, -3, 2, 2, 2]


@pytest.mark.parametrize("name", RULES)
def test_a_rule_pair_by_pair(name: str) -> None:
    rule = RULES[name]
    segments = SEGMENTS if rule.prefix else [s if s >= 0 else -1 - s for s in SEGMENTS]
    p, s = torch.tensor([POSITIONS]), torch.tensor([segments])
    assert allowed(rule, p, p, s, s)[0, 0].tolist() == naive(rule, POSITIONS, segments)
    # A later part of the text asks for its own rows of the same mask.
    assert torch.equal(allowed(rule, p[:, 9:], p, s[:, 9:], s), allowed(rule, p, p, s, s)[:, :, 9:])


@pytest.mark.parametrize("name", RULES)
def test_a_mask_is_boolean(name: str) -> None:
    """Case M08: True means "may read", in the plan of every rule, whole or in pieces; no other kind is ever made."""
    rule, p = RULES[name], torch.tensor([POSITIONS])
    s = torch.tensor([SEGMENTS if rule.prefix else [s if s >= 0 else -1 - s for s in SEGMENTS]])
    plan = plan_mask(rule, p, p, s, s, torch.device("cpu"))
    assert plan.kind is MaskKind.RULE
    assert plan.mask is not None
    for mask in (plan.mask, plan.piece(0, 5), plan.piece(3, 9, slice(2, 7)), allowed(rule, p, p, s, s)):
        assert mask.dtype is torch.bool
    assert torch.equal(plan.mask, allowed(rule, p, p, s, s))
    itself = torch.arange(p.shape[1])
    assert torch.equal(plan.mask[0, 0, itself, itself], p[0] >= 0)  # a token may read itself, a pad nothing


class SeenWeights:
    """Keeps every layer's attention weights."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def begin(self, positions: Tensor, of_source: bool = False) -> None:
        pass

    def at(self, scope: str) -> SeenWeights:
        return self

    def wants(self, name: str) -> bool:
        return name == "weights"

    def __call__(self, name: str, value: Tensor) -> Tensor:
        if name == "weights":
            self.weights.append(value)
        return value


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_what_is_masked_has_no_weight(name: str, rule: str) -> None:
    """Exactly zero where the naive mask says no, something everywhere else."""
    model = with_rule(name, RULES[rule])
    segments = SEGMENTS if RULES[rule].prefix else [s if s >= 0 else -1 - s for s in SEGMENTS]
    tap = SeenWeights()
    p, s = torch.tensor([POSITIONS]), torch.tensor([segments])
    model(tiny.ids(1, len(POSITIONS)), p, s, tap=tap)
    mask = torch.tensor(naive(RULES[rule], POSITIONS, segments))
    assert len(tap.weights) == model.spec.n_layers
    for weights in tap.weights:
        assert bool((weights[0][:, ~mask] == 0).all())
        assert bool((weights[0][:, mask] > 0).all())


# ---- prefixes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_prefix_reads_both_ways(name: str, how: str) -> None:
    """The prompt is as in a model that reads both ways, the continuation as in one that has read it."""
    model, two_way = with_rule(name, MaskRule(prefix=True)), with_rule(name, MaskRule(causal=False))
    model.attention = how
    ids, n = tiny.ids(1, 20), 13
    segments = torch.tensor([[-1] * n + [0] * (20 - n)])
    out = model(ids, segments=segments)
    torch.testing.assert_close(out[:, :n], two_way(ids[:, :n]), atol=1e-4, rtol=0)
    # A change late in the prompt reaches its first token, one in the continuation only what comes after it.
    other = ids.clone()
    other[0, n - 1] += 1
    assert float((model(other, segments=segments) - out)[0, 0].abs().max()) > 1e-3
    other = ids.clone()
    other[0, 16] += 1
    changed = (model(other, segments=segments) - out)[0].abs().amax(-1)
    assert bool((changed[:16] == 0).all())
    assert bool((changed[16:] > 1e-4).all())
    # Without segments there is no prefix.
    assert torch.equal(model(ids), with_rule_like(model, MaskRule(), how)(ids))


def with_rule_like(model: Transformer, rule: MaskRule, how: str) -> Transformer:
    plain = with_rule(model.spec.family, rule)
    plain.attention = how  # type: ignore[assignment]
    return plain


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_prefix_in_a_cache(name: str) -> None:
    """The prompt in one pass, since its first token reads its last; the rest in any split."""
    model, ids, n = with_rule(name, MaskRule(prefix=True)), tiny.ids(1, 20), 13
    segments = torch.tensor([[-1] * n + [0] * (20 - n)])
    whole = model(ids, segments=segments)
    for sizes in ([13, 7], [13, 1, 1, 1, 1, 1, 1, 1], [13, 4, 3], [15, 5]):
        cache = model.new_cache(capacity=8)
        parts = [
            model(part, segments=seg, cache=cache)
            for part, seg in zip(ids.split(sizes, 1), segments.split(sizes, 1), strict=True)
        ]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=0)
    # The one document is number 0, which is also what a step without segments belongs to.
    cache = model.new_cache()
    parts = [model(ids[:, :n], segments=segments[:, :n], cache=cache)]
    parts += [model(part, cache=cache) for part in ids[:, n:].split(1, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("sliding", [True, False])
@torch.no_grad()
def test_a_prefix_outlives_a_window(sliding: bool, paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window bounds what the continuation reads; a ring must not drop what the prefix itself needs."""
    monkeypatch.setattr(build, "SLACK", 2)
    model, ids, n = with_rule("llama", MaskRule(prefix=True, window=4)), tiny.ids(1, 20), 13
    segments = torch.tensor([[-1] * n + [0] * (20 - n)])
    whole = model(ids, segments=segments)
    cache = model.new_cache(capacity=8, sliding=sliding, paged=paged)
    parts = [
        model(part, segments=seg, cache=cache)
        for part, seg in zip(ids.split([13, 1, 3, 3], 1), segments.split([13, 1, 3, 3], 1), strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=0)


# ---- chunks and packed documents -------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_chunk_is_a_text_of_its_own(name: str, how: str) -> None:
    """But for where its positions start; in a cache too, in any split."""
    model, plain = with_rule(name, MaskRule(chunk=6)), with_rule(name, MaskRule())
    model.attention = how
    ids = tiny.ids(2, 20)
    out = model(ids)
    for start in range(0, 20, 6):
        stop = min(start + 6, 20)
        lone = plain(ids[:, start:stop], torch.arange(start, stop).expand(2, -1))
        torch.testing.assert_close(out[:, start:stop], lone, atol=1e-4, rtol=0)
    for sizes in SPLITS:
        cache = model.new_cache(batch=2, capacity=4)
        parts = [model(part, cache=cache) for part in ids.split(sizes, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), out, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rule", ["causal", "window", "chunk", "chunk and window", "prefix"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_packed_documents(name: str, rule: str) -> None:
    """Each as if alone, whole and through a cache cut between and inside documents (not inside a prefix)."""
    model, lengths = with_rule(name, RULES[rule]), (8, 5, 7)
    documents = [tiny.ids(1, n, seed=n) for n in lengths]
    heads = [torch.tensor([[-1] * 3 + [0] * (n - 3)] if RULES[rule].prefix else [[0] * n]) for n in lengths]
    alone = [model(document, segments=head) for document, head in zip(documents, heads, strict=True)]
    ids = torch.cat(documents, 1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    segments = torch.cat([torch.where(head < 0, -1 - i, i) for i, head in enumerate(heads)], 1)
    for how in WAYS:
        model.attention = how  # type: ignore[assignment]
        torch.testing.assert_close(model(ids, positions, segments), torch.cat(alone, 1), atol=1e-4, rtol=0)
    for sizes in ([8, 12], [4, 7, 5, 4], [20]):
        cache = model.new_cache(capacity=4)
        parts = [
            model(*part, cache=cache)
            for part in zip(ids.split(sizes, 1), positions.split(sizes, 1), segments.split(sizes, 1), strict=True)
        ]
        torch.testing.assert_close(torch.cat(parts, 1), torch.cat(alone, 1), atol=1e-4, rtol=0)
