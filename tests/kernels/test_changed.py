"""Models that somebody changed under the native library: what runs is what is there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cutaway.generation.session import Session
from cutaway.kernels import Stored, library, stored_matrix
from cutaway.models import Transformer
from cutaway.models.head import Head
from cutaway.modules.attention import Attention
from cutaway.modules.linear import Linear
from tests.reference import tiny

pytestmark = pytest.mark.skipif(library() is None, reason="there is no native library here")
MLP = "decoder.layers.1.branches.mlp.body"


class Twice(nn.Module):
    """What an adapter looks like: it holds the module that it stands for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Tensor:
        out: Tensor = 2 * self.inner(*args)
        return out


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def native(name: str) -> Transformer:
    model = tiny.transformer(name)
    assert model.use_kernels()
    assert model.steps is not None
    return model


def replaced(model: Transformer, path: str, change: Callable[[Any], nn.Module]) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, change(model.get_submodule(path)))


def scaled(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    return twin


def layers_swapped(model: Transformer) -> None:
    layers = model.decoder.layers
    layers[0], layers[1] = layers[1], layers[0]


def forward_put_in_place(model: Transformer, path: str) -> None:
    module = model.get_submodule(path)
    inner = module.forward
    module.forward = lambda *args: 2 * inner(*args)  # type: ignore[method-assign]


def parametrized(model: Transformer) -> None:
    nn.utils.parametrize.register_parametrization(model.get_submodule(MLP + ".up"), "weight", Doubled())


def weight_put_in_place(model: Transformer, path: str, change: Callable[[Tensor], Tensor]) -> None:
    module, _, name = path.rpartition(".")
    owner = model.get_submodule(module)
    setattr(owner, name, nn.Parameter(change(getattr(owner, name).detach()), requires_grad=False))


def spread(x: Tensor) -> Tensor:
    """The same numbers, not side by side."""
    return torch.stack([x, x + 7], dim=-1)[..., 0]


def biased(model: Transformer, path: str, how: str) -> None:
    """Where there was none."""
    linear: Any = model.get_submodule(path)
    assert linear.bias is None
    bias = torch.linspace(-2, 2, len(linear.weight))
    if how == "set":
        linear.bias = nn.Parameter(bias)
    elif how == "registered":
        del linear.bias
        linear.register_parameter("bias", nn.Parameter(bias))
    else:
        linear.bias = bias  # no parameter


def respelt(model: Transformer, path: str, **values: Any) -> None:
    part: Any = model.get_submodule(path)
    part.spec = replace(part.spec, **values)


class DoubledLinear(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoubledScores(Transformer):
    def unembed(self, x: Tensor, tap: Any = None) -> Tensor:
        return 2 * super().unembed(x, tap)


def reclassed(model: Transformer, path: str, kind: type) -> None:
    model.get_submodule(path).__class__ = kind  # type: ignore[assignment]


def shadowed(model: Transformer, path: str, name: str) -> None:
    """A function set on a module, in place of a method or of what multiplies."""
    module = model.get_submodule(path)
    inner = getattr(module, name)
    setattr(module, name, lambda *args, **more: 2 * inner(*args, **more))


def sliced(model: Transformer, keep: int) -> None:
    """Fewer neurons, at the same address."""
    mlp: Any = model.get_submodule(MLP)
    mlp.up.weight.data = mlp.up.weight.data[:keep]
    mlp.gate.weight.data = mlp.gate.weight.data[:keep]
    mlp.down.weight.data = mlp.down.weight.data[:, :keep]


ATTN = "decoder.layers.1.branches.attn"
CHANGES: dict[str, tuple[str, Callable[[Transformer], object]]] = {
    "an adapter": ("llama", lambda m: replaced(m, MLP + ".up", Twice)),
    "an adapter of a block": ("llama", lambda m: replaced(m, "decoder.layers.0", Twice)),
    "an adapter of the embedding": ("llama", lambda m: replaced(m, "embed", scaled)),
    "another linear": ("llama", lambda m: replaced(m, MLP + ".down", scaled)),
    "another norm in a block": ("llama", lambda m: replaced(m, "decoder.layers.0.branches.attn.pre_norm", scaled)),
    "another last norm": ("llama", lambda m: replaced(m, "decoder.norm", scaled)),
    "another head": ("llama", lambda m: replaced(m, "head", scaled)),
    "layers swapped": ("llama", layers_swapped),
    "forward of a part": ("llama", lambda m: forward_put_in_place(m, MLP)),
    "forward of the head": ("llama", lambda m: forward_put_in_place(m, "head")),
    "forward of the norm": ("llama", lambda m: forward_put_in_place(m, "decoder.norm")),
    "parametrized": ("llama", parametrized),
    "a bias that was not there": ("llama", lambda m: biased(m, MLP + ".up", "set")),
    "a bias registered": ("llama", lambda m: biased(m, ATTN + ".body.q", "registered")),
    "a bias that is no parameter": ("llama", lambda m: biased(m, MLP + ".down", "plain")),
    "a bias of the head": ("llama", lambda m: biased(m, "head", "set")),
    "another eps": ("llama", lambda m: respelt(m, ATTN + ".pre_norm", eps=0.7)),
    "another eps at the end": ("llama", lambda m: respelt(m, "decoder.norm", eps=0.7)),
    "another curve": ("llama", lambda m: respelt(m, MLP, activation="relu")),
    "another scale of scores": ("llama", lambda m: respelt(m, ATTN + ".body", scale=7.0)),
    "capped scores": ("llama", lambda m: respelt(m, ATTN + ".body", soft_cap=0.01, scale=7.0)),
    "another scale of a branch": ("llama", lambda m: respelt(m, ATTN, scale=3.0)),
    "a parallel block": ("llama", lambda m: respelt(m, "decoder.layers.1", parallel=True)),
    "another scale of the embedding": ("llama", lambda m: respelt(m, "embed", scale=3.0)),
    "capped logits": ("llama", lambda m: respelt(m, "head", soft_cap=0.5)),
    "another class": ("llama", lambda m: reclassed(m, MLP + ".up", DoubledLinear)),
    "another class of model": ("llama", lambda m: reclassed(m, "", DoubledScores)),
    "product of a matrix": ("llama", lambda m: shadowed(m, MLP + ".up", "product")),
    "product of the head": ("llama", lambda m: shadowed(m, "head", "product")),
    "unembed of the model": ("llama", lambda m: shadowed(m, "", "unembed")),
    "hidden of the model": ("llama", lambda m: shadowed(m, "", "hidden")),
    "forward of the embedding": ("llama", lambda m: shadowed(m, "embed", "forward")),
    "queries of attention": ("llama", lambda m: shadowed(m, ATTN + ".body", "queries")),
    "what a branch reads": ("llama", lambda m: shadowed(m, "decoder.layers.1.branches.mlp.body", "forward")),
    "a spread matrix": ("llama", lambda m: weight_put_in_place(m, MLP + ".up.weight", spread)),
    "a spread table": ("gptj", lambda m: weight_put_in_place(m, "embed.tokens", spread)),
    "a spread head": ("gptj", lambda m: weight_put_in_place(m, "head.weight", spread)),
    "a spread bias of the head": ("gptj", lambda m: weight_put_in_place(m, "head.bias", spread)),
    "a spread last norm": ("gptj", lambda m: weight_put_in_place(m, "decoder.norm.weight", spread)),
}


def fed(model: Transformer, rows: list[list[int]]) -> Tensor:
    session = Session(model)
    return torch.stack([session.feed([row]) for row in rows])


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_there_runs(what: str) -> None:
    """As the readable blocks run it, before and after earlier passes were laid out."""
    name, change = CHANGES[what]
    model = native(name)
    rows = [[3, 4, 5], [6], [7], [8]]
    before = fed(model, rows)
    change(model)
    found = fed(model, rows)
    model.use_kernels(False)
    plain = fed(model, rows)
    assert torch.allclose(found, plain, atol=1e-4)
    assert "spread" in what or not torch.allclose(before, plain, atol=1e-3)


@pytest.mark.parametrize("what", CHANGES)
def test_changed_between_two_tokens(what: str) -> None:
    """A step looks only at what was noted since the last one, and none of these goes unnoted."""
    name, change = CHANGES[what]
    model = native(name)
    session = Session(model)
    for row in ([3, 4, 5], [6], [7]):
        session.feed([row])
    plain, unchanged = session.fork(), session.fork().feed([[8]])
    change(model)
    found = session.feed([[8]])
    model.use_kernels(False)
    expected = plain.feed([[8]])
    assert torch.allclose(found, expected, atol=1e-4)
    assert "spread" in what or not torch.allclose(unchanged, expected, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "name"), [(Linear, "forward"), (Attention, "queries"), (Transformer, "unembed"), (Head, "forward")]
)
def test_changed_for_all_of_a_class(kind: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once that is undone, one call for all layers again: by the same bits."""
    model = native("llama")
    rows = [[3, 4, 5], [6], [7], [8]]
    before = fed(model, rows)
    inner = getattr(kind, name)
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, lambda self, *args, **more: 2 * inner(self, *args, **more))
        found = fed(model, rows)
        model.use_kernels(False)
        plain = fed(model, rows)
        model.use_kernels()
        assert torch.allclose(found, plain, atol=1e-4)
        assert not torch.allclose(before, plain, atol=1e-3)
    calls: list[object] = []
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *args: calls.append(self))
    session = Session(model)
    monkeypatch.undo()
    for row in rows[:2]:
        session.feed([row])
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *args: calls.append(self))
    session.feed([[7]])
    assert not calls
    monkeypatch.undo()
    assert torch.equal(fed(model, rows), before)


def test_a_class_made_of_a_model() -> None:
    """Whoever has other scores than the model's own has them for every token."""
    model = DoubledScores(tiny.transformer("llama").spec)
    model.load_state_dict(tiny.transformer("llama").state_dict())
    model.eval().use_kernels()
    found = fed(model, [[3, 4, 5], [6], [7]])
    assert torch.allclose(found, 2 * fed(native("llama"), [[3, 4, 5], [6], [7]]), atol=1e-4)


def test_fewer_neurons_at_the_same_address() -> None:
    """Found by the next pass of several tokens."""
    model = native("llama")
    rows = [[3, 4, 5], [6], [7]]
    before = fed(model, rows)
    sliced(model, 24)
    found = fed(model, rows)
    model.use_kernels(False)
    assert torch.allclose(found, fed(model, rows), atol=1e-4)
    assert not torch.allclose(found, before, atol=1e-3)


def test_what_makes_no_difference_costs_nothing() -> None:
    """A note of somebody's on a part: all layers go on being one call."""
    model = native("llama")
    rows = [[3, 4, 5], [6], [7]]
    before = fed(model, rows)
    part: Any = model.get_submodule(MLP)
    part.remark = "layer of interest"
    model.remark = torch.zeros(3)  # type: ignore[assignment]
    assert torch.equal(fed(model, rows), before)
    assert all(laid is not None and laid.ready(32) for laid in model.decoder.whole.known)  # type: ignore[union-attr]


def test_weights_changed_for_a_while() -> None:
    """A pass without a cache, with other weights, leaves nothing of them to a session that goes on afterwards."""
    model = native("llama")
    expected = fed(model, [[3, 4, 5], [6], [7], [8]])
    session = Session(model)
    for row in ([3, 4, 5], [6], [7]):
        session.feed([row])
    up: Any = model.get_submodule(MLP + ".up")
    kept = up.weight
    up.weight = nn.Parameter(kept.detach() * 3)
    with torch.no_grad():
        model(torch.tensor([[3, 4, 5]]))
    up.weight = kept
    assert torch.equal(session.feed([[8]]), expected[-1])


@pytest.mark.parametrize("path", [MLP + ".up.weight", "decoder.norm.weight", "embed.tokens"])
def test_weights_of_another_shape_are_an_error(path: str) -> None:
    model = native("llama")
    fed(model, [[3], [4], [5]])
    weight_put_in_place(model, path, lambda x: x.new_ones(*x.shape[:-1], 4096))
    with pytest.raises(RuntimeError):
        fed(model, [[3], [4], [5]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_type(dtype: torch.dtype) -> None:
    """What the library writes to is as large as what it writes."""
    model = native("llama")
    expected = fed(model, [[3, 4, 5], [6], [7]])
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(fed(model, [[3, 4, 5], [6], [7]]), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def stored() -> Stored:
    weight: Any = nn.Parameter(stored_matrix(torch.arange(4 * 34, dtype=torch.uint8).view(4, 34), 8, 32), False)
    return weight  # type: ignore[no-any-return]


WRITES: list[Callable[[Stored], object]] = [
    lambda w: w.mul_(2),
    lambda w: w.copy_(torch.zeros(4, 32)),
    lambda w: w.data.zero_(),
    lambda w: w.__setitem__(0, 0),
    lambda w: torch.add(torch.ones(4, 32), 1, out=w),
    lambda w: torch._foreach_mul_([w], 2.0),
    lambda w: w.share_memory_(),
]


@pytest.mark.parametrize("write", WRITES)
def test_stored_weights_are_not_written_to(write: Callable[[Stored], object]) -> None:
    """Their numbers are made anew each time: what is written to them would be lost without a word."""
    weight = stored()
    before = weight.dense()
    with torch.no_grad(), pytest.raises(TypeError, match="cannot be written to"):
        write(weight)
    assert torch.equal(before.nan_to_num(), weight.dense().nan_to_num())


def test_pickled_stored_weights() -> None:
    """They stay parameters, and stay where they are while they are sent to another process."""
    weight = stored()
    again = pickle.loads(pickle.dumps(weight))  # noqa: S301
    assert isinstance(again, nn.Parameter)
    assert isinstance(again, Stored)
    assert torch.equal(again.raw, weight.raw)
    ForkingPickler.dumps(weight)
    assert weight.raw.data_ptr() == weight.matrix.data
