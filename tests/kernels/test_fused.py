"""A fused block is the readable block: every family, every kind of cache, every way to split a text."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import cutaway
from cutaway.generation.session import Session
from cutaway.models import Transformer
from cutaway.models.fused import FusedStack
from cutaway.models.laid_out import why_not
from cutaway.modules.linear import Linear
from tests.reference import tiny, tiny_encoders

BOUND = 1e-4  # what is promised against the reference


def pair(name: str) -> tuple[Transformer, Transformer]:
    """The model with the native library, and the same without it."""
    plain = tiny.transformer(name)
    fused = copy.deepcopy(plain)
    assert fused.use_kernels()
    return fused, plain


def n_fused(model: Transformer) -> int:
    stacks = (model.decoder.whole, model.encoder.whole)
    return sum(laid is not None for stack in stacks if isinstance(stack, FusedStack) for laid in stack.known)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize(
    "name", [name if name in tiny.FAMILIES else pytest.param(name, marks=pytest.mark.slow) for name in tiny.CASES]
)
@torch.no_grad()
def test_one_pass(name: str) -> None:
    fused, plain = pair(name)
    ids = tiny.ids(2, 40)
    assert apart(fused(ids), plain(ids)) <= BOUND
    positions = torch.arange(40).expand(2, -1).clone()
    positions[1, 23:] = -1  # ragged
    there = positions >= 0
    assert apart(fused(ids, positions)[there], plain(ids, positions)[there]) <= BOUND


def test_which_are_fused() -> None:
    """What runs as before is known by name: a model that quietly took the slower way would be a fault."""
    left = {name: {why_not(layer) for layer in tiny.transformer(name).spec.decoder.layers} for name in tiny.FAMILIES}
    bias = {"a bias or vectors by distance"}
    assert {name: why for name, why in left.items() if why != {""}} == {
        "bloom": bias,
        "falcon-rw": bias,
        "mpt": bias,
        "mixtral-window": {"experts"},
        "qwen3-moe-listed": {"experts", ""},  # layers without experts among those with
    }
    for name, why in left.items():
        layers = tiny.transformer(name).spec.decoder.layers
        assert n_fused(pair(name)[0]) == sum(not why_not(layer) for layer in layers), why


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mistral-window", "phi-qk-norm", "gpt-neox"])
def test_cached(name: str, kv_dtype: Any) -> None:
    """Splits, ragged rows, rewinds and rows picked out; a ring that is read beside what it will hold."""
    fused, plain = pair(name)
    fused.warned_length = plain.warned_length = True
    random = torch.Generator().manual_seed(3)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, 60, (n,), generator=random).tolist()

    sessions = [Session(model, 2, capacity=4, kv_dtype=kv_dtype) for model in (fused, plain)]
    for lengths in ((9, 4), (1, 1), (1, 0), (3, 7), (20, 1), (1, 1)):
        rows = [tokens(n) for n in lengths]
        got = [session.feed(rows) for session in sessions]
        live = [i for i, n in enumerate(lengths) if n]
        # Eight bits: a last bit of a key may turn a code over.
        assert apart(got[0][live], got[1][live]) <= (0.2 if kv_dtype else BOUND)
    for session in sessions:
        session.rewind([12, 9])
        session.select([1, 0, 1])
    rows = [tokens(2), tokens(3), tokens(1)]
    got = [session.feed(rows) for session in sessions]
    assert apart(got[0], got[1]) <= (0.2 if kv_dtype else BOUND)


def test_long_passes_through_a_ring() -> None:
    """Longer than window and slack: the ring is read before it is written."""
    fused, plain = pair("mistral-window")
    fused.warned_length = plain.warned_length = True
    text = torch.randint(3, 60, (700,), generator=torch.Generator().manual_seed(0)).tolist()
    sessions = [Session(model) for model in (fused, plain)]
    for piece in (text[:20], text[20:650], text[650:]):
        got = [session.feed([piece]) for session in sessions]
        assert apart(*got) <= BOUND


@pytest.mark.parametrize("name", tiny_encoders.FAMILIES)
@torch.no_grad()
def test_encoders(name: str, tmp_path: Path) -> None:
    fused = cutaway.load(tiny_encoders.write(tiny_encoders.config(name), tmp_path)).transformer
    plain = copy.deepcopy(fused)
    plain.use_kernels(False)
    assert n_fused(fused) == len(plain.spec.encoder.layers)
    ids = torch.randint(5, 60, (3, 17), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(17).expand(3, -1).clone()
    positions[1, 9:] = -1
    there = positions >= 0
    assert apart(fused.hidden(ids, positions)[there], plain.hidden(ids, positions)[there]) <= BOUND


@torch.no_grad()
def test_the_same_bits_in_any_company() -> None:
    """With nothing asked for: a row alone, among others, in pieces, and on one thread or two."""
    fused, _ = pair("llama")
    fused.warned_length = True
    text = torch.randint(3, 60, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    threads = torch.get_num_threads()

    def last(others: list[list[int]], cuts: list[int]) -> Tensor:
        rows = [text, *others]
        session = Session(fused, len(rows), capacity=128)
        for start, stop in zip([0, *cuts], [*cuts, 90], strict=True):
            out = session.feed([row[start:stop] for row in rows])
        return out[0]

    try:
        alone = last([], [])
        for n in (1, 2):
            torch.set_num_threads(n)
            for cuts in ([30], [1, 2, 3, 50], list(range(1, 90))):
                assert torch.equal(last([], cuts), alone)
                assert torch.equal(last([text[5:70], text[:1]], cuts), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "values",
    [
        {"head_dim": 6, "num_attention_heads": 4, "num_key_value_heads": 4},
        {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 4},
        {"head_dim": 40, "num_attention_heads": 6, "num_key_value_heads": 2},
        {"head_dim": 64, "num_attention_heads": 5, "num_key_value_heads": 1},
        {"head_dim": 112, "num_attention_heads": 2, "num_key_value_heads": 2},
        {"model_type": "mistral", "sliding_window": 37, "head_dim": 32},
    ],
    ids=str,
)
def test_the_same_bits_for_heads_of_any_width(values: dict[str, Any]) -> None:
    """Many queries read keys that are laid across, one reads them as they lie; both meet block borders and windows."""
    model = tiny.transformer({**tiny.config("llama"), **values})
    assert model.use_kernels()
    assert n_fused(model) == len(model.spec.decoder.layers)
    model.warned_length = True
    text = torch.randint(3, 60, (101,), generator=torch.Generator().manual_seed(0)).tolist()

    def parts(cuts: list[int]) -> Tensor:
        session = Session(model, 1, capacity=128)
        return torch.cat([session.feed_each([text[a:b]]) for a, b in itertools.pairwise([0, *cuts, 101])])

    whole = parts([])
    assert torch.equal(parts(list(range(1, 101))), whole)
    assert torch.equal(parts([3, 33, 40, 96]), whole)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mistral-window", "gpt-neox", "qwen3-moe-listed"])
@torch.no_grad()
def test_only_the_ends(name: str) -> None:
    """What is asked for has the bits that it has among all; what is remembered is the same."""
    fused, _ = pair(name)
    fused.warned_length = True
    ids, caches = tiny.ids(4, 50), [fused.new_cache(4, capacity=64) for _ in range(2)]
    for steps in (torch.tensor([30, 0, 17, 1]), torch.tensor([20, 0, 1, 0]), torch.tensor([1, 1, 1, 1])):
        at = [torch.tensor(cache.lengths) for cache in caches]
        there = torch.arange(int(steps.max())) < steps[:, None]
        positions = torch.where(there, at[0][:, None] + torch.arange(int(steps.max())), -1)
        some = ids[:, : int(steps.max())]
        every, ends = (
            fused.hidden(some, positions, cache=cache, ends=ends)
            for cache, ends in zip(caches, (False, True), strict=True)
        )
        rows = steps.nonzero()[:, 0]
        assert torch.equal(ends[rows, steps[rows] - 1], every[rows, steps[rows] - 1])
    one, two = (cache.layer(len(fused.spec.decoder.layers) - 1) for cache in caches)
    assert torch.equal(one.k, two.k)
    assert torch.equal(one.v, two.v)


def test_only_the_ends_are_computed() -> None:
    """Of the last layer; else this would be a word without a meaning."""
    fused, _ = pair("llama")
    ids = tiny.ids(2, 9)
    with torch.no_grad():
        every, ends = fused.hidden(ids), fused.hidden(ids, ends=True)
    assert torch.equal(every[:, -1], ends[:, -1])
    assert not torch.equal(every[:, :-1], ends[:, :-1])


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("llama", "layers.1.branches.attn.pre_norm"),
        ("llama-mqa", "layers.1.branches.mlp.pre_norm"),  # ReLU
        ("gemma2-caps", "layers.1.branches.attn.pre_norm"),
        ("gpt2", "layers.0.branches.mlp.pre_norm"),
        ("mistral-window", "layers.0.branches.attn.body.k"),
    ],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@torch.no_grad()
def test_no_number_is_none_afterwards(name: str, where: str, bad: float) -> None:
    """Scores that are none, all of them or some, and infinite ones; what a curve or a cap makes of them."""
    fused, _ = pair(name)
    weight = fused.decoder.get_submodule(where).weight
    weight.view(-1)[3] = bad
    for ids in (tiny.ids(1, 1), tiny.ids(2, 7), tiny.ids(1, 60)):
        native, readable = fused.hidden(ids), fused.hidden(ids, how="explicit")
        assert torch.equal(native.isfinite(), readable.isfinite())
    assert not native.isfinite().all()


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, for tangents
def test_tangents_are_not_lost() -> None:
    """The native blocks know none; PyTorch's fused attention says that it has none."""
    fused, plain = pair("llama")
    ids, along = tiny.ids(1, 9), torch.randn(1, 9, fused.spec.d_model, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), forward_ad.dual_level():
        x = forward_ad.make_dual(fused.embed(ids, torch.arange(9)[None]), along)
        found = [
            forward_ad.unpack_dual(model.hidden(ids, start=(0, x), how="explicit")).tangent for model in (fused, plain)
        ]
        assert apart(*found) <= BOUND
        with pytest.raises(NotImplementedError, match="forward AD"):
            fused.hidden(ids, start=(0, x))


MEMORY = """
import resource, sys, torch, cutaway, cutaway.errors
torch.set_grad_enabled(False)
words = {"d_model": 64, "n_heads": 4, "layers": 1, "vocab_size": 50, "d_ff": 4096}
model = cutaway.build(words, seed=0).transformer.eval()
model.hidden(torch.zeros(1, 2, dtype=torch.long))
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]) * 1000**2,) * 2)
try:
    model.hidden(torch.zeros(1, 20000, dtype=torch.long))
except cutaway.errors.ResourceError:
    print("little memory")
except (RuntimeError, MemoryError):
    print("torch says so")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory as Linux has them")
def test_little_memory_is_an_error() -> None:
    """Rather than the end of the process."""
    said = []
    for limit in (120, 250):
        done = subprocess.run([sys.executable, "-c", MEMORY, str(limit)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert "little memory\n" in said


THREADS = """
import os, resource, torch, cutaway
torch.set_grad_enabled(False)
torch.set_num_threads(1)
words = {"d_model": 16, "n_heads": 2, "layers": 1, "vocab_size": 50}
model = cutaway.build(words, seed=0).transformer.eval()
before = model.hidden(torch.arange(8)[None])
torch.set_num_threads(2)
if os.getuid() == 0:  # whom no limit stops
    os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
assert torch.equal(model.hidden(torch.arange(8)[None]), before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of threads as Linux has them")
def test_no_more_threads() -> None:
    """Those that there are do all."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_who_watches_gets_the_readable_block() -> None:
    fused, plain = pair("llama")
    ids = tiny.ids(1, 9)
    loss = fused(ids).square().mean()  # gradients are wanted
    loss.backward()
    assert next(iter(fused.parameters())).grad is not None
    seen = []
    layer = fused.decoder.layers[1]
    handle = layer.register_forward_hook(lambda *_: seen.append("block"))
    inner = next(module for module in layer.modules() if isinstance(module, Linear))
    with torch.no_grad():
        fused(ids)
        handle.remove()
        inner.register_forward_hook(lambda *_: seen.append("product"))
        fused(ids)
    assert seen == ["block", "product"]
    with torch.no_grad():
        assert apart(fused(ids), plain(ids)) <= BOUND


@torch.no_grad()
def test_weights_that_change() -> None:
    """In place, or for others."""
    fused, plain = pair("llama")
    ids = tiny.ids(1, 9)
    before = fused(ids)
    for model in (fused, plain):
        for parameter in model.parameters():
            parameter.mul_(1.01)
    assert apart(fused(ids), plain(ids)) <= BOUND
    assert apart(fused(ids), before) > BOUND
    other = tiny.transformer("llama")
    fused.load_state_dict(other.state_dict(), assign=True)
    assert apart(fused(ids), other(ids)) <= BOUND
    for model in (fused, other):
        body = model.decoder.layers[0].branches["attn"].body
        body.q.weight.data = body.q.weight.data * 2
    assert apart(fused(ids), other(ids)) <= BOUND


@torch.no_grad()
def test_other_numbers_than_floats(tmp_path: Path) -> None:
    """In half precision, and in training, the plain blocks run."""
    model = tiny.transformer("llama").to(torch.bfloat16)
    assert not model.use_kernels()
    assert model(tiny.ids(1, 5)).dtype is torch.bfloat16
    fused, _ = pair("llama")
    fused.to(torch.bfloat16)
    assert fused(tiny.ids(1, 5)).dtype is torch.bfloat16


def test_switched_off() -> None:
    fused, plain = pair("llama")
    fused.use_kernels(False)
    assert fused.decoder.whole is None
    with torch.no_grad():
        assert torch.equal(fused(tiny.ids(1, 9)), plain(tiny.ids(1, 9)))


@torch.no_grad()
def test_no_tokens_and_nothing_but_pads() -> None:
    fused, plain = pair("llama")
    assert fused(torch.empty(1, 0, dtype=torch.long)).shape == (1, 0, 64)
    ids, positions = tiny.ids(2, 3), torch.tensor([[-1, -1, -1], [0, 1, -1]])
    there = positions >= 0
    assert apart(fused(ids, positions)[there], plain(ids, positions)[there]) <= BOUND
    session = Session(fused, 2)
    session.feed([[5], [6, 7]])
    session.feed([[], [8]])
    other = Session(plain, 2)
    other.feed([[5], [6, 7]])
    assert apart(session.feed([[1], [2]]), (other.feed([[], [8]]), other.feed([[1], [2]]))[1]) <= BOUND
