"""Norms against PyTorch's and transformers', in bf16 too, where the order of casts shows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.reference import tiny
from torch import Tensor

from cutaway.modules.norm import Norm, norm_or_identity
from cutaway.spec import NormSpec


class Watch:
    """Takes note of everything and edits nothing."""

    def __init__(self) -> None:
        self.seen: dict[str, Tensor] = {}

    def begin(self, positions: Tensor, of_source: bool = False) -> None:
        pass

    def at(self, scope: str) -> Watch:
        return self

    def wants(self, name: str) -> bool:
        return True

    def __call__(self, name: str, value: Tensor) -> Tensor:
        self.seen[name] = value
        return value


def norm(spec: NormSpec, width: int = 32, dtype: torch.dtype = torch.float32) -> Norm:
    module = Norm(spec, width)
    tiny.scale_randomly(module, norm_mean=1.0 - spec.offset, seed=3)
    return module.to(dtype)


def stream(dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(2)) * 3 + 0.7).to(dtype)


SPECS = {
    "layer": NormSpec("layer", 1e-5, bias=True),
    "layer without bias": NormSpec("layer", 1e-12),
    "layer with offset": NormSpec("layer", 1e-5, offset=1.0),
    "rms": NormSpec("rms", 1e-6),
    "rms, cast after": NormSpec("rms", 1e-6, cast="after"),
    "rms with offset": NormSpec("rms", 1e-6, offset=1.0, cast="after"),
    "rms with bias": NormSpec("rms", 1e-3, bias=True),
}


def test_worked_numbers() -> None:
    case = tiny.WORKED["layer_norm"]
    x = torch.tensor(case["x"])
    module = Norm(NormSpec("layer", 1e-5), 6)
    torch.nn.init.ones_(module.weight)
    assert module(x).tolist() == pytest.approx(case["y"], abs=0.005)
    watch = Watch()
    module(x, watch)
    assert float(1 / watch.seen["norm_scale"]) == pytest.approx(case["std"], abs=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_against_pytorch(name: str) -> None:
    spec, x = SPECS[name], stream()
    module = norm(spec)
    weight = module.weight + spec.offset
    if spec.kind == "layer":
        wanted = F.layer_norm(x, (32,), weight, module.bias, spec.eps)
    else:
        wanted = F.rms_norm(x, (32,), weight, spec.eps) + (0 if module.bias is None else module.bias)
    torch.testing.assert_close(module(x), wanted, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("name", SPECS)
def test_watching_changes_nothing(name: str) -> None:
    """LayerNorm is fused unless its scale is asked for."""
    module, x, watch = norm(SPECS[name]), stream(), Watch()
    torch.testing.assert_close(module(x), module(x, watch), atol=2e-6, rtol=1e-6)
    centred = x - x.mean(-1, keepdim=True) if SPECS[name].kind == "layer" else x
    wanted = (centred.pow(2).mean(-1, keepdim=True) + SPECS[name].eps).rsqrt()
    torch.testing.assert_close(watch.seen["norm_scale"], wanted)
    assert watch.seen["norm_scale"].shape == (4, 9, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_llama_and_gemma_to_the_bit(dtype: torch.dtype) -> None:
    """Llama casts down before it multiplies, Gemma after; in half precision that shows."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = stream(dtype)
    results = []
    for theirs, spec in (
        (LlamaRMSNorm(32, 1e-6), NormSpec("rms", 1e-6)),
        (Gemma3RMSNorm(32, 1e-6), NormSpec("rms", 1e-6, offset=1.0, cast="after")),
    ):
        ours = norm(spec, dtype=dtype)
        theirs = theirs.to(dtype)
        theirs.weight.data.copy_(ours.weight.data)
        assert torch.equal(ours(x), theirs(x))
        assert ours(x).dtype == dtype
        results.append(ours(x))
    plain = norm(NormSpec("rms", 1e-6, cast="after"), dtype=dtype)
    if dtype != torch.float32:
        assert not torch.equal(plain(x), results[0]), "the two orders cannot be told apart here"


def test_layer_norm_in_bf16() -> None:
    module, x = norm(SPECS["layer"], dtype=torch.bfloat16), stream(torch.bfloat16)
    wanted = F.layer_norm(x.float(), (32,), module.weight.float(), module.bias.float(), 1e-5)  # type: ignore[union-attr]
    # Cast once, at the end, whether watched or not: half a unit in the last place.
    torch.testing.assert_close(module(x).float(), wanted, atol=1e-5, rtol=2**-8)
    torch.testing.assert_close(module(x, Watch()).float(), wanted, atol=1e-5, rtol=2**-8)


@pytest.mark.parametrize("name", SPECS)
def test_gradient(name: str) -> None:
    module = norm(SPECS[name], width=6).double()
    x = torch.randn(2, 6, dtype=torch.double, requires_grad=True)
    if SPECS[name].kind == "layer":  # the rest computes in fp32 by design
        assert torch.autograd.gradcheck(module, (x,))
    module(x).sum().backward()
    assert module.weight.grad is not None


def test_an_empty_slot_passes_everything_through() -> None:
    x = stream()
    assert norm_or_identity(None, 32)(x) is x
