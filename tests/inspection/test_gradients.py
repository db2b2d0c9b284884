"""Slopes, integrated gradients, occlusion and attribution patching, beside captum on transformers' models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from captum.attr import (
    InputXGradient,
    IntegratedGradients,
    LayerActivation,
    LayerGradientXActivation,
    Occlusion,
    Saliency,
)
from torch import Tensor

import cutaway
from cutaway.errors import NameNotFound, RequestError
from cutaway.inspection import (
    Attribution,
    attribution_patching,
    integrated_gradients,
    logprob,
    occlusion,
    saliency,
    trace,
)
from cutaway.kernels import Stored, missing
from cutaway.models import Transformer
from tests.reference import tiny, tiny_encoders, tiny_seq2seq

IDS = tiny.ids(1, 9)[0].tolist()
SOURCE = tiny.ids(1, 6, seed=3)[0].tolist()
OTHER = [7, *IDS[1:4], 40, *IDS[5:]]
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


@dataclass(frozen=True)
class Pair:
    """Our model, and transformers' as a function of its vectors.

    Attributes:
        ours: the model.
        theirs: transformers'.
        inputs: its vectors of the same tokens, as captum takes them.
        scores: vectors → scores of all tokens at the last place, or of labels.
        said: what ours is given beside the ids.
        of: what is explained, as ours says it, and of those scores.
        rows: ids → vectors.
    """

    ours: Transformer
    theirs: Any
    inputs: tuple[Tensor, ...]
    scores: Callable[..., Tensor]
    said: dict[str, Any]
    of: tuple[Any, Callable[[Tensor], Tensor]]
    rows: Callable[[Tensor], Tensor]

    def forward(self, *vectors: Tensor) -> Tensor:
        return self.of[1](self.scores(*vectors))


def _causal(folder: Path, ours: Transformer, of: tuple[Any, Any], position: int | None = None) -> Pair:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    rows = theirs.get_input_embeddings()
    place = -1 if position is None else position
    return Pair(
        ours,
        theirs,
        (rows(torch.tensor([IDS])).detach(),),
        lambda x: theirs(inputs_embeds=x, use_cache=False).logits[:, place],
        {} if position is None else {"position": position},
        of,
        rows,
    )


def _decoder(name: str, folder: Path, of: tuple[Any, Any], position: int | None = None) -> Pair:
    tiny.write(tiny.config(name), folder)
    return _causal(folder, cutaway.load(folder).transformer, of, position)


def _stored(folder: Path) -> Pair:
    """Blocks of eight bits; transformers gets the numbers that they stand for."""
    if missing():
        pytest.skip("stored weights need the native library")
    tiny.write(tiny.config("llama-tied"), folder / "plain")
    stored = cutaway.load(folder / "plain", quantize="q8_0")
    assert sum(isinstance(p, Stored) for p in stored.transformer.parameters()) == 3 * 7 + 1
    cutaway.save(stored, folder / "dense")
    return _causal(folder / "dense", stored.transformer, (5, lambda s: s[:, 5]))


def _bert(folder: Path) -> Pair:
    tiny_encoders.write(tiny_encoders.config("bert-labels"), folder)
    theirs = tiny_encoders.reference(folder)
    types = [0, 0, 0, 0, 1, 1, 1, 2, 2]
    rows = theirs.get_input_embeddings()

    def scores(x: Tensor) -> Tensor:
        kinds = torch.tensor([types]).expand(len(x), -1)
        return theirs(inputs_embeds=x, token_type_ids=kinds, attention_mask=torch.ones(x.shape[:2])).logits

    inputs = (rows(torch.tensor([IDS])).detach(),)
    of = ("glad", lambda s: s[:, 1])
    return Pair(cutaway.load(folder).transformer, theirs, inputs, scores, {"types": types}, of, rows)


def _t5(folder: Path) -> Pair:
    tiny_seq2seq.write(tiny_seq2seq.config("t5-v1.1"), folder)
    theirs = tiny_seq2seq.reference(folder)
    rows = theirs.get_input_embeddings()

    def scores(x: Tensor, y: Tensor) -> Tensor:
        return theirs(inputs_embeds=x, decoder_inputs_embeds=y, use_cache=False).logits[:, -1]

    inputs = tuple(rows(torch.tensor([ids])).detach() for ids in (SOURCE, IDS))
    of = ((5, 9), lambda s: s[:, 5] - s[:, 9])
    return Pair(cutaway.load(folder).transformer, theirs, inputs, scores, {"source": SOURCE}, of, rows)


MAKERS: dict[str, Callable[[Path], Pair]] = {
    "gpt2": lambda folder: _decoder("gpt2", folder, ((5, 9), lambda s: s[:, 5] - s[:, 9])),
    "llama": lambda folder: _decoder("llama", folder, (logprob(5), lambda s: s.log_softmax(-1)[:, 5]), 6),
    "gemma2": lambda folder: _decoder("gemma2-caps", folder, (5, lambda s: s[:, 5])),
    "stored": _stored,
    "bert": _bert,
    "t5": _t5,
}


@pytest.fixture(scope="module", params=MAKERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param))


def ours(found: Attribution) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Values and channels, of the source first, as captum has them."""
    values = (found.source_values, found.values)
    channels = (found.source_channels, found.channels)
    return tuple(v for v in values if v is not None), tuple(c for c in channels if c is not None)


def leaves(pair: Pair) -> tuple[Tensor, ...]:
    """What captum would warn about making itself."""
    return tuple(x.clone().requires_grad_() for x in pair.inputs)


def same(mine: tuple[Tensor, ...], theirs: Any) -> None:
    theirs = theirs if isinstance(theirs, tuple) else (theirs,)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        most = float(b.detach().abs().max())
        assert most > 1e-3  # or anything would be close
        torch.testing.assert_close(a, b.detach().view_as(a).float(), rtol=1e-4, atol=2e-5 * max(1.0, most))


# ── captum ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_gradients(pair: Pair) -> None:
    found = saliency(pair.ours, IDS, pair.of[0], **pair.said)
    assert found.value == pytest.approx(float(pair.forward(*pair.inputs).detach()), abs=1e-4)
    wanted = Saliency(pair.forward).attribute(leaves(pair), abs=False)
    values, channels = ours(found)
    same(channels, wanted)
    same(values, tuple(each.norm(dim=-1) for each in wanted))


def test_gradients_times_inputs(pair: Pair) -> None:
    wanted = InputXGradient(pair.forward).attribute(leaves(pair))
    values, channels = ours(saliency(pair.ours, IDS, pair.of[0], times_input=True, **pair.said))
    same(channels, wanted)
    same(values, tuple(each.sum(-1) for each in wanted))


@pytest.mark.parametrize("token", [None, 4])
def test_integrated_gradients(pair: Pair, token: int | None) -> None:
    """From zeros, and from another token in every place; what is left over is what captum says."""
    rows = [0 * x if token is None else pair.rows(torch.full(x.shape[:2], token)) for x in pair.inputs]
    wanted, gap = IntegratedGradients(pair.forward).attribute(
        pair.inputs, tuple(x.detach() for x in rows), n_steps=20, return_convergence_delta=True
    )
    found = integrated_gradients(pair.ours, IDS, pair.of[0], baseline=token, steps=20, batch=7, **pair.said)
    values, channels = ours(found)
    same(channels, wanted)
    same(values, tuple(each.sum(-1) for each in wanted))
    assert found.gap == pytest.approx(float(gap), abs=1e-4)
    assert found.baseline is not None
    total = sum(float(v.sum()) for v in values)
    assert found.gap == pytest.approx(total - (found.value - found.baseline), abs=1e-5)


@pytest.mark.parametrize("window", [1, 3])
def test_occlusion(pair: Pair, window: int) -> None:
    start = tuple(pair.rows(torch.full(x.shape[:2], 4)).detach() for x in pair.inputs)
    shapes = tuple((window, x.shape[-1]) for x in pair.inputs)
    with torch.no_grad():
        wanted = Occlusion(pair.forward).attribute(pair.inputs, shapes, baselines=start)
    found = occlusion(pair.ours, IDS, pair.of[0], baseline=4, window=window, batch=5, **pair.said)
    values, _ = ours(found)
    same(values, tuple(each[..., 0] for each in wanted))


def _places(name: str, theirs: Any) -> list[tuple[str, Any, bool]]:
    """Our name of a quantity, transformers' module, and whether it is what the module reads."""
    if name == "gpt2":
        block = theirs.transformer.h[1]
        return [
            ("decoder.layers.1.mlp.body", block.mlp, False),
            ("decoder.layers.1.attn.z", block.attn.c_proj, True),
            ("decoder.layers.1.mlp.act", block.mlp.c_proj, True),
            ("decoder.layers.1.mlp.resid", block, False),
        ]
    if name in ("llama", "gemma2", "stored"):
        block = theirs.model.layers[1]
        return [
            ("decoder.layers.1.attn.z", block.self_attn.o_proj, True),
            ("decoder.layers.1.attn.v", block.self_attn.v_proj, False),
            ("decoder.layers.1.mlp.act", block.mlp.down_proj, True),
        ]
    if name == "bert":
        block = theirs.bert.encoder.layer[1]
        return [("encoder.layers.1.attn.body", block.attention.output.dense, False)]
    block = theirs.decoder.block[1].layer[1].EncDecAttention
    return [
        ("decoder.layers.1.cross.z", block.o, True),
        ("decoder.layers.1.cross.k", block.k, False),
        ("encoder.layers.0.mlp.act", theirs.encoder.block[0].layer[1].DenseReluDense.wo, True),
    ]


def test_attribution_patching(pair: Pair, request: pytest.FixtureRequest) -> None:
    """Captum's gradient at a layer in the corrupt run, times the difference of captum's activations."""
    name = request.node.callspec.params["pair"]
    two = len(pair.inputs) == 2
    more = {"corrupt_source": SOURCE[::-1]} if two else {}
    texts = (SOURCE[::-1], OTHER) if two else (OTHER,)
    corrupt = tuple(pair.rows(torch.tensor([ids])).detach() for ids in texts)
    places = _places(name, pair.theirs)
    found = attribution_patching(pair.ours, IDS, OTHER, pair.of[0], [place[0] for place in places], **pair.said, **more)
    assert found.clean == pytest.approx(float(pair.forward(*pair.inputs).detach()), abs=1e-4)
    assert found.corrupt == pytest.approx(float(pair.forward(*corrupt).detach()), abs=1e-4)
    for own, module, reads in places:
        slopes = LayerGradientXActivation(pair.forward, module, multiply_by_inputs=False)
        slope = slopes.attribute(corrupt, attribute_to_layer_input=reads)
        kept = LayerActivation(pair.forward, module)
        here, there = (_one(kept.attribute(x, attribute_to_layer_input=reads)) for x in (pair.inputs, corrupt))
        wanted = ((here - there) * _one(slope))[0].detach()
        mine = found[own]
        if found.axes[own][-1] in ("head", "kv_head"):
            wanted = wanted.unflatten(-1, (mine.shape[-1], -1)).sum(-1)
        elif found.axes[own][-1] != "d_ff":
            wanted = wanted.sum(-1)
        same((mine,), wanted)


def _one(value: Any) -> Tensor:
    return value[0] if isinstance(value, tuple) else value


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_occluded_token_is_another_token() -> None:
    """Where the baseline is a token, an answer loses what it loses when the id is changed."""
    model = tiny.transformer("bloom")
    found = occlusion(model, IDS, 5, baseline=11)
    with torch.no_grad():
        texts = [[*IDS[:i], 11, *IDS[i + 1 :]] for i in range(len(IDS))]
        logits = model(torch.tensor([IDS, *texts]))[:, -1, 5]
    torch.testing.assert_close(found.values, logits[0] - logits[1:], rtol=0, atol=2e-5)


def test_a_function_of_the_answer() -> None:
    """Whatever is asked of all logits; and of a model without a head, of its vectors."""
    model = tiny.transformer("gpt2")
    target = saliency(model, IDS, (5, 9), position=3)
    function = saliency(model, IDS, lambda logits: logits[:, 3, 5] - logits[:, 3, 9])
    torch.testing.assert_close(target.channels, function.channels, **CLOSE)
    assert float(target.values[4:].abs().max()) == 0
    bare = tiny.transformer(tiny_encoders.config("modernbert"))
    assert float(saliency(bare, IDS, lambda x: x[:, 2].sum(-1)).values.min()) > 0


def test_more_steps_leave_less_over() -> None:
    """Completeness: the values add up to the difference, the better the more steps."""
    model = tiny.transformer("llama")
    gaps = [abs(float(integrated_gradients(model, IDS, 5, baseline=4, steps=n).gap or 0)) for n in (2, 20, 200)]
    assert gaps[0] > 10 * gaps[1] > 0
    assert gaps[2] <= 1e-3
    rough, smooth = (integrated_gradients(model, IDS, 5, baseline=4, steps=n).notes for n in (2, 200))
    assert "left over is large" in rough[0]
    assert not any("left over is large" in note for note in smooth)


def test_a_vector_as_baseline() -> None:
    model = tiny.transformer("llama")
    mean = model.embed.table.detach().mean(0)
    one = integrated_gradients(model, IDS, 5, baseline=mean, steps=5)
    all_ = integrated_gradients(model, IDS, 5, baseline=mean.expand(len(IDS), -1), steps=5)
    assert torch.equal(one.values, all_.values)
    assert not torch.allclose(one.values, integrated_gradients(model, IDS, 5, steps=5).values, atol=1e-3)


def test_all_quantities_at_once() -> None:
    """Masked scores are −inf in both runs and count for nothing; what the answer does not depend on is zero."""
    for name, more in (("qwen3-moe-listed", {}), ("t5", {"source": SOURCE})):
        maker = tiny_seq2seq if name == "t5" else tiny
        model = maker.transformer(name)
        found = attribution_patching(model, IDS, OTHER, 5, ["*"], position=6, **more)
        assert all(bool(each.isfinite().all()) for each in found.estimates.values())
        whole = found["embed.tokens"]
        assert float(whole.abs().max()) > 1e-3
        assert float(whole[7:].abs().max()) == 0
        assert [i for i, value in enumerate(whole.tolist()) if value] == [0, 4]  # where the texts differ
        stream = [found[f"decoder.layers.{i}.resid_in"] for i in range(2)]
        torch.testing.assert_close(stream[0], found["embed.out"], rtol=0, atol=0)
        assert found["logits"].shape == (len(IDS), 64)


def test_to_first_order_it_is_what_patching_does() -> None:
    """A small part of the way, actually patched in, moves the answer by that part of the estimate."""
    model = tiny.transformer("gpt2")
    name = "decoder.layers.1.attn.z"
    clean = trace(model, [IDS], (name,))[name]
    found = attribution_patching(model, IDS, OTHER, 5, [name])
    base = float(trace(model, [OTHER], ("logits",))["logits"][0, -1, 5])
    for place, head in ((8, 1), (4, 2), (5, 0)):

        def nudged(value: Tensor, place: int = place, head: int = head) -> Tensor:
            value = value.clone()
            value[0, place, head] += 0.02 * (clean - value)[0, place, head]
            return value

        moved = float(trace(model, [OTHER], ("logits",), {name: nudged})["logits"][0, -1, 5]) - base
        assert moved / 0.02 == pytest.approx(float(found[name][place, head]), rel=0.05, abs=3e-3)


def test_nothing_is_left_behind() -> None:
    """Weights get no gradient, whether they would take one or not, and modes stay as they were."""
    model = tiny.transformer("llama")
    one = saliency(model, IDS, 5)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.requires_grad_(False)
    with torch.no_grad():
        two = saliency(model, IDS, 5)
    assert torch.equal(one.channels, two.channels)
    assert not two.channels.requires_grad
    assert torch.equal(attribution_patching(model, IDS, OTHER, 5, ["embed.out"])["embed.out"][5:], torch.zeros(4))


@pytest.mark.skipif(bool(missing()), reason="stored weights need the native library")
def test_stored_weights_are_not_held_as_numbers(tmp_path: Path) -> None:
    """What is kept for the way back is smaller than the matrices: each is made anew."""
    tiny.write(tiny.config("llama-tied"), tmp_path)
    model = cutaway.load(tmp_path, quantize="q8_0").transformer
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        saliency(model, IDS[:2], 5)
    matrices = {tuple(p.shape) for p in model.parameters() if isinstance(p, Stored)}
    assert kept
    assert not any(tuple(t.shape) in matrices or tuple(t.shape[::-1]) in matrices for t in kept)


# ── what cannot be had ───────────────────────────────────────────────────────────────────────────────────────

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no such token": ({"of": 64}, "no such token"),
    "no slope": ({"of": lambda logits: logits[:, -1].argmax(-1).float()}, "no gradient"),
    "no number": ({"of": lambda logits: logits[:, -1]}, "not one number"),
    "no tensor": ({"of": lambda logits: 3.0}, "not one number"),
    "position of a function": ({"of": lambda logits: logits[:, -1, 5], "position": 2}, "every position"),
    "position": ({"position": -10}, "no such position"),
    "source": ({"source": [3]}, "reads one text"),
    "types": ({"types": [0]}, "type for each"),
    "pieces": ({"pieces": ["a"]}, "text for each"),
}


@pytest.mark.parametrize("what", WRONG)
def test_refusals(what: str) -> None:
    said, words = WRONG[what]
    with pytest.raises(RequestError, match=words):
        saliency(tiny.transformer("llama"), **{"ids": IDS, "of": 5, **said})


def test_more_refusals() -> None:
    model = tiny.transformer("llama")
    for baseline, words in ((64, "no such token"), (True, "no such token"), (torch.ones(31), "another shape")):
        for method in (integrated_gradients, occlusion):
            with pytest.raises(RequestError, match=words):
                method(model, IDS, 5, baseline=baseline)
    for said in ({"steps": 0}, {"batch": 0}):
        with pytest.raises(RequestError, match="whole number"):
            integrated_gradients(model, IDS, 5, **said)
    with pytest.raises(RequestError, match="whole number"):
        occlusion(model, IDS, 5, window=10)
    with pytest.raises(RequestError, match="equal length"):
        attribution_patching(model, IDS, OTHER[1:], 5, ["embed.out"])
    with pytest.raises(RequestError, match="no quantity was named"):
        attribution_patching(model, IDS, OTHER, 5, [])
    with pytest.raises(NameNotFound):
        attribution_patching(model, IDS, OTHER, 5, ["decoder.layers.9.*"])
    with pytest.raises(RequestError, match="needs a source"):
        saliency(tiny_seq2seq.transformer("t5"), IDS, 5)
    with pytest.raises(RequestError, match="scores no tokens"):
        saliency(tiny.transformer(tiny_encoders.config("modernbert")), IDS, 5)
    labels = tiny.transformer(tiny_encoders.config("bert-labels"))
    with pytest.raises(RequestError, match="of a whole text"):
        saliency(labels, IDS, "glad", position=2)
    with pytest.raises(RequestError, match="no such label"):
        saliency(labels, IDS, "merry")
    with pytest.raises(RequestError, match="training"):
        saliency(model.train(), IDS, 5)


def test_as_data_and_as_a_figure() -> None:
    model = tiny_seq2seq.transformer("t5")
    told: list[tuple[int, int]] = []
    found = integrated_gradients(
        model, IDS, 5, source=SOURCE, steps=5, batch=2, pieces=list("abcdefghi"),
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert told == [(0, 5), (2, 5), (4, 5), (5, 5)]
    plain = json.loads(json.dumps(found.as_dict()))
    assert plain["pieces"] == list("abcdefghi")
    assert plain["source_pieces"] == [str(i) for i in SOURCE]
    total = sum(plain["values"]) + sum(plain["source_values"])
    assert total == pytest.approx(found.value - found.baseline + found.gap, abs=1e-5)
    source, text = found.figure().parts
    assert (len(source.values), len(text.values), text.scale) == (len(SOURCE), len(IDS), "signed")
    assert "baseline" in " ".join(found.figure().notes)
    assert saliency(model, IDS, 5, source=SOURCE).figure().parts[0].scale == "plain"
    patched = attribution_patching(model, IDS, OTHER, 5, ["*.attn.z", "embed.out", "*.cross.v"], source=SOURCE)
    json.dumps(patched.as_dict())
    titles = {part.title: part for part in patched.figure().parts}
    grid = titles["decoder attn.z by head"]
    assert grid.values[1] == pytest.approx(patched["decoder.layers.1.attn.z"].sum(0).tolist())
    assert list(grid.rows) == ["layer 0", "layer 1"]
    assert list(titles["decoder cross.v by position"].columns) == [str(i) for i in SOURCE]
    assert "guesses" in " ".join(patched.figure().notes)
