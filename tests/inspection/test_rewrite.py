"""Rewrites leave the answer as it was, say what they did, and are refused where they would not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cutaway
from cutaway.errors import CutawayError, RequestError
from cutaway.generation.session import Session
from cutaway.inspection import Rewritten, centre_unembedding, centre_writes, fold_norms, rewrite, trace
from cutaway.kernels import Stored, missing
from cutaway.model import Model
from cutaway.models import Transformer
from cutaway.modules.norm import Norm
from cutaway.spec.check import check
from cutaway.spec.parameters import parameter_shapes
from tests.reference import tiny, tiny_encoders, tiny_seq2seq

IDS = tiny.ids(2, 12)
SOURCE = tiny.ids(2, 7, seed=3)
MORE = ("llama-biases", "gpt2-untied", "stablelm-parallel-mha", "bloom-untied", "mpt-logit-scale", "gemma2-caps")
ENCODERS = ("modernbert-mlm", "modernbert-mlm-untied", "modernbert-labels", "modernbert-tokens", "modernbert-biases",
            "modernbert-mean")  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "shaw": {"positions": "shaw", "norm": "layer"},
    "alibi": {"positions": "alibi", "norm": "layer", "activation": "gelu", "gated": False},
    "rms with a bias": {"norm": {"kind": "rms", "bias": True}, "qk_norm": "head"},
    "encoder": {"kind": "encoder", "types": 3, "norm": "layer", "positions": "learned", "causal": False},
    "both": {"encoder_layers": 2, "norm": "layer", "positions": "learned", "branch_scale": 0.5},
    "labels": {"labels": ["a", "b", "c"], "pool": "last", "norm": "layer"},
    "mean labels": {"labels": ["a", "b", "c"], "pool": "mean", "norm": "layer", "head_transform": True},
    "vector": {"pool": "first", "norm": "layer", "head_transform": True},
    "shared": {"norm": "layer", "parallel": True, "shared_norm": True},
    "experts": {"norm": "rms", "experts": {"n_experts": 3, "top_k": 2}, "tied": False},
    "no bias": {"norm": "layer", "bias": False, "embed_scale": 2.0},
}


def recipe(words: dict[str, Any]) -> Transformer:
    common = {"d_model": 32, "n_heads": 4, "n_kv_heads": 2, "layers": 2, "vocab_size": 64, "max_positions": 32}
    model = cutaway.build({**common, **({} if "experts" in words else {"bias": True}), **words}).transformer
    tiny.scale_randomly(model, norm_mean=1.0)
    return model.eval()


def made(name: str) -> Transformer:
    if name in RECIPES:
        return recipe(RECIPES[name])
    if name in tiny_encoders.CASES:
        return tiny.transformer(tiny_encoders.config(name))
    return tiny_seq2seq.transformer(name) if name in tiny_seq2seq.CASES else tiny.transformer(name)


@torch.no_grad()
def answer(model: Transformer) -> Tensor:
    source = None if model.spec.source is None else model.read(SOURCE)
    return model(IDS, source=source)


def difference(one: Tensor, two: Tensor) -> float:
    return float((one - two).abs().max())


def norms(model: Transformer) -> dict[str, Norm]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Norm)}


WRITES = ("gemma3", "gemma3-caps", "olmo2", "gemma2", "gemma2-caps")


def holds(before: Transformer, state: dict[str, Tensor], found: Rewritten) -> None:
    """A sound spec, another model's weights, and the first as it was."""
    check(found.model.spec)
    shapes = {name: tuple(p.shape) for name, p in found.model.named_parameters()}
    assert shapes == parameter_shapes(found.model.spec)
    now = dict(before.named_parameters())
    assert all(torch.equal(now[name].detach(), value) for name, value in state.items())
    ours = {p.data_ptr() for p in now.values() if not isinstance(p, Stored)}
    assert not ours & {p.data_ptr() for p in found.model.parameters() if not isinstance(p, Stored)}
    new = dict(found.model.named_parameters())
    assert {n for n in new if n not in state or not torch.equal(new[n].detach(), state[n])} <= set(found.changed)
    assert set(found.gone) == set(state) - set(new)
    json.dumps(found.as_dict())
    (rows,) = found.figure().parts
    assert len(rows.rows) == len(found.changed) + len(found.gone) + len(found.kept)


def kept_state(model: Transformer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ── case I01 ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name", [*tiny.FAMILIES, *MORE, "t5", "t5-v1.1", "t5-untied-scaled", *ENCODERS, *RECIPES], ids=str
)
def test_folded_norms(name: str) -> None:
    """Case I01: logits as they were, with random norm weights and biases; every norm that is left only divides."""
    model = made(name)
    state = kept_state(model)
    found = fold_norms(model, partly=name in WRITES)
    holds(model, state, found)
    assert difference(answer(model), answer(found.model)) <= 1e-4
    left = norms(found.model)
    for key, norm in left.items():
        if key in dict(found.kept):
            assert torch.equal(norm.weight, norms(model)[key].weight)
        else:
            assert torch.equal(norm.weight + norm.spec.offset, torch.ones_like(norm.weight))
            assert norm.bias is None
    assert len(found.kept) < len(left)
    writes = [key for key, _ in found.kept if "out_norm" in key]
    assert bool(writes) == (name in WRITES)
    if found.model.spec.generates:
        assert not found.model.spec.lm.tied


@pytest.mark.slow
@pytest.mark.parametrize("name", [*tiny.CASES, *tiny_seq2seq.CASES, *tiny_encoders.CASES])
def test_every_rewrite_of_every_option(name: str) -> None:
    """Neutral or refused by name, wherever."""
    model = made(name)
    state = kept_state(model)
    for way in (fold_norms, lambda m: fold_norms(m, partly=True), centre_writes, centre_unembedding):
        found, why = attempted(way, model)
        if found is None:
            assert any(word in why for word in FEATURES), why
            continue
        holds(model, state, found)
        one, two = answer(model), answer(found.model)
        if found.neutral != "logits":
            one, two = one.log_softmax(-1), two.log_softmax(-1)
        assert difference(one, two) <= 1e-4


def attempted(rewrite: Callable[[Transformer], Rewritten], model: Transformer) -> tuple[Rewritten | None, str]:
    try:
        return rewrite(model), ""
    except RequestError as error:
        return None, str(error)


FEATURES = ("post_norm", "out_norm", "kind rms", "no norm", "soft_cap", "norm of the embedding", "sinusoidal",
            "scores no tokens", "experts", "read by a matrix")  # fmt: skip


def test_a_folded_model_in_the_reference(tmp_path: Path) -> None:
    """Written as a Llama, transformers reads it and finds the logits of the first."""
    from transformers import AutoModelForCausalLM

    tiny.write(tiny.config("llama"), tmp_path / "first")
    model = cutaway.load(tmp_path / "first")
    folded = fold_norms(model.transformer).model
    cutaway.save(Model(folded), tmp_path / "folded")
    kind = AutoModelForCausalLM
    first, second = (kind.from_pretrained(tmp_path / n, dtype=torch.float32).eval() for n in ("first", "folded"))
    weights = dict(second.named_parameters())
    assert all(bool((value == 1).all()) for name, value in weights.items() if "norm" in name)
    with torch.no_grad():
        assert difference(first(IDS).logits, second(IDS).logits) <= 1e-4


def test_a_folded_model_is_a_model(tmp_path: Path) -> None:
    """It goes on with a cache and through kernels, is saved and read; what GPT-2's config cannot say is refused."""
    model = tiny.transformer("gpt2")
    model.use_kernels()
    folded = fold_norms(model).model
    assert (folded.decoder.whole is None) == (model.decoder.whole is None)
    plain, fed = Session(model), Session(folded)
    for row in ([3, 4, 5, 6], [7], [8]):
        assert difference(plain.feed([row]), fed.feed([row])) <= 1e-4
    cutaway.save(Model(folded), tmp_path / "ours", format="cutaway")
    again = cutaway.load(tmp_path / "ours").transformer
    assert again.spec == folded.spec
    assert difference(answer(again), answer(folded)) == 0
    with pytest.raises(CutawayError):
        cutaway.save(Model(folded), tmp_path / "theirs")


# ── case I02 ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name", [*tiny.FAMILIES, "gemma2-uncapped", "t5", "bart", "marian-swish", "bert-mlm", "granite-biases"]
)
def test_a_centred_unembedding(name: str) -> None:
    """Case I02: log-probabilities as they were, logits not; refused where a cap comes after."""
    model = made(name)
    if model.spec.lm.soft_cap is not None:
        with pytest.raises(RequestError, match="soft_cap") as caught:
            centre_unembedding(model)
        assert caught.value.field == "head/soft_cap"
        return
    state = kept_state(model)
    found = centre_unembedding(model)
    holds(model, state, found)
    one, two = answer(model), answer(found.model)
    assert difference(one.log_softmax(-1), two.log_softmax(-1)) <= 1e-4
    assert difference(one, two) > 1e-3
    assert difference(two - two.mean(-1, keepdim=True), two) <= 1e-4
    assert found.neutral == "log-probabilities"
    assert difference(answer(model), one) == 0


def test_capped_logits_would_not_survive_it() -> None:
    """What the refusal is for: shifted before Gemma 2's cap, log-probabilities are others."""
    model = tiny.transformer("gemma2-caps")
    one = answer(model).log_softmax(-1)
    raw = torch.atanh(answer(model) / model.spec.lm.soft_cap)
    two = torch.tanh(raw - raw.mean(-1, keepdim=True)) * model.spec.lm.soft_cap
    assert difference(one, two.log_softmax(-1)) > 1e-2


# ── centred writes ───────────────────────────────────────────────────────────────────────────────────────────

LAYERED = ("stablelm", "stablelm-parallel", "gpt-neox", "gpt-neox-sequential", "gptj", "phi", "phi-qk-norm",
           "falcon-40b", "falcon-rw", "mpt", "gpt2", "gpt2-untied")  # fmt: skip


@pytest.mark.parametrize("name", [*LAYERED, "shaw", "alibi", "encoder", "both", "labels", "shared", "no bias"])
def test_centred_writes(name: str) -> None:
    """Logits as they were, and the stream has mean zero at every point of it."""
    model = made(name)
    state = kept_state(model)
    found = centre_writes(model)
    holds(model, state, found)
    assert difference(answer(model), answer(found.model)) <= 1e-4
    more = {} if model.spec.source is None else {"sources": SOURCE.tolist()}
    was, now = (trace(m, IDS.tolist(), ("*resid*", "*embed.out"), **more) for m in (model, found.model))
    assert max(float(stream.mean(-1).abs().max()) for stream in now.values()) <= 1e-5
    assert min(float(stream.mean(-1).abs().max()) for stream in was.values()) > 1e-3


def test_all_of_them_one_after_another() -> None:
    """As an analysis may want it: no means, no weights of norms, scores about zero."""
    model = tiny.transformer("gpt2")
    centred = centre_writes(model).model
    folded = fold_norms(centred).model
    last = centre_unembedding(folded).model
    assert difference(answer(model), answer(folded)) <= 1e-4
    assert difference(answer(model).log_softmax(-1), answer(last).log_softmax(-1)) <= 1e-4
    stream = trace(last, IDS.tolist(), ("decoder.layers.2.mlp.resid",))["decoder.layers.2.mlp.resid"]
    assert float(stream.mean(-1).abs().max()) <= 1e-5


# ── stored weights, half floats ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(bool(missing()), reason="stored weights need the native library")
def test_stored_weights(tmp_path: Path) -> None:
    """What changes becomes numbers; what does not stays as it is stored."""
    tiny.write(tiny.config("llama-tied"), tmp_path)
    model = cutaway.load(tmp_path, quantize="q8_0").transformer
    found = fold_norms(model)
    assert difference(answer(model), answer(found.model)) <= 1e-4
    new = dict(found.model.named_parameters())
    stored = {name for name, p in new.items() if isinstance(p, Stored)}
    assert not stored & set(found.changed)
    assert "embed.tokens" in stored
    assert "decoder.layers.0.branches.attn.body.out.weight" in stored
    own = dict(model.named_parameters())
    assert all(new[name].raw.data_ptr() != own[name].raw.data_ptr() for name in stored)
    assert all(p.requires_grad != isinstance(p, Stored) for p in new.values())
    assert difference(answer(model).log_softmax(-1), answer(centre_unembedding(model).model).log_softmax(-1)) <= 1e-4


def test_large_matrices_are_rewritten_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few rows, the last of fewer, give the same numbers as all at once."""
    models = [made(name) for name in ("gpt2", "mixtral-window")]
    whole = [[*fold_norms(model).model.parameters(), *centre_unembedding(model).model.parameters()] for model in models]
    monkeypatch.setattr(rewrite, "PIECE", 5 * 32)
    parts = [[*fold_norms(model).model.parameters(), *centre_unembedding(model).model.parameters()] for model in models]
    for one, two in zip(whole, parts, strict=True):
        assert all(difference(a.detach(), b.detach()) <= 1e-6 for a, b in zip(one, two, strict=True))


def test_half_floats_stay_half() -> None:
    model = tiny.transformer("llama").bfloat16()
    found = fold_norms(model).model
    assert {p.dtype for p in found.parameters()} == {torch.bfloat16}
    assert difference(answer(model).float(), answer(found).float()) < 1.0


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────

REFUSED: list[tuple[Callable[[Transformer], Rewritten], str, str]] = [
    (fold_norms, "bart", "post_norm"),
    (fold_norms, "bert-mlm", "post_norm"),
    (fold_norms, "gemma2", "out_norm"),
    (fold_norms, "gemma3", "out_norm"),
    (fold_norms, "olmo2", "out_norm"),
    (lambda m: fold_norms(m, partly=True), "bart", "read by a matrix"),
    (centre_writes, "llama", "kind rms"),
    (centre_writes, "t5", "kind rms"),
    (centre_writes, "olmo2", "out_norm"),
    (centre_writes, "bart", "norm of the embedding"),
    (centre_writes, "marian", "sinusoidal"),
    (centre_writes, "bloom", "norm of the embedding"),
    (centre_writes, "modernbert-mlm", "norm of the embedding"),
    (centre_unembedding, "gemma2", "soft_cap"),
    (centre_unembedding, "modernbert-labels", "scores no tokens"),
    (centre_unembedding, "vector", "scores no tokens"),
]


@pytest.mark.parametrize(("rewrite", "name", "word"), REFUSED)
def test_refusals(rewrite: Callable[[Transformer], Rewritten], name: str, word: str) -> None:
    """By the name of what does not allow it, and the model as it was."""
    model = made(name)
    state = kept_state(model)
    with pytest.raises(RequestError, match=word) as caught:
        rewrite(model)
    assert caught.value.field
    assert all(torch.equal(p.detach(), state[key]) for key, p in model.named_parameters())


def test_more_refusals() -> None:
    words = {"norm": "layer", "experts": {"n_experts": 3, "top_k": 2}}
    with pytest.raises(RequestError, match="experts and routers have none"):
        fold_norms(recipe(words))
    with pytest.raises(RequestError, match="no norm"):
        centre_writes(recipe({"norm": "layer", "where": "none"}))
    with pytest.raises(RequestError, match="post_norm"):
        centre_writes(recipe({"norm": "layer", "where": "post", "positions": "learned"}))


def test_no_weight_is_touched_by_default() -> None:
    """Case I02: what nobody rewrote has the reference's logits; see test_families for all of them."""
    model = tiny.transformer("gpt2")
    state = kept_state(model)
    trace(model, IDS.tolist(), ("*",))
    assert all(torch.equal(p.detach(), state[name]) for name, p in model.named_parameters())
