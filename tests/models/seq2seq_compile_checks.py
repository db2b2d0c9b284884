"""Compiled encoder–decoders: a graph for each kind of layer, and none for a step, a length or a source.

Run by ``test_seq2seq.py``, in a process of its own: see ``test_compile.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from tests.reference import tiny_seq2seq as tiny
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from cutaway.models import Transformer


@pytest.fixture(autouse=True)
def fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pair(name: str, **options: object) -> tuple[Transformer, Transformer]:
    plain = tiny.transformer(name)
    compiled = copy.deepcopy(plain)
    compiled.compile_blocks(**options)  # type: ignore[arg-type]
    return plain, compiled


def steps(models: tuple[Transformer, Transformer], source: Tensor, target: Tensor, prompt: int) -> Iterator[None]:
    """A source, a prompt and single steps through both, compared."""
    rows = source.shape[0]
    caches = [model.new_cache(rows, capacity=9, source=model.read(source)) for model in models]
    for part in target.split([prompt] + [1] * (target.shape[1] - prompt), 1):
        one, two = (model(part, cache=cache) for model, cache in zip(models, caches, strict=True))
        assert float((one - two).abs().max()) <= 1e-4
        yield


QUICK = "t5-v1.1"
EACH = [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in tiny.FAMILIES]


@pytest.mark.parametrize("name", EACH)
@torch.no_grad()
def test_no_step_is_compiled_again(name: str) -> None:
    """Buffers grow from 9 on the way; another source, another batch, another length have their graphs already."""
    counter = CompileCounter()
    models = pair(name, backend=counter)
    seen = []
    for _ in steps(models, tiny.ids(7, 11), tiny.ids(7, 40, seed=2), 5):
        seen.append(counter.frame_count)
    assert seen[0] == 2  # a kind of layer in either stack
    assert set(seen[1:]) == {3}  # and the decoder's single step
    for rows, n, prompt in ((3, 17, 6), (9, 30, 13)):
        for _ in steps(models, tiny.ids(rows, n), tiny.ids(rows, 18, seed=3), prompt):
            assert counter.frame_count == 3


@torch.no_grad()
def test_ragged_sources_and_rows_picked_out() -> None:
    counter = CompileCounter()
    plain, compiled = pair("t5-v1.1", backend=counter)
    places = torch.stack([torch.arange(12), torch.arange(-5, 7).clamp(min=-1), torch.arange(12)])
    sources = [model.read(tiny.ids(3, 12), places) for model in (plain, compiled)]
    caches = [model.new_cache(3, source=source) for model, source in zip((plain, compiled), sources, strict=True)]
    rows, first = 3, 0
    for step in range(12):
        part = tiny.ids(rows, 1, seed=step)
        one, two = (model(part, cache=cache) for model, cache in zip((plain, compiled), caches, strict=True))
        assert float((one - two).abs().max()) <= 1e-4
        if step == 5:
            rows = 4
            for cache in caches:
                cache.select([1, 0, 1, 2])
        first = counter.frame_count if step == 1 else first  # one key alone is a case of its own
    assert counter.frame_count == first


def test_training() -> None:
    """Gradients are the same through compiled blocks of both stacks."""
    counter = CompileCounter()
    models = pair("bart", backend=counter)
    for model in models:
        model.train()
        model(tiny.ids(2, 9, seed=2), source=model.read(tiny.ids(2, 13))).square().mean().backward()
    for (name, one), two in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, atol=1e-4, rtol=1e-3, msg=name)
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5-v1.1", "bart"])
@torch.no_grad()
def test_real_compiler(name: str) -> None:
    """Through inductor and the machine's C++ compiler: the same numbers."""
    for _ in steps(pair(name), tiny.ids(2, 13), tiny.ids(2, 25, seed=2), 4):
        pass
