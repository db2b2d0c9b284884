"""Every name is there, in every family, and means what the map says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cutaway.cache import allowed, build
from cutaway.inspection import Recorder, Trace, trace
from cutaway.models import Transformer
from cutaway.modules.activation import ACTIVATIONS
from cutaway.modules.bias import alibi_slopes
from cutaway.modules.norm import Norm
from cutaway.modules.rotary import speeds
from cutaway.spec import AlibiBias, AttentionSpec, MlpSpec, MoeSpec
from cutaway.spec.names import axis_sizes, tap_names
from tests.reference import tiny

# Besides one of each family: biases, one key/value head, an untied head, a window in all layers but one.
CASES = (*tiny.FAMILIES, "llama-biases", "llama-mqa", "qwen2-sliding", "granite-biases", "gpt2-untied")
PROMPT, MORE = 14, 6  # the windows are of 8
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
WATCHED = 5e-5  # what the fused and the explicit attention differ by, measured at 1.8e-05 for logits of about ±15


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest) -> Transformer:
    return tiny.transformer(request.param)


@pytest.fixture(scope="module")
def seen(model: Transformer) -> Trace:
    """Everything, of two texts, in one plain pass."""
    return trace(model, tiny.ids(2, PROMPT).tolist(), ("*",))


@pytest.fixture(scope="module")
def cached(model: Transformer) -> Trace:
    """Everything, through a prompt and steps with a cache. A ring, were one used, would have gone round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SLACK", 2)
        return trace(model, tiny.ids(2, PROMPT).tolist(), ("*",), max_tokens=MORE)


@torch.no_grad()
def run(model: Transformer, ids: list[list[int]], tap: Any = None) -> Tensor:
    return model(torch.tensor(ids), tap=tap)


def close(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a.isinf(), b.isinf())
    torch.testing.assert_close(a, b, **CLOSE)


def worst(a: Tensor, b: Tensor) -> float:
    return float(torch.where(a == b, 0.0, (a - b).abs()).max())  # −inf is −inf


def branches(model: Transformer) -> list[tuple[str, Any, Any]]:
    """(name, module, what it reads) of every branch, in order."""
    found = []
    for i, layer in enumerate(model.decoder.layers):
        source = f"decoder.layers.{i}.resid_in"
        stream = source
        for name, branch in layer.branches.items():
            at = f"decoder.layers.{i}.{name}"
            found.append((at, branch, source if layer.spec.parallel else stream))
            stream = f"{at}.resid"
    return found


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────


def sizes_hold(model: Transformer, found: Trace, batch: int, query: int) -> None:
    assert list(found) == list(tap_names(model.spec))
    for name, axes in tap_names(model.spec).items():
        known = {**axis_sizes(model.spec, name), "batch": batch, "query": query, "key": query}
        assert found.axes[name] == axes
        assert tuple(found[name].shape) == tuple(known[word] for word in axes), name
        assert found[name].dtype == torch.float32


def test_every_name_is_recorded_with_its_axes(model: Transformer, seen: Trace, cached: Trace) -> None:
    sizes_hold(model, seen, 2, PROMPT)
    sizes_hold(model, cached, 2, PROMPT + MORE)
    assert [len(row) for row in cached.tokens] == [PROMPT + MORE] * 2


def test_every_name_is_seen_once_in_a_plain_pass(model: Transformer) -> None:
    """Without a cache too, and alone: a name must not depend on what else is watched."""
    ids = tiny.ids(1, PROMPT).tolist()
    names = list(tap_names(model.spec))
    whole = Recorder(names)
    run(model, ids, whole)
    for name in names:
        assert len(whole.kept[name]) == 1
    for name in names if "gemma3" in model.spec.family else names[:: len(names) // 7]:
        alone = Recorder([name])
        run(model, ids, alone)
        assert len(alone.kept[name]) == 1, name
        assert worst(alone.kept[name][0], whole.kept[name][0]) <= WATCHED


# ── what they mean ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_embedding(model: Transformer, seen: Trace) -> None:
    table = model.embed.tokens[torch.tensor(seen.tokens)] * model.spec.embedding.scale
    close(seen["embed.tokens"], table.detach())
    total = seen["embed.tokens"] + (seen.get("embed.positions", 0))
    norm = model.embed.norm
    if norm is None:
        assert torch.equal(total, seen["embed.out"])
    else:
        close(norm(total).detach(), seen["embed.out"])
        spread = total.var(-1, correction=0, keepdim=True) + norm.spec.eps
        close(spread.rsqrt(), seen["embed.norm_scale"])


def test_the_stream_is_handed_on(model: Transformer, seen: Trace) -> None:
    """``resid`` is what the next reader gets, and without a post-norm the sum of what was there and ``out``."""
    stream = seen["embed.out"]
    for i, layer in enumerate(model.decoder.layers):
        assert torch.equal(seen[f"decoder.layers.{i}.resid_in"], stream)
        for name, branch in layer.branches.items():
            at = f"decoder.layers.{i}.{name}"
            assert isinstance(branch.post_norm, torch.nn.Identity)
            assert torch.equal(seen[f"{at}.resid"], stream + seen[f"{at}.out"])
            stream = seen[f"{at}.resid"]
    close(seen["decoder.norm.out"], model.decoder.norm(stream).detach())
    parts = sum(seen[f"{at}.out"] for at, _, _ in branches(model)) + seen["embed.out"]
    close(parts, stream)


def test_norms(model: Transformer, seen: Trace) -> None:
    places = [(f"{at}.norm_scale", branch.pre_norm, source, f"{at}.in") for at, branch, source in branches(model)]
    last = branches(model)[-1][0]
    places.append(("decoder.norm.norm_scale", model.decoder.norm, f"{last}.resid", "decoder.norm.out"))
    for scale, norm, source, out in places:
        if not isinstance(norm, Norm):  # a branch that reads what the first one's norm gave, or the stream as it is
            layers = model.spec.decoder.layers
            first = seen[places[places.index((scale, norm, source, out)) - 1][3]]
            assert torch.equal(seen[out], first if layers[0].shared_norm else seen[source])
            continue
        x = seen[source]
        if norm.spec.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        y = x * seen[scale] * (norm.weight + norm.spec.offset)
        close((y if norm.bias is None else y + norm.bias).detach(), seen[out])


def test_what_a_branch_adds(model: Transformer, seen: Trace) -> None:
    for at, branch, _ in branches(model):
        close((branch.out_norm(seen[f"{at}.body"]) * branch.spec.scale).detach(), seen[f"{at}.out"])


def test_attention(model: Transformer, seen: Trace) -> None:
    """From q, k and v to the body by the definition, head by head."""
    positions = torch.arange(PROMPT).expand(2, -1)
    for at, branch, _ in branches(model):
        spec = branch.spec.body
        if not isinstance(spec, AttentionSpec):
            continue
        get = lambda name, at=at: seen[f"{at}.{name}"]  # noqa: E731
        x = get("in")
        most = float("inf") if spec.clip is None else spec.clip
        raw = branch.body.q(x).clamp(-most, most)
        raw = raw.unflatten(-1, (-1, spec.d_head)) if spec.qk_norm_over == "head" else raw  # the norm's last axis
        close(branch.body.q_norm(raw).detach().view_as(get("q")), get("q"))
        close(branch.body.v(x).clamp(-most, most).unflatten(-1, (spec.n_kv_heads, spec.d_head)).detach(), get("v"))
        q, k = (get("q_rot"), get("k_rot")) if spec.rotary else (get("q"), get("k"))
        if spec.rotary:  # a turn keeps lengths, and position 0 does not turn
            n, (_, magnitude) = spec.rotary.d_rotary, speeds(spec.rotary)  # LongRoPE and YaRN make them longer
            close(q[..., :n].norm(dim=-1), get("q")[..., :n].norm(dim=-1) * magnitude)
            close(k[:, 0, :, :n], get("k")[:, 0, :, :n] * magnitude)
            close(q[..., n:], get("q")[..., n:])
            close(k[..., n:], get("k")[..., n:])

        readers = torch.arange(spec.n_heads) // (spec.n_heads // spec.n_kv_heads)  # each query head's key/value head
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k[:, :, readers]) * spec.score_scale
        if spec.soft_cap:
            scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
        if isinstance(spec.bias, AlibiBias):
            slopes = alibi_slopes(spec.n_heads, spec.bias)[:, None, None]
            if spec.bias.half:  # only differences count, and these are rounded from the start of the text
                bias = (slopes.bfloat16() * positions[0]).float()
            else:
                bias = slopes * (positions[0] - positions[0][:, None])
            scores = scores + bias * (spec.score_scale if spec.bias.scaled else 1)
        mask = allowed(spec.mask, positions, positions).expand_as(scores)
        close(scores.masked_fill(~mask, float("-inf")), get("scores"))

        weights = get("weights")
        close(get("scores").softmax(-1), weights)
        assert (weights[~mask] == 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-6)
        close(torch.einsum("bhqk,bkhd->bqhd", weights, get("v")[:, :, readers]), get("z"))

        total = get("head_out").sum(2)
        bias = branch.body.out.bias
        close((total if bias is None else total + bias).detach(), get("body"))
        close(branch.body.out(get("z").flatten(-2)).detach(), get("body"))


def test_the_feed_forward_network(model: Transformer, seen: Trace) -> None:
    for at, branch, _ in branches(model):
        spec = branch.spec.body
        if not isinstance(spec, MlpSpec):
            continue
        curve = ACTIVATIONS[spec.activation]
        up = seen[f"{at}.up"]
        close(curve(seen[f"{at}.gate"]) * up if spec.gated else curve(up), seen[f"{at}.act"])
        close(branch.body.up(seen[f"{at}.in"]).detach(), up)
        close(branch.body.down(seen[f"{at}.act"]).detach(), seen[f"{at}.body"])


def test_experts(model: Transformer, seen: Trace) -> None:
    """Shares by the definition, the experts' own numbers, and their sum."""
    for at, branch, _ in branches(model):
        spec, body = branch.spec.body, branch.body
        if not isinstance(spec, MoeSpec):
            continue
        x, weights, experts = seen[f"{at}.in"], seen[f"{at}.router_weights"], seen[f"{at}.experts"]
        close(body.router(x).detach(), seen[f"{at}.router_logits"])
        assert bool(((weights > 0).sum(-1) == spec.top_k).all())
        shares = seen[f"{at}.router_logits"].softmax(-1) * (weights > 0)
        close(shares / shares.sum(-1, keepdim=True) if spec.normalised else shares, weights)
        curve, gate = ACTIVATIONS[spec.expert.activation], body.gate
        up = torch.einsum("bqm,efm->bqef", x, body.up)
        hidden = curve(up) if gate is None else curve(torch.einsum("bqm,efm->bqef", x, gate)) * up
        each = torch.einsum("bqef,emf->bqem", hidden, body.down) * weights[..., None]
        close(each.detach(), experts)
        close(experts.sum(2), seen[f"{at}.body"])


def test_contributions_add_up_to_the_logit(model: Transformer, seen: Trace) -> None:
    """Case I10: every part of the stream through the last norm, its scale held; then the cap, if there is one."""
    norm, head, spec = model.decoder.norm, model.head, model.spec.head
    matrix = model.embed.tokens if head.weight is None else head.weight
    total = torch.zeros_like(seen["logits"]) if norm.bias is None else norm.bias @ matrix.t()
    for part in (seen["embed.out"], *(seen[f"{at}.out"] for at, _, _ in branches(model))):
        even = part - part.mean(-1, keepdim=True) if norm.spec.kind == "layer" else part
        total = total + even * seen["decoder.norm.norm_scale"] * (norm.weight + norm.spec.offset) @ matrix.t()
    total = (total if head.bias is None else total + head.bias) * spec.scale
    logits = total if spec.soft_cap is None else spec.soft_cap * torch.tanh(total / spec.soft_cap)
    torch.testing.assert_close(logits.detach(), seen["logits"], rtol=0, atol=1e-4)


def test_logits_are_the_head_of_the_last_norm(model: Transformer, seen: Trace) -> None:
    assert torch.equal(model.unembed(seen["decoder.norm.out"]).detach(), seen["logits"])


# ── watching ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_watching_changes_nothing(model: Transformer, request: pytest.FixtureRequest) -> None:
    """Beyond what the fused and the explicit attention differ by; identity edits change not even that."""
    ids = tiny.ids(2, 40).tolist()
    names = list(tap_names(model.spec))
    plain = run(model, ids)
    tap = Recorder(names)
    watched = run(model, ids, tap)
    model.attention = "explicit"
    explicit = run(model, ids)
    model.attention = "fused"
    measured = worst(plain, watched), worst(plain, explicit)
    print(f"{request.node.callspec.id}: watched {measured[0]:.1e}, explicit {measured[1]:.1e}")
    assert max(measured) <= WATCHED

    same = Recorder(names, {name: [lambda value: value.clone()] for name in names})
    assert torch.equal(run(model, ids, same), watched)
    for name in names:
        assert torch.equal(same.kept[name][0], tap.kept[name][0]), name


def test_cached_steps_are_rows_of_one_plain_pass(
    model: Transformer, cached: Trace, request: pytest.FixtureRequest
) -> None:
    whole = Recorder(list(cached))
    run(model, cached.tokens, whole)
    most = 0.0
    for name, tensor in cached.items():
        (full,) = whole.kept[name]
        if "key" in cached.axes[name]:
            assert torch.equal(tensor.isinf(), full.isinf()), name
            assert torch.equal(tensor == 0, full == 0), name
        most = max(most, worst(tensor, full))
        torch.testing.assert_close(tensor, full, rtol=1e-4, atol=1e-4)
    print(f"{request.node.callspec.id}: cached {most:.1e}")
    # The greedy continuation is the one that generating finds.
    steps = cached["logits"][:, PROMPT - 1 : -1].argmax(-1)
    assert steps.tolist() == [row[PROMPT:] for row in cached.tokens]
