"""Experts: the definition, ties, edits, and what grouping tokens must not change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cutaway.checkpoints.quantised import encoded
from cutaway.formats.quantise import QUANTISED
from cutaway.formats.quants import BLOCK_TYPES
from cutaway.inspection import Recorder
from cutaway.kernels import Stored, library, multiply, stored_matrix, together
from cutaway.modules.activation import ACTIVATIONS
from cutaway.modules.moe import Moe, balance_loss, route
from cutaway.spec import MlpSpec, MoeSpec

GATED = MoeSpec(5, 2, MlpSpec(12, "silu", gated=True))
SPECS = {
    "gated": GATED,
    "plain": MoeSpec(5, 3, MlpSpec(12, "gelu"), normalised=False),
    "one": replace(GATED, top_k=1),
    "one of one": replace(GATED, n_experts=1, top_k=1),
    "all": replace(GATED, top_k=5),
}


def moe(spec: MoeSpec = GATED, d_model: int = 8, seed: int = 0) -> Moe:
    model, generator = Moe(spec, d_model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def stream(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, 8, generator=torch.Generator().manual_seed(seed))


def defined(model: Moe, x: Tensor) -> Tensor:
    """Token by token: Σ share · expert(token)."""
    spec, act = model.spec, ACTIVATIONS[model.spec.expert.activation]
    rows = []
    for token in x.flatten(0, 1):
        shares, chosen = (model.router.weight @ token).softmax(-1).topk(spec.top_k)
        if spec.normalised:
            shares = shares / shares.sum()
        row = torch.zeros_like(token)
        for share, e in zip(shares, chosen.tolist(), strict=True):
            up = model.up[e] @ token
            row = row + share * (model.down[e] @ (act(up) if model.gate is None else act(model.gate[e] @ token) * up))
        rows.append(row)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("name", SPECS)
def test_the_definition_and_its_gradients(name: str) -> None:
    model, x = moe(SPECS[name]), stream(3, 7).requires_grad_()
    weigh = stream(3, 7, seed=2)
    results = []
    for compute in (model, lambda y: defined(model, y)):
        model.zero_grad()
        x.grad = None
        out = compute(x)
        (out * weigh).sum().backward()
        results.append([out.detach(), x.grad, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_watched(name: str) -> None:
    """Rows of weights, experts that add up to the body, and nothing changed by looking."""
    model, x = moe(SPECS[name]), stream(2, 9)
    tap = Recorder(["router_logits", "router_weights", "experts"])
    out = model(x, tap)
    torch.testing.assert_close(out, model(x), rtol=0, atol=1e-6)
    (logits,), (weights,), (experts,) = tap.kept.values()
    assert torch.equal(logits, model.router(x))
    assert bool(((weights > 0).sum(-1) == model.spec.top_k).all())
    full = logits.softmax(-1)
    wanted = torch.where(weights > 0, full, 0.0)
    if model.spec.normalised:
        wanted = wanted / wanted.sum(-1, keepdim=True)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 9))
    torch.testing.assert_close(weights, wanted)
    left_out, taken = full.masked_fill(weights > 0, 0), full.masked_fill(weights == 0, 1)
    assert bool((left_out.amax(-1) <= taken.amin(-1)).all())
    assert torch.equal(experts.sum(2), out)
    assert torch.equal((experts != 0).any(-1), weights > 0)
    for one in ("router_logits", "router_weights", "experts"):  # the same whatever else is watched
        alone = Recorder([one])
        torch.testing.assert_close(model(x, alone), out, rtol=0, atol=1e-6)
        assert torch.equal(alone.kept[one][0], tap.kept[one][0])


@torch.no_grad()
def test_edited_weights_choose() -> None:
    """Off, on, negative, more than were chosen, or none."""
    model, x = moe(), stream(2, 4)
    plain = Recorder(["router_weights", "experts"])
    model(x, plain)
    each = Recorder(["experts"], {"router_weights": [torch.ones_like]})
    model(x, each)
    made = each.kept["experts"][0]  # of every expert, unweighted
    (weights,), (added,) = plain.kept.values()
    torch.testing.assert_close(added, made * weights[..., None])
    for factor in (
        torch.tensor([1.0, 0, 1, 1, 1]),
        torch.tensor([-1.0, 2, 1, 1, 1]),
        torch.zeros(5),
        torch.tensor([float("nan"), 1, 1, 1, 1]),
    ):
        edited = Recorder([], {"router_weights": [lambda value, factor=factor: value * factor]})
        wanted = (made * (weights * factor)[..., None]).sum(2)
        torch.testing.assert_close(model(x, edited), wanted, equal_nan=True, rtol=1e-5, atol=1e-6)
    third = torch.tensor([3])
    logits = Recorder(["router_weights"], {"router_logits": [lambda value: value.index_fill(-1, third, 99)]})
    model(x, logits)
    assert bool((logits.kept["router_weights"][0][..., 3] == 1).all())
    once = Recorder([], {"experts": [lambda value: value * 0]})
    assert bool((model(x, once) == 0).all())


@torch.no_grad()
def test_ties() -> None:
    """Equal logits: as many experts as always, each once, the same for every token and in any company."""
    model, x = moe(), stream(1, 6)
    model.router.weight.zero_()
    shares, chosen = route(model.router(x), model.spec)
    assert bool((shares == 0.5).all())
    assert bool((chosen[..., 0] != chosen[..., 1]).all())
    assert torch.equal(chosen, chosen[:, :1].expand_as(chosen))
    torch.testing.assert_close(model(x)[:, 2:3], model(x[:, 2:3]))
    torch.testing.assert_close(model(x), defined(model, x))


@torch.no_grad()
def test_a_token_does_not_see_its_neighbours() -> None:
    model, x = moe(), stream(3, 11)
    whole = model(x)
    for row in range(3):
        for place in (0, 5, 10):
            torch.testing.assert_close(model(x[row : row + 1, place : place + 1])[0, 0], whole[row, place])
    assert model(x[:, :0]).shape == (3, 0, 8)
    assert model(x[:, :0], Recorder(["experts"])).shape == (3, 0, 8)


def test_far_apart_logits() -> None:
    """A share that is 0 in floating point: no NaN in value or gradient."""
    model, x = moe(), stream(1, 5).requires_grad_()
    with torch.no_grad():
        model.router.weight.mul_(1e4)
    out = model(x)
    out.sum().backward()
    assert bool(out.isfinite().all())
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())
    with torch.no_grad():
        torch.testing.assert_close(model(x, Recorder(["router_weights"])), out)


@torch.no_grad()
def test_half_precision() -> None:
    """Shares are fp32; what comes out is what went in."""
    model, x = moe().bfloat16(), stream(2, 6).bfloat16()
    out = model(x)
    assert out.dtype == torch.bfloat16
    full = moe()
    full.load_state_dict(model.state_dict())
    assert float((full(x.float()) - out).abs().max()) < 0.05 * float(out.float().abs().max())
    tap = Recorder(["router_weights", "experts"])
    assert torch.equal(model(x, tap), out)


def test_jitter() -> None:
    """In training only, and of what router and experts both read."""
    model, x = moe(replace(GATED, jitter=0.3)), stream(2, 6)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), moe().eval()(x))
    torch.manual_seed(3)
    noisy = model.train()(x)
    torch.manual_seed(3)
    noise = torch.empty_like(x).uniform_(0.7, 1.3)
    assert torch.equal(noisy, moe()(x * noise))


# ---- experts in blocks ------------------------------------------------------------------------------------

stored_only = pytest.mark.skipif(library() is None, reason="stored weights need the native library")
D, D_FF = 256, 512


def in_blocks(kind: str, spec: MoeSpec) -> tuple[Moe, Moe]:
    """A mixture in blocks, and the plain twin: the numbers of these, multiplied by PyTorch."""
    generator = torch.Generator().manual_seed(5)
    stored, dense = (Moe(spec, D).requires_grad_(False) for _ in range(2))
    stored.router.weight.copy_(torch.randn(spec.n_experts, D, generator=generator) / 16)
    dense.router.weight.copy_(stored.router.weight)
    stored.router.product = dense.router.product = multiply  # the same choice in any company
    for name, weight in stored.named_parameters(recurse=False):
        numbers = torch.randn(weight.shape, generator=generator) / 16
        type_ = BLOCK_TYPES["Q8_0" if kind == "int8" else kind]
        made = stored_matrix(encoded(numbers, type_), type_.id, weight.shape[-1])
        made = together(made) if kind == "int8" else made
        setattr(stored, name, nn.Parameter(made, requires_grad=False))
        setattr(dense, name, nn.Parameter(made.dense(), requires_grad=False))
    return stored, dense


@stored_only
@pytest.mark.parametrize("kind", [*QUANTISED, "F16", "BF16", "int8"])
@torch.no_grad()
def test_blocks_and_the_plain_twin(kind: str) -> None:
    """One token and many; each expert's part has the bits of the product with its own matrix, in any company."""
    spec = MoeSpec(6, 2, MlpSpec(D_FF, "silu", gated=True))
    stored, dense = in_blocks(kind, spec)
    x = torch.randn(2, 37, D, generator=torch.Generator().manual_seed(6))
    seen, plain = Recorder(["router_weights", "experts"]), Recorder(["router_weights", "experts"])
    out, wanted = stored(x, seen), dense(x, plain)
    for mine, its in ((out, wanted), (seen.kept["experts"][0], plain.kept["experts"][0])):
        assert float((mine - its).norm() / its.norm()) < (0.02 if kind == "int8" else 1e-6)  # int8 rounds what it reads
    assert torch.equal(seen.kept["router_weights"][0], plain.kept["router_weights"][0])
    plainly = stored(x)
    torch.testing.assert_close(plainly, out, rtol=0, atol=1e-6)  # added up in another order
    for row, place in ((0, 0), (1, 36)):
        assert torch.equal(stored(x[row : row + 1, place : place + 1])[0, 0], plainly[row, place])
        for e in seen.kept["router_weights"][0][row, place].nonzero()[:, 0].tolist():
            gate, up, down = (Stored(w.raw[e], w.format, w.shape[-1]) for w in (stored.gate, stored.up, stored.down))
            made = F.linear(F.silu(F.linear(x[row, place], gate)) * F.linear(x[row, place], up), down)
            share = seen.kept["router_weights"][0][row, place, e]
            assert torch.equal(seen.kept["experts"][0][row, place, e], made * share)
    assert stored(x[:, :0]).shape == (2, 0, D)


@stored_only
def test_blocks_without_gates_and_with_gradients() -> None:
    """What the experts and the router read gets its gradient; the twin's."""
    plain, gated = MlpSpec(D_FF, "gelu"), MlpSpec(D_FF, "silu", gated=True)
    for spec in (MoeSpec(5, 3, plain, normalised=False), MoeSpec(5, 2, gated)):
        with torch.no_grad():
            stored, dense = in_blocks("Q8_0", spec)
        grads = []
        for model in (stored, dense):
            x = torch.randn(1, 9, D, generator=torch.Generator().manual_seed(6)).requires_grad_()
            model(x).square().sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


# ---- balance ---------------------------------------------------------------------------------------------


def test_balance_worked() -> None:
    """Case R12: one softmax, not two."""
    logits = torch.tensor([4.0, 0, 0, 0]).expand(4, -1)
    assert float(balance_loss(logits, 1)) == pytest.approx(3.79166, abs=1e-5)
    assert float(balance_loss(logits.softmax(-1), 1)) == pytest.approx(1.83234, abs=1e-5)
    even = 50 * torch.eye(4)
    for top_k in (1, 2):
        pairs = even if top_k == 1 else even + even.roll(1, 0) * 0.999
        assert float(balance_loss(pairs, top_k)) == pytest.approx(top_k, abs=1e-3)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_balance_against_transformers(top_k: int) -> None:
    """Of one layer and of several, with its gradient."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    layers = [2 * torch.randn(30, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    for n in (1, 3):
        ours = torch.stack(layers[:n]).requires_grad_()
        theirs = [layer.clone().requires_grad_() for layer in layers[:n]]
        one, other = balance_loss(ours, top_k), load_balancing_loss_func(tuple(theirs), 6, top_k)
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
        one.backward()
        other.backward()
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, torch.stack([layer.grad for layer in theirs]), rtol=1e-5, atol=1e-8)


# ---- cost ------------------------------------------------------------------------------------------------


class Work(TorchDispatchMode):
    """Counts multiplications, and numbers written."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.products += args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
        for one in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(one, Tensor):
                self.written += one.numel()
        return out


@pytest.mark.parametrize("n", [1, 200])
def test_only_the_chosen_are_computed(n: int) -> None:
    """Forwards ``top_k`` experts a token, backwards twice that; and the weights' gradient is written a few times, not
    once for each expert."""
    spec = MoeSpec(64, 2, MlpSpec(24, "silu", gated=True))
    model, x = moe(spec), stream(1, n).requires_grad_()
    for watch in (None, Recorder(["experts"])):
        with Work() as work:
            out = model(x, watch)
        each = 3 * 8 * 24 * spec.top_k
        assert work.products == n * (each + 8 * 64)
        with Work() as back:
            out.sum().backward()
        assert back.products == 2 * work.products
        if watch is None:
            assert back.written <= 4 * 64 * 3 * 8 * 24 + 60 * 24 * n
