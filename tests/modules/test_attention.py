"""Attention: its ways, who may read whom, and what it costs for a long text."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
from tests.reference import tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cutaway.cache import MaskKind, MaskPlan, allowed, new_cache
from cutaway.cache import mask as mask_module
from cutaway.cache.mask import plan_mask
from cutaway.models import Transformer
from cutaway.modules.attend import attend, blockwise, explicit
from cutaway.modules.bias import ScoreBias, alibi_slopes, buckets
from cutaway.modules.score import Attending
from cutaway.modules.steady import steady
from cutaway.modules.tap import Tap
from cutaway.spec import AlibiBias, AttentionSpec, BucketBias, MaskRule, ShawRelative

CPU = torch.device("cpu")


def positions_of(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def plan_of(rule: MaskRule, queries: Tensor, keys: Tensor | None = None, segments: Tensor | None = None) -> MaskPlan:
    return plan_mask(rule, queries, queries if keys is None else keys, segments, segments, CPU)


def random_heads(batch: int, n: int, spec: AttentionSpec, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, n, spec.d_head) for heads in (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def attending(spec: AttentionSpec, plan: MaskPlan) -> Attending:
    """With numbers for whatever the spec's positions learn."""
    generator = torch.Generator().manual_seed(5)
    out = Attending(spec, plan)
    if spec.bias is not None:
        bias = ScoreBias(spec.bias, spec.n_heads)
        if bias.weight is not None:
            torch.nn.init.normal_(bias.weight, generator=generator)
        out.table = bias.table(CPU).detach()
    if spec.relative is not None:
        rows = 2 * spec.relative.max_distance + 1
        out.near_keys = torch.randn(rows, spec.d_head, generator=generator)
        out.near_values = torch.randn(rows, spec.d_head, generator=generator) if spec.relative.values else None
    return out


def by_hand(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, mask: Tensor, at: Tensor) -> Tensor:
    """One query and head at a time, in double precision."""
    more = attending(spec, plan_of(spec.mask, at))
    z = torch.zeros(q.shape, dtype=torch.double)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        source = h // (spec.n_heads // spec.n_kv_heads)
        keys = [j for j in range(k.shape[2]) if mask[b, 0, i, j]]
        if not keys:
            continue
        far = at[b, keys] - at[b, i]
        k_near, v_near = k[b, source, keys].double(), v[b, source, keys].double()
        if spec.relative is not None:
            near = far.clamp(-spec.relative.max_distance, spec.relative.max_distance) + spec.relative.max_distance
            k_near = k_near + more.near_keys[near].double()
            v_near = v_near + (0 if more.near_values is None else more.near_values[near].double())
        scores = (k_near @ q[b, h, i].double()) * spec.score_scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        match spec.bias:
            case AlibiBias():
                slope = alibi_slopes(spec.n_heads, spec.bias)[h].double()
                scores = scores + slope * far * (spec.score_scale if spec.bias.scaled else 1.0)
            case BucketBias():
                scores = scores + more.table[buckets(far, spec.bias), h].double()
        weights = torch.exp(scores - scores.max())
        z[b, h, i] = (weights / weights.sum()) @ v_near
    return z.float()


# ---- what is computed ------------------------------------------------------------------------------------


def test_worked_softmax() -> None:
    """Four keys whose scores are 4, 22, 36 and 30, with and without the root of the width."""
    case = tiny.WORKED["softmax"]
    k = torch.zeros(1, 1, 4, 4)
    k[..., 0] = torch.tensor(case["scores"], dtype=torch.float32)
    v = torch.eye(4).view(1, 1, 4, 4)  # so that what comes out are the weights
    q = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    plan = plan_of(MaskRule(), positions_of([3]), positions_of([0, 1, 2, 3]))
    for scale, key, within in ((1.0, "weights", 1e-6), (64**-0.5, "weights_over_sqrt_64", 1e-4)):
        spec = AttentionSpec(1, 1, 4, scale=scale)
        for z in (way(q, k, v, attending(spec, plan)) for way in WAYS):
            assert z.flatten().tolist() == pytest.approx(case[key], abs=within)


def test_worked_scores() -> None:
    """Of 32 heads and 4,096 tokens, at two bytes: a pass of that size, on a device that holds no numbers."""
    case = tiny.WORKED["scores"]
    n, shape = case["n"], (1, 32, case["n"], 128)
    q, k, v = (torch.empty(shape, dtype=torch.half, device="meta") for _ in range(3))
    at = torch.arange(n, device="meta")[None]
    spec = AttentionSpec(32, 32, 128)
    seen: dict[str, Tensor] = {}

    class Keep:
        def begin(self, positions: Tensor, of_source: bool = False) -> None:
            pass

        def at(self, scope: str) -> Keep:
            return self

        def wants(self, name: str) -> bool:
            return True

        def __call__(self, name: str, value: Tensor) -> Tensor:
            seen[name] = value
            return value

    explicit(q, k, v, Attending(spec, MaskPlan(MaskKind.CAUSAL, spec.mask, at, at)), Keep())
    for name in ("scores", "weights"):
        assert seen[name].shape == (1, 32, n, n)
        assert seen[name][0, 0].numel() == case["per_head"]
        assert seen[name].numel() == case["heads_32"]
        assert seen[name].nbytes == case["GiB_at_2_bytes"] * 2**30


@pytest.mark.parametrize("bias", [None, AlibiBias()])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("pads", [False, True])
def test_weights_laid_over_scores_are_the_same(bias: AlibiBias | None, cap: float | None, pads: bool) -> None:
    """Where nobody has the scores their memory is used again; where somebody has, they stay what they were."""
    spec = AttentionSpec(4, 2, 8, MaskRule(), bias=bias, soft_cap=cap)
    q, k, v = random_heads(2, 9, spec)
    rows = [[*range(9)], [*range(6), -1, -1, -1] if pads else [*range(9)]]
    a = attending(spec, plan_of(spec.mask, positions_of(*rows)))

    class Keep(Tap):
        def __init__(self, *names: str) -> None:
            self.names, self.kept = names, dict[str, Tensor]()

        def wants(self, name: str) -> bool:
            return name in self.names

        def __call__(self, name: str, value: Tensor) -> Tensor:
            self.kept[name] = value
            return value

    both, one = Keep("scores", "weights"), Keep("weights")
    slow = explicit(q.requires_grad_(), k, v, a).detach()  # gradients are wanted: nothing is written over
    with torch.no_grad():
        found = [explicit(q, k, v, a, tap) for tap in (both, one, None)]
    assert all(torch.equal(z, slow) for z in found)
    assert torch.equal(both.kept["weights"], one.kept["weights"])
    mask = a.plan.piece(0, 9).expand_as(both.kept["scores"])
    assert torch.equal(both.kept["scores"].isinf(), ~mask)
    real = mask.any(-1)
    assert torch.equal(both.kept["scores"].softmax(-1)[real], both.kept["weights"][real])


WAYS = (attend, explicit, blockwise, steady)
SPECS = {
    "plain": AttentionSpec(4, 4, 8),
    "grouped": AttentionSpec(4, 2, 8),
    "one key head": AttentionSpec(4, 1, 8, scale=0.2),
    "window": AttentionSpec(4, 2, 8, mask=MaskRule(window=5)),
    "both ways": AttentionSpec(4, 2, 8, mask=MaskRule(causal=False)),
    "window both ways": AttentionSpec(4, 2, 8, mask=MaskRule(causal=False, window=4)),
    "capped": AttentionSpec(4, 2, 8, soft_cap=1.5),
    "capped window": AttentionSpec(4, 2, 8, soft_cap=1.5, mask=MaskRule(window=5)),
    "chunked": AttentionSpec(4, 2, 8, mask=MaskRule(chunk=4)),
    "alibi": AttentionSpec(4, 2, 8, bias=AlibiBias()),
    "alibi of three heads, scaled": AttentionSpec(3, 3, 8, bias=AlibiBias("interleave", scaled=True)),
    "buckets": AttentionSpec(4, 2, 8, bias=BucketBias(8, 16)),
    "buckets both ways": AttentionSpec(4, 2, 8, mask=MaskRule(causal=False), bias=BucketBias(8, 16, both_ways=True)),
    "shaw": AttentionSpec(4, 2, 8, relative=ShawRelative(3)),
    "shaw keys": AttentionSpec(4, 2, 8, mask=MaskRule(causal=False), relative=ShawRelative(2, values=False)),
}
ROWS = {
    "whole": positions_of([*range(12)], [*range(12)]),
    "later": positions_of([*range(5, 17)], [*range(12)]),
    "padded": positions_of([-1, -1, -1, *range(9)], [*range(7), -1, -1, -1, -1, -1]),
    "pads only": positions_of([-1] * 12, [*range(12)]),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", SPECS)
def test_definition(name: str, rows: str) -> None:
    """Every way and by hand are one thing; a pad gets zero."""
    spec, positions = SPECS[name], ROWS[rows]
    q, k, v = random_heads(2, 12, spec)
    plan = plan_of(spec.mask, positions)
    wanted = by_hand(q, k, v, spec, allowed(spec.mask, positions, positions), positions)
    for z in (way(q, k, v, attending(spec, plan)) for way in WAYS):
        torch.testing.assert_close(z, wanted, atol=2e-6, rtol=1e-5)
        assert bool((z.transpose(1, 2)[positions < 0] == 0).all())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SPECS)
def test_a_pad_has_no_gradient(name: str, way) -> None:  # type: ignore[no-untyped-def]
    """Neither NaN nor any pull from a query that reads nothing, nor on a key that nobody reads."""
    spec, positions = SPECS[name], ROWS["padded"]
    heads = [x.requires_grad_() for x in random_heads(2, 12, spec)]
    way(*heads, attending(spec, plan_of(spec.mask, positions))).sum().backward()
    for x in heads:
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())
        assert bool((x.grad.transpose(1, 2)[positions < 0] == 0).all())
    assert bool((heads[2].grad.transpose(1, 2)[positions >= 0] != 0).any())


@pytest.mark.parametrize("way", [attend, blockwise])
@pytest.mark.parametrize("name", SPECS)
def test_in_pieces(name: str, way, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass too long for a whole mask is cut, and nothing changes."""
    from cutaway.modules import attend as attend_module

    spec, positions = SPECS[name], ROWS["padded"]
    heads = [x.requires_grad_() for x in random_heads(2, 12, spec)]
    whole = way(*heads, attending(spec, plan_of(spec.mask, positions)))
    wanted = torch.autograd.grad(whole.square().sum(), heads)
    for largest in (1, 30, 100):
        monkeypatch.setattr(mask_module, "LARGEST_MASK", largest)
        monkeypatch.setattr(attend_module, "LARGEST_MASK", largest)
        monkeypatch.setattr(attend_module, "KEY_BLOCK", 5)
        plan = plan_of(spec.mask, positions)
        assert plan.mask is None
        pieces = way(*heads, attending(spec, plan))
        torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=1e-5)
        got = torch.autograd.grad(pieces.square().sum(), heads)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


# ---- who may read whom -----------------------------------------------------------------------------------


def test_mask_by_rule() -> None:
    positions = positions_of([0, 1, 2, 3, -1])
    causal = allowed(MaskRule(), positions, positions)[0, 0]
    assert causal.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [0] * 5]
    window = allowed(MaskRule(window=2), positions, positions)[0, 0]
    assert window.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0] * 5]
    near = allowed(MaskRule(causal=False, window=2), positions, positions)[0, 0]
    assert near.int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 0], [0] * 5]
    segments = positions_of([0, 0, 1, 1, 1])
    apart = allowed(MaskRule(), positions, positions, segments, segments)[0, 0]
    assert apart.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0] * 5]


ALL, LAST = list(range(6)), [5]


@pytest.mark.parametrize(
    ("kind", "rule", "queries", "keys", "segments"),
    [
        ("causal", MaskRule(), ALL, ALL, None),
        ("causal", MaskRule(window=6), ALL, ALL, None),
        ("rule", MaskRule(window=5), ALL, ALL, None),
        ("full", MaskRule(causal=False), ALL, ALL, None),
        ("full", MaskRule(causal=False, window=6), ALL, ALL, None),
        ("rule", MaskRule(causal=False, window=5), ALL, ALL, None),
        ("full", MaskRule(), LAST, ALL, None),
        ("full", MaskRule(window=6), LAST, ALL, None),
        ("rule", MaskRule(window=5), LAST, ALL, None),
        ("full", MaskRule(), LAST, [5, 0, 3], None),  # a ring's slots stand in any order
        ("rule", MaskRule(), [3, 4, 5], ALL, None),  # a later part: not aligned at the top left
        ("rule", MaskRule(), [0, 2, 1], [0, 2, 1], None),
        ("rule", MaskRule(), [-1, 0, 1], [-1, 0, 1], None),
        ("rule", MaskRule(), LAST, [0, 1, -1, 5], None),
        ("rule", MaskRule(), ALL, ALL, [0, 0, 0, 1, 1, 1]),
        ("rule", MaskRule(causal=False), [-1, 0], [-1, 0], None),
    ],
)
def test_short_cuts(kind: str, rule: MaskRule, queries: list[int], keys: list[int], segments: list[int] | None) -> None:
    """FULL and CAUSAL are taken where they mean what the rule means, and only there."""
    q, k = positions_of(queries), positions_of(keys)
    marks = None if segments is None else positions_of(segments)
    plan = plan_mask(rule, q, k, marks, marks, CPU)
    assert plan.kind is MaskKind(kind)
    mask = allowed(rule, q, k, marks, marks)[0, 0]
    if plan.kind is MaskKind.FULL:
        assert bool(mask.all())
    if plan.kind is MaskKind.CAUSAL:
        assert torch.equal(mask, torch.ones_like(mask).tril())


def test_short_cuts_hold_for_every_row() -> None:
    ragged = positions_of([2, 3, 4], [0, 1, 2])
    assert plan_of(MaskRule(), ragged).kind is MaskKind.RULE
    assert plan_of(MaskRule(), positions_of([0, 1, 2], [0, 1, 2])).kind is MaskKind.CAUSAL
    one_step = plan_of(MaskRule(), positions_of([5], [3]), positions_of([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, -1, -1]))
    assert one_step.kind is MaskKind.RULE


def test_kinds_on_the_way_through_a_cache() -> None:
    """Prompt causal, single steps full, a later part by rule; a ring by rule once it holds more than a window."""
    model = tiny.transformer("gemma3")  # windows of 8 around a global layer
    cache = model.new_cache(capacity=64)
    seen = []
    with torch.no_grad():
        for part in tiny.ids(1, 20).split([6, 1, 4, 1, 8], 1):
            model(part, cache=cache)
            seen.append([cache.layer(i).plan.kind.value for i in (0, 1)])
    assert seen == [["causal", "causal"], ["full", "full"], ["rule", "rule"], ["rule", "full"], ["rule", "rule"]]


# ---- heads -----------------------------------------------------------------------------------------------


class Watch:
    """Notes what it is asked for under full names; may put something else in its place."""

    def __init__(self, edits: dict[str, Tensor] | None = None, scope: str = "", seen: dict[str, Tensor] | None = None):
        self.edits = edits or {}
        self.scope = scope
        self.seen = {} if seen is None else seen

    def begin(self, positions: Tensor, of_source: bool = False) -> None:
        pass

    def at(self, scope: str) -> Tap:
        return Watch(self.edits, f"{self.scope}{scope}.", self.seen)

    def wants(self, name: str) -> bool:
        return True

    def __call__(self, name: str, value: Tensor) -> Tensor:
        self.seen[self.scope + name] = value
        return self.edits.get(self.scope + name, value)


@torch.no_grad()
def test_grouped_heads() -> None:
    """Case I06: query head h reads key/value head h // 2, repeated each, not in turns."""
    model, ids, at = tiny.transformer("llama"), tiny.ids(2, 7), "decoder.layers.0.attn."
    plain = Watch()
    watched = model(ids, tap=plain)
    assert plain.seen[at + "weights"].shape == (2, 4, 7, 7)
    assert plain.seen[at + "k"].shape == plain.seen[at + "v"].shape == (2, 7, 2, 8)
    assert plain.seen[at + "q"].shape == plain.seen[at + "z"].shape == (2, 7, 4, 8)
    torch.testing.assert_close(watched, model(ids), atol=1e-5, rtol=0)
    for name in ("k", "v"):
        other = plain.seen[at + name].clone()
        other[:, :, 1] += 1
        patched = Watch({at + name: other})
        model(ids, tap=patched)
        same = [torch.equal(patched.seen[at + "z"][:, :, h], plain.seen[at + "z"][:, :, h]) for h in range(4)]
        # A shift of every key alike does not change a softmax by itself, but rotation makes it one that does.
        assert same == [True, True, False, False], name


@pytest.mark.parametrize("name", tiny.FAMILIES)
@torch.no_grad()
def test_names_mean_what_they_say(name: str) -> None:
    """Heads add up to the body, weights to one, and each branch's resid is the sum that the next one reads."""
    model, ids = tiny.transformer(name), tiny.ids(2, 11)
    watch = Watch()
    logits = model(ids, tap=watch)
    torch.testing.assert_close(logits, model(ids), atol=5e-5, rtol=0)
    seen = watch.seen
    before = seen["embed.out"]
    for i, layer in enumerate(model.decoder.layers):
        at = f"decoder.layers.{i}."
        bias = layer.branches["attn"].body.out.bias
        total = seen[at + "attn.head_out"].sum(2) + (0 if bias is None else bias)
        torch.testing.assert_close(total, seen[at + "attn.body"], atol=1e-5, rtol=1e-5)
        weights, scores = seen[at + "attn.weights"], seen[at + "attn.scores"]
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
        assert torch.equal(weights == 0, scores == float("-inf"))
        torch.testing.assert_close(seen[at + "resid_in"] + seen[at + "attn.out"], seen[at + "attn.resid"])
        last = at + model.spec.decoder.layers[i].branches[-1].name
        torch.testing.assert_close(seen[at + "attn.resid"] + seen[last + ".out"], seen[last + ".resid"])
        if i:
            assert torch.equal(seen[at + "resid_in"], before)
        before = seen[last + ".resid"]
    assert torch.equal(seen["logits"], logits)


# ---- cost ------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the most numbers that any operation's result has."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("through", ["no cache", "cache", "ring"])
@pytest.mark.parametrize("kind", ["causal", "window", "padded", "capped"])
@torch.no_grad()
def test_no_square_for_a_long_text(kind: str, through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation's result has a number for each pair of tokens, whatever the mask."""
    from cutaway.modules import attend as attend_module

    for module in (mask_module, attend_module):
        monkeypatch.setattr(module, "LARGEST_MASK", 1 << 16)
    n = 2000
    values = {**tiny.config("llama"), "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8}
    spec = tiny.spec_of(values)
    attn, mlp = spec.decoder.layers[0].branches
    body = replace(
        attn.body,
        mask=MaskRule(window=30 if kind == "window" or through == "ring" else None),
        soft_cap=5.0 if kind == "capped" else None,
    )
    block = replace(spec.decoder.layers[0], branches=(replace(attn, body=body), mlp))
    model = Transformer(replace(spec, decoder=replace(spec.decoder, layers=(block,))))
    tiny.scale_randomly(model, norm_mean=1.0)
    ids, positions = tiny.ids(1, n), torch.arange(n)[None]
    if kind == "padded":
        positions = torch.cat([torch.full((1, 9), -1), positions[:, :-9]], 1)
    cache = None if through == "no cache" else model.new_cache(sliding=through == "ring")
    with Largest() as largest:
        for part in (slice(0, 700), slice(700, n)):
            model(ids[:, part], positions[:, part], cache=cache)
    assert largest.numel <= max(2 * (1 << 16) + 4 * n, n * 64)  # 64 is the vocabulary


@pytest.mark.slow
def test_memory_for_a_long_text() -> None:
    """The same, measured: 20,000 tokens, whose pairs would take 400 MB even as booleans."""
    program = """
        import resource, torch
        from cutaway.models import Transformer
        from cutaway.spec import *
        torch.set_num_threads(1)
        norm, attention = NormSpec("rms", 1e-6), AttentionSpec(1, 1, 4, mask=MaskRule(window=512))
        block = BlockSpec((BranchSpec("attn", attention, norm), BranchSpec("mlp", MlpSpec(4, "silu"), norm)))
        model = Transformer(ModelSpec("x", 8, 4, 10**6, EmbeddingSpec(), StackSpec((block,)), HeadSpec(True)))
        for p in model.parameters():
            torch.nn.init.normal_(p)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with torch.no_grad():
            assert model(torch.zeros(1, 20_000, dtype=torch.long)).isfinite().all()
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 200


def test_decode_reads_what_is_filled() -> None:
    """Not the capacity."""
    model: Transformer = tiny.transformer("llama")
    cache = new_cache(model.spec.decoder, capacity=4096)
    with torch.no_grad():
        model(tiny.ids(1, 10), cache=cache)
        model(tiny.ids(1, 1), cache=cache)
    view = cache.layer(0)
    keys, _ = view.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
    assert keys.shape[2] == 11


def test_attention_follows_its_own_scale() -> None:
    spec = AttentionSpec(2, 2, 16)
    assert spec.score_scale == 0.25
    assert replace(spec, scale=0.5).score_scale == 0.5
