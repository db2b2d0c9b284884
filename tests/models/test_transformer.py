"""The whole model: its sizes, its positions, what it refuses."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from tests.reference import tiny

from cutaway.errors import ContextExceeded
from cutaway.families.experts import first_experts
from cutaway.models import Transformer
from cutaway.spec import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    EmbeddingSpec,
    HeadSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    StackSpec,
)


def plain_spec(vocab_size: int, d_model: int, n_layers: int, n_kv_heads: int = 32) -> ModelSpec:
    """The textbook's decoder: 32 heads, and a feed-forward network of four times the width."""
    attention = AttentionSpec(32, n_kv_heads, d_model // 32)
    norm = NormSpec("layer", 1e-5, bias=True)
    block = BlockSpec((BranchSpec("attn", attention, norm), BranchSpec("mlp", MlpSpec(4 * d_model, "gelu"), norm)))
    return ModelSpec("x", vocab_size, d_model, 4096, EmbeddingSpec(), StackSpec((block,) * n_layers), HeadSpec(True))


def test_worked_parameters() -> None:
    """Twelve times the square of the width in each layer's matrices."""
    case = tiny.WORKED["parameters"]
    with torch.device("meta"):
        model = Transformer(plain_spec(case["vocab_size"], case["d_model"], case["n_layers"]))
    assert model.embed.tokens.numel() == case["embedding"]
    matrices = [sum(p.numel() for p in layer.parameters() if p.dim() == 2) for layer in model.decoder.layers]
    assert set(matrices) == {case["per_layer_12_d2"]}
    assert sum(matrices) == case["all_layers"]


def test_worked_cache() -> None:
    """Bytes that a token's keys and values take, with as many key/value heads as heads and with eight."""
    case, spec = tiny.WORKED["kv_cache_fp16"], plain_spec(64, 4096, 32)
    with torch.device("meta"):
        full, grouped = Transformer(spec).half(), Transformer(plain_spec(64, 4096, 32, n_kv_heads=8)).half()
    slots = 4096 + 1  # the last takes what has no place
    assert full.new_cache(capacity=4096).nbytes == slots * case["per_token_bytes"]
    assert 4096 * case["per_token_bytes"] == case["n4096_GiB"] * 2**30
    assert grouped.new_cache(capacity=4096).nbytes / slots * 4096 == case["n4096_8_kv_heads_of_128_GiB"] * 2**30


def test_worked_shapes() -> None:
    case = tiny.WORKED["shape_walk"]
    values = {**tiny.config("llama"), "vocab_size": case["vocab_size"], "hidden_size": case["d_model"]}
    model = tiny.transformer(values)
    assert model.embed.tokens.numel() == case["embedding_numbers"]
    with torch.no_grad():
        ids = tiny.ids(case["batch"], case["n"])
        assert model.hidden(ids).shape == (case["batch"], case["n"], case["d_model"])
        assert model(ids).numel() == case["logits_numbers"]


@torch.no_grad()
def test_worked_scores() -> None:
    """A number for each pair of tokens and each head, whoever asks for them."""
    case = tiny.WORKED["scores"]
    n = case["n"] // 64
    shapes: list[torch.Size] = []

    class Tap:
        def begin(self, positions: torch.Tensor, of_source: bool = False) -> None:
            pass

        def at(self, scope: str) -> Tap:
            return self

        def wants(self, name: str) -> bool:
            return name == "scores"

        def __call__(self, name: str, value: torch.Tensor) -> torch.Tensor:
            if name == "scores":
                shapes.append(value.shape)
            return value

    model = tiny.transformer("llama")
    model(tiny.ids(1, n), tap=Tap())
    assert shapes == [torch.Size([1, 4, n, n])] * 3
    assert shapes[0][2:].numel() * 64**2 == case["per_head"]
    model(tiny.ids(1, 2 * n), tap=Tap())
    assert shapes[-1].numel() == case["n_8192_factor"] * shapes[0].numel()


@torch.no_grad()
def test_positions_go_on_from_the_cache() -> None:
    """Stated or left out, they are the same."""
    for name in tiny.FAMILIES:
        model, ids = tiny.transformer(name), tiny.ids(2, 9)
        one, two = model.new_cache(2), model.new_cache(2)
        for start, part in zip((0, 5, 6), ids.split([5, 1, 3], 1), strict=True):
            positions = torch.arange(start, start + part.shape[1]).expand(2, -1)
            assert torch.equal(model(part, cache=one), model(part, positions, cache=two))


@torch.no_grad()
def test_past_the_position_table() -> None:
    """A learned table ends; the error says where, and nothing has happened to the cache."""
    model = tiny.transformer("gpt2")
    assert model.spec.position_limit == 64
    cache = model.new_cache()
    model(tiny.ids(1, 60), cache=cache)
    with pytest.raises(ContextExceeded, match=r"expected positions below 64, got 64"):
        model(tiny.ids(1, 5), cache=cache)
    assert cache.lengths == [60]
    model(tiny.ids(1, 4), cache=cache)
    with pytest.raises(ContextExceeded):
        model(tiny.ids(1, 65))
    assert tiny.transformer("llama").spec.position_limit is None
    tiny.transformer("llama")(tiny.ids(1, 65))


def test_there_is_no_mask_to_get_wrong() -> None:
    """Case M08: padding is said in positions, so there is no mask whose kind or polarity could be mistaken."""
    for method in (Transformer.forward, Transformer.hidden):
        assert not [name for name in inspect.signature(method).parameters if "mask" in name]


@torch.no_grad()
def test_pads_may_hold_anything() -> None:
    """Ids at a pad change nothing, and a row of pads gives numbers that nobody reads."""
    for name in tiny.FAMILIES:
        model = tiny.transformer(name)
        ids, positions = tiny.ids(3, 8), torch.arange(8).expand(3, -1).clone()
        positions[1, 5:], positions[2] = -1, -1
        other = torch.where(positions >= 0, ids, 0)
        one, two = model(ids, positions), model(other, positions)
        # Who shares an expert with a token, a pad even, decides the size of a product, and that the last bit.
        most = 1e-5 if first_experts(model.spec) is not None else 0.0
        assert float((one - two)[positions >= 0].abs().max()) <= most
        assert bool(one.isfinite().all())


@torch.no_grad()
def test_an_empty_pass() -> None:
    """No tokens, no logits, and no complaint."""
    for name in ("llama", "gpt2", "gemma3"):
        model = tiny.transformer(name)
        assert model(torch.zeros(1, 0, dtype=torch.long)).shape == (1, 0, 64)
        cache = model.new_cache()
        model(tiny.ids(1, 3), cache=cache)
        assert model(torch.zeros(1, 0, dtype=torch.long), cache=cache).shape == (1, 0, 64)
        assert cache.lengths == [3]


@torch.no_grad()
def test_parallel_branches_and_post_norm() -> None:
    """Topology that no family here uses yet: branches side by side, and a norm after the sum."""
    spec = tiny.spec_of(tiny.config("llama"))
    norm = NormSpec("layer", 1e-5, bias=True)
    branches = tuple(replace(branch, post_norm=norm) for branch in spec.decoder.layers[0].branches)
    for parallel in (False, True):
        block = BlockSpec(branches if not parallel else spec.decoder.layers[0].branches, parallel=parallel)
        model = Transformer(replace(spec, decoder=StackSpec((block,), spec.decoder.norm)))
        tiny.scale_randomly(model, norm_mean=1.0)
        ids = tiny.ids(1, 6)
        logits = model.eval()(ids)
        attn, mlp = (model.decoder.layers[0].branches[name] for name in ("attn", "mlp"))
        x = model.embed(ids, torch.arange(6)[None])
        positions = torch.arange(6)[None]
        from cutaway.cache import NoCache
        from cutaway.modules.attention import LayerInputs
        from cutaway.modules.rotary import rotary_table

        cache = NoCache([block.attention.mask], model.device)
        cache.begin(positions)
        assert block.attention.rotary is not None
        inputs = LayerInputs(cache.layer(0), rotary_table(block.attention.rotary, positions, torch.float32))
        if parallel:
            x = x + attn.body(attn.pre_norm(x), inputs) + mlp.body(mlp.pre_norm(x))
        else:
            x = attn.post_norm(x + attn.body(attn.pre_norm(x), inputs))
            x = mlp.post_norm(x + mlp.body(mlp.pre_norm(x)))
        torch.testing.assert_close(logits, model.unembed(model.decoder.norm(x)), atol=1e-5, rtol=1e-5)
