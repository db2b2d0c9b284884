"""A pass that is watched: what nobody looks into runs natively, and what is seen is the readable blocks' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cutaway.inspection import Recorder, scale, trace
from cutaway.kernels import library
from cutaway.models import Transformer
from cutaway.modules.block import Block
from cutaway.spec.names import tap_names
from tests.reference import tiny, tiny_seq2seq

pytestmark = pytest.mark.skipif(library() is None, reason="no native kernels were built here")
PROMPTS, MORE = [[5, 9, 7, 11, 23, 4, 30, 8, 17, 2], [8, 31, 3]], 3
AT = "decoder.layers"


def native(case: str) -> Transformer:
    model = tiny.transformer(case)
    assert model.use_kernels()
    return model


def blocks(monkeypatch: pytest.MonkeyPatch, model: Transformer, *names: str, **options: Any) -> list[int]:
    """Which layers the readable block ran."""
    seen: list[int] = []
    plain = nn.Module.__call__

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, Block):
            seen.append([*model.decoder.layers].index(self))
        return plain(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", called)  # a block's own forward would be called for its own sake
        trace(model, PROMPTS, names, **options)
    return seen


def test_only_what_is_looked_into_is_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = native("llama")
    assert blocks(monkeypatch, model, f"{AT}.1.attn.z") == [1]
    assert blocks(monkeypatch, model, f"{AT}.1.attn.resid") == [1]  # between its branches
    assert blocks(monkeypatch, model, "*.attn.z") == [0, 1, 2]
    for names in (("embed.out", "logits", "decoder.norm.*"), ("*.resid_in",), ("*.mlp.resid", f"{AT}.1.resid_in")):
        assert blocks(monkeypatch, model, *names) == []
        assert blocks(monkeypatch, model, *names, max_tokens=2) == []
    assert blocks(monkeypatch, model, "logits", edits={f"{AT}.2.mlp.act": scale(2.0)}) == [2]
    assert blocks(monkeypatch, model, "logits", edits={f"{AT}.2.resid_in": scale(2.0)}) == []
    start = (f"{AT}.1.resid_in", torch.randn(2, 10, 32))
    assert blocks(monkeypatch, model, f"{AT}.2.attn.q", start=start) == [2]
    assert blocks(monkeypatch, model, "logits", start=start) == []


@pytest.mark.parametrize(
    "case", ["llama", "gemma3-caps", "mistral-window", "gpt2", "stablelm-parallel", "mixtral-window", "bloom", "qwen3"]
)
def test_each_name_alone_is_what_all_together_are(case: str) -> None:
    """Ragged, through steps with a cache, the rest of the model by whichever way runs it."""
    model = native(case)
    readable = tiny.transformer(case)
    whole = trace(readable, PROMPTS, ("*",), max_tokens=MORE)
    names = [*tap_names(model.spec)]
    for name in {*names[::5], *(n for n in names if ".1." in n), "logits", f"{AT}.2.resid_in"}:
        found = trace(model, PROMPTS, (name,), max_tokens=MORE)
        assert found.tokens == whole.tokens
        torch.testing.assert_close(found[name], whole[name], rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", [f"{AT}.1.resid_in", f"{AT}.1.mlp.resid", f"{AT}.1.attn.resid", f"{AT}.0.attn.v"])
def test_edits_between_native_layers(name: str) -> None:
    model, readable = native("llama"), tiny.transformer("llama")
    edits = {name: scale(1.7, positions=slice(2, None))}
    found, wanted = (trace(one, PROMPTS, ("logits", name), edits, max_tokens=MORE) for one in (model, readable))
    assert found.tokens == wanted.tokens
    for one in ("logits", name):
        torch.testing.assert_close(found[one], wanted[one], rtol=1e-4, atol=1e-4, equal_nan=True)


def test_in_a_training_step_all_is_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients go through what is kept and what is not, kernels or not."""
    model, readable = native("llama"), tiny.transformer("llama")
    grads = []
    for one in (model, readable):
        one.train()
        tap = Recorder.of(one.spec, f"{AT}.1.attn.z", grads=True)
        one(torch.tensor(PROMPTS[:1]), tap=tap)[0, -1, 3].backward()
        grads.append(tap.kept[f"{AT}.1.attn.z"][0].grad)
        assert all(p.grad is not None for p in one.parameters())
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


def test_an_encoder_decoder_is_watched_in_part() -> None:
    model, readable = tiny_seq2seq.transformer("bart"), tiny_seq2seq.transformer("bart")
    model.use_kernels()
    for name in ("encoder.layers.1.attn.weights", "decoder.layers.0.cross.weights", "decoder.layers.1.resid_in"):
        found, wanted = (trace(one, [[2], [2, 5]], (name,), sources=PROMPTS, max_tokens=2) for one in (model, readable))
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-4, equal_nan=True)
