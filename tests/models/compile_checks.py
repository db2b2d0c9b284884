"""Compiled blocks: one graph for each kind of layer and phase, and none for a length or a layer's number.

Run by ``test_compile.py``, in a process of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.reference import tiny
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from cutaway.cache import build
from cutaway.models import Transformer
from cutaway.models.compiled import CompiledBlock


@pytest.fixture(autouse=True)
def fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pair(name: str, **changes: object) -> tuple[Transformer, Transformer, CompileCounter]:
    """A model, the same compiled (by a backend that only counts graphs), and the count."""
    plain = tiny.transformer({**tiny.config(name), **changes})
    counter, compiled = CompileCounter(), copy.deepcopy(plain)
    compiled.compile_blocks(backend=counter)
    return plain, compiled, counter


@torch.no_grad()
def generate(plain: Transformer, compiled: Transformer, ids: Tensor, prompt: int, kind: str, counter: CompileCounter):  # type: ignore[no-untyped-def]
    """Prompt, then single steps; yields the number of graphs after each."""
    words = {"batch": ids.shape[0], "capacity": 16, "sliding": "whole" not in kind, "paged": "pages" in kind}
    words["kv_dtype"] = "int8" if "int8" in kind else None
    one, two = (model.new_cache(**words) for model in (plain, compiled))
    for part in ids.split([prompt] + [1] * (ids.shape[1] - prompt), 1):
        wanted, got = plain(part, cache=one), compiled(part, cache=two)
        assert float((wanted - got).abs().max()) <= 1e-4
        yield counter.frame_count


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("granite", "rings"),
        ("qwen3", "rings"),
        ("gemma3-caps", "rings"),
        ("mistral-window", "whole"),
        ("gemma3", "rings"),
        ("gemma3", "whole"),
        ("gemma3", "pages"),
        ("gemma3", "whole pages of int8"),
    ],
)
def test_a_hundred_steps(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 8 are passed on the way, rings go round, buffers and pools grow; nothing is compiled again."""
    monkeypatch.setattr(build, "SLACK", 20)
    plain, compiled, counter = pair(name)
    kinds = len(set(plain.spec.decoder.layers))
    seen = list(generate(plain, compiled, tiny.ids(1, 106), 6, kind, counter))
    assert seen[0] == kinds
    assert seen[1] == 2 * kinds
    assert set(seen[1:]) == {2 * kinds}


def test_experts_are_left_as_they_are() -> None:
    """As many tokens as there happen to be for each: no graph. Layers without experts have theirs."""
    for name, graphs in (("mixtral-window", 0), ("qwen3-moe-listed", 2)):
        torch._dynamo.reset()
        plain, compiled, counter = pair(name)
        assert list(generate(plain, compiled, tiny.ids(1, 12), 5, "rings", counter))[-1] == graphs


def test_as_many_layers_as_one_likes() -> None:
    for n in (1, 8):
        torch._dynamo.reset()
        plain, compiled, counter = pair("llama", num_hidden_layers=n)
        assert list(generate(plain, compiled, tiny.ids(1, 12), 5, "rings", counter))[-1] == 2


def test_layers_of_another_kind_have_their_own() -> None:
    """GPT-2's scores may be scaled by the layer's number: that is as many kinds."""
    for name, kinds in (("gpt2", 1), ("gpt2-inverse-layer", 2)):
        torch._dynamo.reset()
        plain, compiled, counter = pair(name, n_layer=2)
        assert len(set(plain.spec.decoder.layers)) == kinds
        assert list(generate(plain, compiled, tiny.ids(1, 20), 5, "rings", counter))[-1] == 2 * kinds


def test_other_lengths_and_batches() -> None:
    """Any prompt length, any number of rows beyond one: the graphs that are there.

    Sizes that happen to be equal while compiling are taken for the same, which costs one more graph once:
    not looked at here, where no first size equals another.
    """
    plain, compiled, counter = pair("llama")
    for rows, prompt in ((3, 9), (5, 30), (2, 12), (9, 9)):
        list(generate(plain, compiled, tiny.ids(rows, prompt + 4), prompt, "rings", counter))
    assert counter.frame_count == 2


@torch.no_grad()
def test_ragged_rows_and_plain_passes() -> None:
    """Pads, documents and passes without a cache compile too, and come out the same."""
    plain, compiled, counter = pair("llama")
    ids = tiny.ids(2, 12)
    positions = torch.stack([torch.arange(12), torch.arange(-5, 7).clamp(min=-1)])
    segments = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    real = positions >= 0
    for arguments in ((ids,), (ids, positions), (ids, positions, segments)):
        difference = (plain(*arguments) - compiled(*arguments)).abs()[real]
        assert float(difference.max()) <= 1e-4
    one, two = plain.new_cache(2), compiled.new_cache(2)
    plain(ids, positions, cache=one), compiled(ids, positions, cache=two)
    first = None
    for step in range(20):
        part = tiny.ids(2, 1, seed=step)
        assert float((plain(part, cache=one) - compiled(part, cache=two)).abs().max()) <= 1e-4
        first = counter.frame_count if first is None else first
    assert counter.frame_count == first


def test_training() -> None:
    """Gradients are the same through compiled blocks."""
    plain, compiled, counter = pair("qwen3")
    ids = tiny.ids(2, 10)
    for model in (plain, compiled):
        model.train()
        model(ids).square().mean().backward()
    for (name, one), two in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, atol=1e-4, rtol=1e-3, msg=name)
    assert counter.frame_count == 1


class Count:
    """A tap that counts what it is shown."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def begin(self, positions: Tensor, of_source: bool = False) -> None:
        pass

    def at(self, scope: str) -> Count:
        return self

    def wants(self, name: str) -> bool:
        return name not in ("scores", "weights", "head_out")  # which would be computed in another way

    def __call__(self, name: str, value: Tensor) -> Tensor:
        self.names.append(name)
        return value


@torch.no_grad()
def test_watching_costs_nothing_when_nobody_watches() -> None:
    """A watched pass runs uncompiled and sees everything; the graphs hold nothing but the block's own work."""
    plain, compiled, counter = pair("llama")
    ids, tap = tiny.ids(1, 9), Count()
    compiled(ids)
    graphs, operations = counter.frame_count, counter.op_count
    watched = compiled(ids, tap=tap)
    assert {"q", "k", "v", "z", "resid", "act"} <= set(tap.names)
    assert counter.frame_count == graphs
    torch.testing.assert_close(watched, plain(ids), atol=1e-5, rtol=0)

    # The same block with every tap taken out of its source has as many operations in its graph.
    bare = CompileCounter()

    def by_hand(block, x, inputs):  # type: ignore[no-untyped-def]
        attn, mlp = block.branches["attn"], block.branches["mlp"]
        q_k_v = _bare_attention(attn.body, _bare_norm(attn.pre_norm, x), inputs)
        x = x + q_k_v
        y = _bare_norm(mlp.pre_norm, x)
        return x + mlp.body.down(torch.nn.functional.silu(mlp.body.gate(y)) * mlp.body.up(y))

    compiled.decoder.runners = [
        _Bare(block, torch.compile(by_hand, backend=bare, dynamic=True, fullgraph=True, isolate_recompiles=True))
        for block in compiled.decoder.layers
    ]
    torch.testing.assert_close(compiled(ids), plain(ids), atol=1e-5, rtol=0)
    assert bare.op_count / bare.frame_count == operations / graphs


class _Bare:
    def __init__(self, block, run) -> None:  # type: ignore[no-untyped-def]
        self.block, self.run = block, run

    def __call__(self, x, inputs, tap=None):  # type: ignore[no-untyped-def]
        return self.run(self.block, x, inputs)


def _bare_norm(norm, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    full = x.float()
    return (full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + norm.spec.eps)).to(x.dtype) * norm.weight


def _bare_attention(body, x: Tensor, inputs) -> Tensor:  # type: ignore[no-untyped-def]
    from cutaway.modules.rotary import rotate

    spec = body.spec
    q = rotate(body.q(x).unflatten(-1, (spec.n_heads, spec.d_head)), *inputs.rotary)
    k = rotate(body.k(x).unflatten(-1, (spec.n_kv_heads, spec.d_head)), *inputs.rotary)
    v = body.v(x).unflatten(-1, (spec.n_kv_heads, spec.d_head))
    z = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        dropout_p=0.0,
        is_causal=True,
        scale=spec.score_scale,
        enable_gqa=True,
    )
    return body.out(z.transpose(1, 2).flatten(-2))


@torch.no_grad()
def test_too_long_for_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that attention takes piece by piece runs uncompiled."""
    from cutaway.models import compiled as module

    plain, compiled, counter = pair("llama")
    monkeypatch.setattr(module, "LARGEST_MASK", 4 * 10 * 10)
    ids = tiny.ids(1, 11)
    assert torch.equal(compiled(ids), plain(ids))
    assert counter.frame_count == 0
    compiled(ids[:, :10])
    assert counter.frame_count == 1


@torch.no_grad()
def test_on_and_off() -> None:
    plain, compiled, counter = pair("llama")
    assert all(isinstance(runner, CompiledBlock) for runner in compiled.decoder.runners or [])
    compiled.compile_blocks(False)
    assert torch.equal(compiled(tiny.ids(1, 8)), plain(tiny.ids(1, 8)))
    assert counter.frame_count == 0
    assert compiled.state_dict().keys() == plain.state_dict().keys()


def test_a_copy_runs_its_own_weights() -> None:
    _, compiled, _ = pair("llama")
    other = copy.deepcopy(compiled)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        assert bool((other(tiny.ids(1, 5)) == 0).all())
        assert bool((compiled(tiny.ids(1, 5)) != 0).any())


@pytest.mark.slow
def test_real_compiler() -> None:
    """Through inductor and the machine's C++ compiler: the same numbers."""
    plain = tiny.transformer({**tiny.config("gemma3"), "num_hidden_layers": 2, "layer_types": [tiny.NEAR, tiny.FAR]})
    compiled = copy.deepcopy(plain)
    compiled.compile_blocks()
    ids = tiny.ids(1, 40)
    with torch.no_grad():
        one, two = plain.new_cache(capacity=16), compiled.new_cache(capacity=16)
        for part in ids.split([9] + [1] * 31, 1):
            assert float((plain(part, cache=one) - compiled(part, cache=two)).abs().max()) <= 1e-4


def test_specs_that_are_equal_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever objects they are."""
    from cutaway.models.compiled import compiled_blocks

    spec = tiny.spec_of(tiny.config("llama"))
    layers = tuple(replace(layer, branches=tuple(replace(b) for b in layer.branches)) for layer in spec.decoder.layers)
    assert layers[0] is not layers[1]
    model = Transformer(replace(spec, decoder=replace(spec.decoder, layers=layers)))
    made = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: made.append(options) or function)
    assert len(compiled_blocks(model.decoder.layers)) == 3  # type: ignore[arg-type]
    assert len(made) == 1
