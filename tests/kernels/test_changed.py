"""Models that somebody changed under the native library: what runs is what is there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cutaway.generation.session import Session
from cutaway.kernels import Stored, library, stored_matrix
from cutaway.models import Transformer
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
