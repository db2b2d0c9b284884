"""A token at a time by one native call: the very bits of the general pass, and not where somebody looks."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway
from cutaway.generation.session import Session
from cutaway.kernels import alone, library
from cutaway.model import Model
from tests.reference import tiny

pytestmark = pytest.mark.skipif(library() is None, reason="there is no native library here")
# Rotary and learned positions, windows, scaled embeddings, biases in the head, untied heads, rows' own lengths.
NAMES = ["llama", "gemma3", "gpt2", "mistral-window", "phi", "granite", "llama-dynamic"]


def model_of(name: str) -> Model:
    model = Model(tiny.transformer(name))
    model.transformer.warned_length = True
    assert model.transformer.steps is not None
    return model


def fed(model: Model, rows: Sequence[Sequence[int]], steps: int, **kind: bool) -> torch.Tensor:
    session = Session(model.transformer, len(rows), 4, **kind)  # so small that it grows
    session.feed(rows)
    out = [session.feed([[(5 + 7 * row + i) % 60] for row in range(len(rows))]) for i in range(steps)]
    return torch.stack(out)


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits(name: str, steady: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one row and of ragged ones, past windows and while buffers grow."""
    model = model_of(name)
    for rows in ([[3, 4, 5]], [[3], [4, 5, 6, 7, 8], [9, 9]]):
        found = fed(model, rows, 30, steady=steady)
        with monkeypatch.context() as patch:
            patch.setattr(model.transformer, "steps", None)
            assert torch.equal(found, fed(model, rows, 30, steady=steady))


def test_new_weights_are_seen() -> None:
    """A weight replaced, moved or written to between two tokens, in a block, the last norm, and the table."""
    model = model_of("llama")
    layer: Any = model.transformer.get_submodule("decoder.layers.1.branches.mlp.body")
    changes = [
        lambda: setattr(layer.up, "weight", torch.nn.Parameter(layer.up.weight * 1.5)),
        lambda: setattr(layer.down.weight, "data", layer.down.weight.data * 0.5),
        lambda: model.transformer.decoder.norm.weight.data.mul_(1.25),
        lambda: setattr(model.transformer.embed, "tokens", torch.nn.Parameter(model.transformer.embed.table * 1.1)),
    ]
    for change in changes:
        session = Session(model.transformer)
        session.feed([[3, 4, 5]])
        session.feed([[6]])
        session.feed([[7]])
        change()
        twin = Session(copy.deepcopy(model.transformer))
        twin._cache = session._cache.fork([0])
        twin.tokens = [list(session.tokens[0])]
        twin.model.steps = None
        assert torch.equal(session.feed([[8]]), twin.feed([[8]]))


@pytest.mark.parametrize(
    "where", ["embed", "head", "decoder", "decoder.norm", "decoder.layers.0", "decoder.layers.1.branches.mlp.body.up"]
)
def test_hooks_are_called(where: str) -> None:
    model = model_of("llama")
    session = Session(model.transformer)
    session.feed([[3, 4, 5]])
    session.feed([[6]])
    calls: list[int] = []
    handle = model.transformer.get_submodule(where).register_forward_hook(lambda *_: calls.append(1))
    session.feed([[7]])
    assert calls
    handle.remove()
    session.feed([[8]])
    assert len(calls) == 1


def test_with_a_table_from_a_file(tmp_path: Path) -> None:
    """Blocks as they are stored, and a head of its own."""
    model = cutaway.load(tiny.write(tiny.config("llama"), tmp_path / "m"), quantize="q8_0")
    assert model.transformer.steps is not None
    found = fed(model, [[3, 4, 5], [6]], 8)
    model.transformer.steps = None
    assert torch.equal(found, fed(model, [[3, 4, 5], [6]], 8))


def test_a_model_goes_at_once() -> None:
    """Without a collection of garbage, also a copy and one that was pickled."""
    model = model_of("llama")
    fed(model, [[3]], 3)
    sent = pickle.loads(pickle.dumps(model.transformer))  # noqa: S301 (our own bytes)
    for made in (model.transformer, copy.deepcopy(model.transformer), sent):
        assert made.steps is not None
        session = Session(made)
        session.feed([[3, 4]])
        session.feed([[5]])
        session.feed([[6]])
        gone = weakref.ref(made)
        del session
    gc.disable()
    try:
        del model, made, sent
        assert gone() is None
    finally:
        gc.enable()


def test_one_thread_for_a_while() -> None:
    torch.set_num_threads(2)
    try:
        with alone(100):
            assert torch.get_num_threads() == 1
            with alone(100):
                pass
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(ValueError, match="x"), alone():
            raise ValueError("x")
        assert torch.get_num_threads() == 2
        with alone(1 << 30):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
