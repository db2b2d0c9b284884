"""What attention is, seen from outside: order, distance, reach, and what a mask shuts out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.reference import tiny
from torch import Tensor

from cutaway.cache.mask import plan_mask
from cutaway.models import Transformer
from cutaway.modules.attend import attend, blockwise, explicit, fused
from cutaway.modules.score import Attending
from cutaway.spec import AlibiBias, AttentionSpec, BucketBias, MaskRule, RotarySpec, ShawRelative

CPU = torch.device("cpu")
WAYS = ("fused", "explicit", "blockwise")


def altered(name: str, n_layers: int | None = None, **attention: object) -> Transformer:
    """A tiny model whose attention says something else."""
    spec = tiny.spec_of(tiny.config(name))
    attn, *rest = spec.decoder.layers[0].branches
    body = replace(spec.decoder.layers[0].attention, **attention)  # type: ignore[arg-type]
    block = replace(spec.decoder.layers[0], branches=(replace(attn, body=body), *rest))
    layers = (block,) * (n_layers or spec.n_layers)
    model = Transformer(replace(spec, decoder=replace(spec.decoder, layers=layers)))
    tiny.scale_randomly(model, norm_mean=1.0)
    return model.eval()


@pytest.mark.parametrize("how", WAYS)
@torch.no_grad()
def test_without_positions_and_mask_order_does_not_matter(how: str) -> None:
    """Permuting the tokens permutes what comes out, and nothing else; positions or a mask break that."""
    ids, order = tiny.ids(2, 17), torch.randperm(17, generator=torch.Generator().manual_seed(3))
    for changes, commutes in (
        ({"rotary": None, "mask": MaskRule(causal=False)}, True),
        ({"rotary": None}, False),
        ({"mask": MaskRule(causal=False)}, False),
    ):
        model = altered("llama", **changes)
        model.attention = how  # type: ignore[assignment]
        apart = float((model(ids[:, order]) - model(ids)[:, order]).abs().max())
        assert (apart <= 1e-4) if commutes else (apart > 1e-1)


@pytest.mark.parametrize("interleaved", [False, True])
@torch.no_grad()
def test_far_away_scores_are_near_ones(interleaved: bool) -> None:
    """A text that starts at position 30,000 is read as one that starts at 0: only distances count."""
    model = altered("llama", rotary=RotarySpec(10_000.0, 8, interleaved=interleaved))
    ids, near = tiny.ids(1, 24), torch.arange(24)[None]
    at_start = model(ids, near)
    for start in (7, 1000, 30_000):
        # Angles are fp32: at position p they carry p · 6e-8 radians of rounding.
        assert float((model(ids, near + start) - at_start).abs().max()) <= 1e-4 + start * 1e-6
    stretched = model(ids, near * 2)
    assert float((stretched - at_start).abs().max()) > 0.1


POSITIONS = {
    "shaw": {"relative": ShawRelative(3)},
    "shaw keys": {"relative": ShawRelative(2, values=False)},
    "buckets": {"bias": BucketBias(8, 16)},
    "alibi": {"bias": AlibiBias("interleave")},
    "alibi of Falcon": {"bias": AlibiBias(half=True, scaled=True)},
    "none": {},
}


@pytest.mark.parametrize("kind", POSITIONS)
@torch.no_grad()
def test_positions_in_a_cache(kind: str) -> None:
    """Whole, in parts and in single steps, with rows that stand elsewhere, each way of attention: one thing."""
    model = altered("llama", rotary=None, **POSITIONS[kind])
    ids, start = tiny.ids(2, 20), torch.tensor([[0], [9]])
    positions = start + torch.arange(20)
    whole = model(ids, positions)
    for how in WAYS:
        model.attention = how  # type: ignore[assignment]
        assert float((model(ids, positions) - whole).abs().max()) <= 1e-4
        for sizes in ([1] * 20, [7, 8, 5], [13, 1, 6]):
            cache = model.new_cache(batch=2, capacity=4)
            parts = [
                model(*part, cache=cache) for part in zip(ids.split(sizes, 1), positions.split(sizes, 1), strict=True)
            ]
            assert float((torch.cat(parts, 1) - whole).abs().max()) <= 1e-4
    # Distance is all that any of these sees, but for what Falcon's rounding makes of a place in the text.
    moved = float((model(ids, positions + 1000) - whole).abs().max())
    assert moved <= 1e-4 or kind == "alibi of Falcon"


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_layers_chain_hops(n_layers: int, how: str) -> None:
    """With a window of w a layer reaches w − 1 tokens back, a stack of n layers n (w − 1); beyond, exactly nothing."""
    window, n = 4, 16
    model = altered("llama", n_layers, mask=MaskRule(window=window))
    model.attention = how  # type: ignore[assignment]
    ids = torch.arange(5, 5 + n)[None]  # all different, so that a row of the table is a place in the text
    for last in (n - 1, 5):
        model.zero_grad()
        model.hidden(ids)[0, last].sum().backward()
        assert model.embed.tokens.grad is not None
        pull = model.embed.tokens.grad[ids[0]].abs().amax(-1)
        reach = n_layers * (window - 1)
        for place in range(n):
            if last - reach <= place <= last:
                assert pull[place] > 1e-6, place
            else:
                assert pull[place] == 0, place


@torch.no_grad()
def test_one_layer_cannot_hop() -> None:
    """The same by changing a token: two hops away, one layer's output does not move by a bit, two layers' does."""
    ids = tiny.ids(1, 12)
    other = ids.clone()
    other[0, 2] = (other[0, 2] + 5) % 60
    for n_layers, moved in ((1, False), (2, True)):
        model = altered("llama", n_layers, mask=MaskRule(window=4))
        apart = (model(other) - model(ids))[0].abs().amax(-1)
        assert bool(apart[2:6].gt(0).all())
        assert bool(apart[6] > 0) is moved
        assert bool((apart[9:] == 0).all())


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_no_pull_from_the_future(name: str) -> None:
    """Exactly zero gradient from every later token, whatever the family."""
    ids = torch.arange(5, 25)[None]
    for how in WAYS:
        model = tiny.transformer(name)
        model.attention = how  # type: ignore[assignment]
        model.hidden(ids)[0, :9].square().sum().backward()
        assert model.embed.tokens.grad is not None
        pull = model.embed.tokens.grad[ids[0]].abs().amax(-1)
        assert bool((pull[9:] == 0).all()), how
        assert bool((pull[:9] > 0).all()), how


@pytest.mark.parametrize("way", [attend, fused, explicit, blockwise])
@pytest.mark.parametrize("rule", [MaskRule(), MaskRule(window=3), MaskRule(causal=False, chunk=4)])
def test_what_is_masked_has_no_weight_and_no_pull(rule: MaskRule, way) -> None:  # type: ignore[no-untyped-def]
    """Not even an infinite-looking key or value behind the mask moves a query."""
    spec, n = AttentionSpec(2, 1, 4, mask=rule), 9
    positions = torch.arange(n)[None]
    plan = plan_mask(rule, positions, positions, None, None, CPU)
    mask = plan.piece(0, n)[0, 0]
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, n, 4, generator=generator) for heads in (2, 1, 1))
    for query in (0, 4, 8):
        hidden = ~mask[query]
        keys, values = k.clone().requires_grad_(), v.clone().requires_grad_()
        way(q, keys, values, Attending(spec, plan))[0, :, query].sum().backward()
        for grad in (keys.grad, values.grad):
            assert grad is not None
            assert bool((grad[0, 0, hidden] == 0).all())
        assert bool((values.grad[0, 0, ~hidden] != 0).all())  # type: ignore[index]
        loud, large = k.clone(), v.clone()
        loud[0, 0, hidden], large[0, 0, hidden] = 1e4, 1e30
        with torch.no_grad():
            before, after = (way(q, *pair, Attending(spec, plan))[0, :, query] for pair in ((k, v), (loud, large)))
        assert torch.equal(before, after)


def backwards(model: Transformer, ids: Tensor, positions: Tensor, segments: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits of what is no pad, and every gradient of a sum that weighs them differently."""
    model.zero_grad()
    logits = torch.where(positions[..., None] >= 0, model(ids, positions, segments), 0.0)
    weighing = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5)) / 10
    (logits * weighing).sum().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_block_by_block_is_explicit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards and backwards, over blocks of 5 keys and slices of queries, with pads and packed documents."""
    from cutaway.modules import attend as attend_module

    model, ids = tiny.transformer(name), tiny.ids(3, 20)
    positions = torch.arange(20).expand(3, -1).clone()
    positions[1, :6], positions[1, 6:] = -1, torch.arange(14)
    positions[2] = torch.cat([torch.arange(8), torch.arange(12)])
    segments = torch.zeros(3, 20, dtype=torch.long)
    segments[2, 8:] = 1
    model.attention = "explicit"
    wanted, wanted_back = backwards(model, ids, positions, segments)
    monkeypatch.setattr(attend_module, "KEY_BLOCK", 5)
    monkeypatch.setattr(attend_module, "LARGEST_MASK", 400)
    model.attention = "blockwise"
    got, got_back = backwards(model, ids, positions, segments)
    assert float((got - wanted).abs().max()) <= 1e-4
    assert len(got_back) == len(wanted_back)
    # A gradient that is rounding alone (a key bias moves all scores of a query alike) counts by the usual size.
    usual = torch.stack([grad.norm() for grad in wanted_back]).median()
    for one, two in zip(got_back, wanted_back, strict=True):
        assert float((one - two).norm() / torch.maximum(two.norm(), usual / 100)) <= 1e-4
