"""A number as the sum of its parts: that they add up, and that each is what it is said to be."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import cutaway
from cutaway.errors import NameNotFound, RequestError
from cutaway.inspection import Decomposition, decompose, logprob, trace
from cutaway.kernels import Stored, missing
from cutaway.models import Transformer
from cutaway.modules.norm import Norm
from cutaway.spec import AttentionSpec
from tests.reference import tiny, tiny_encoders, tiny_seq2seq

IDS = tiny.ids(1, 12)[0].tolist()
SOURCE = tiny.ids(1, 7, seed=3)[0].tolist()
PLACE = 8
SUMS = ("t5", "t5-v1.1", "t5-untied-scaled", "t5-gated-relu")


def recipe(**words: Any) -> Transformer:
    """A model that no family has, with scaled weights."""
    common = {"d_model": 32, "n_heads": 4, "n_kv_heads": 2, "layers": 2, "vocab_size": 64, "max_positions": 32}
    model = cutaway.build({**common, "bias": True, **words}).transformer
    tiny.scale_randomly(model, norm_mean=1.0)
    return model.eval()


def capped(model: Transformer, value: float) -> float:
    cap = model.spec.lm.soft_cap
    return value if cap is None else float(cap * torch.tanh(torch.tensor(value / cap)))


# ── case I10 ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", tiny.CASES)
def test_parts_add_up_to_the_logit(name: str) -> None:
    """Case I10: embeddings, heads, feed-forward networks and biases, through all norms, Gemma 2's among them."""
    model = tiny.transformer(name)
    with torch.no_grad():
        logits = model(torch.tensor([IDS]))[0, PLACE]
    one = decompose(model, IDS, 5, position=PLACE)
    assert abs(one.gap) <= 1e-4
    assert capped(model, one.total) == pytest.approx(float(logits[5]), abs=1e-4)
    assert (one.capped is None) == (model.spec.lm.soft_cap is None)
    if one.capped is not None:
        assert one.capped == pytest.approx(float(logits[5]), abs=1e-4)
    if name not in tiny.FAMILIES:
        return
    two = decompose(model, IDS, (5, 9), position=PLACE)
    other = decompose(model, IDS, 9, position=PLACE)
    assert two.total == pytest.approx(one.total - other.total, abs=1e-9)
    for a, b, c in zip(two.shares, one.shares, other.shares, strict=True):
        assert a.value == pytest.approx(b.value - c.value, abs=1e-9)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_parts_add_up_to_the_stream_at_every_layer(name: str) -> None:
    """Case I10: along any direction, at every point of the stream."""
    model = tiny.transformer(name)
    points = _stream(model)
    seen = trace(model, [IDS], tuple(points))
    generator = torch.Generator().manual_seed(2)
    for point in points:
        way = torch.randn(model.spec.d_model, generator=generator)
        way /= way.norm()
        found = decompose(model, IDS, way, at=point, position=PLACE)
        assert abs(found.gap) <= 1e-5
        assert found.total == pytest.approx(float(seen[point][0, PLACE].double() @ way.double()), abs=1e-5)
        layers = {share.layer for share in found.shares if share.layer is not None}
        last = int(point.split(".")[2])
        assert layers == set(range(last + (not point.endswith("resid_in"))))


def _stream(model: Transformer) -> list[str]:
    found = []
    for i, layer in enumerate(model.spec.decoder.layers):
        found.append(f"decoder.layers.{i}.resid_in")
        found += [f"decoder.layers.{i}.{branch.name}.resid" for branch in layer.branches]
    return found


@pytest.mark.parametrize("name", SUMS)
def test_a_decoder_with_a_source(name: str) -> None:
    """Heads of cross-attention are parts, and what each takes from each token of the source adds up to it."""
    model = tiny_seq2seq.transformer(name)
    found = decompose(model, IDS, (5, 9), source=SOURCE, sources=("*.cross", "*.attn"), neurons=("*.mlp",))
    with torch.no_grad():
        logits = model(torch.tensor([IDS]), source=model.read(torch.tensor([SOURCE])))[0, -1]
    assert found.total == pytest.approx(float(logits[5] - logits[9]), abs=1e-4)
    assert found.sources["decoder.layers.0.cross"].shape[1] == len(SOURCE)
    details_add_up(found)
    inner = decompose(
        model, IDS, torch.ones(32), at="encoder.layers.1.mlp.resid", source=SOURCE, position=3, sources=("*.attn",)
    )
    assert len(inner.pieces) == len(SOURCE)
    assert abs(inner.gap) <= 1e-4
    seen = trace(model, [IDS], ("encoder.layers.1.mlp.resid",), sources=[SOURCE])
    assert inner.total == pytest.approx(float(seen["encoder.layers.1.mlp.resid"][0, 3].double().sum()), abs=1e-4)
    details_add_up(inner)


def details_add_up(found: Decomposition) -> None:
    for name, each in found.neurons.items():
        whole = sum(s.value for s in found.shares if s.name == name or s.name.startswith(f"{name}.experts."))
        assert float(each.sum()) == pytest.approx(whole, abs=1e-9)
    for name, table in found.sources.items():
        for head, row in enumerate(table):
            assert float(row.sum()) == pytest.approx(found[f"{name}.heads.{head}"], abs=5e-5)


# ── each part is what it is said to be ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [*tiny.FAMILIES, "llama-mqa", "granite-biases", "qwen3-moe-step", "gemma2-caps"])
def test_parts_as_vectors(name: str) -> None:
    """Every part by the definition: its vector, through the norm after its branch, centred, scaled, read."""
    model = tiny.transformer(name)
    seen = trace(model, [IDS], ("*",))
    found = decompose(model, IDS, 5, position=PLACE, neurons=("*.m*",), sources=("*.attn",))
    details_add_up(found)
    end = seen[_stream(model)[-1]][0, PLACE].double()
    head = model.head
    row = (model.embed.tokens if head.weight is None else head.weight)[5].detach().double() * model.spec.lm.scale

    def read(part: Tensor) -> float:
        return float(held(model.decoder.norm, end, part) @ row)

    for i, layer in enumerate(model.decoder.layers):
        for key, branch in layer.branches.items():
            at = f"decoder.layers.{i}.{key}"
            body = seen[f"{at}.body"][0, PLACE].double()

            def write(part: Tensor, branch: Any = branch, body: Tensor = body) -> Tensor:
                return held(branch.out_norm, body, part) * branch.spec.scale

            if isinstance(branch.spec.body, AttentionSpec):
                for h, part in enumerate(seen[f"{at}.head_out"][0, PLACE].double()):
                    assert found[f"{at}.heads.{h}"] == pytest.approx(read(write(part)), abs=2e-5)
            elif f"{at}.experts" in seen:
                for e, part in enumerate(seen[f"{at}.experts"][0, PLACE].double()):
                    if part.any():
                        assert found[f"{at}.experts.{e}"] == pytest.approx(read(write(part)), abs=2e-5)
                assert sum(s.name.startswith(f"{at}.experts.") for s in found.shares) == branch.spec.body.top_k
            else:
                down = branch.body.down.weight.detach().double()
                act = seen[f"{at}.act"][0, PLACE].double()
                neurons = [read(write(down[:, n] * act[n])) for n in (0, 7, 20)]
                assert found.neurons[at][[0, 7, 20]].tolist() == pytest.approx(neurons, abs=1e-6)
            bias = getattr(getattr(branch.body, "out", None) or getattr(branch.body, "down", None), "bias", None)
            names = [share.name for share in found.shares]
            assert (f"{at}.bias" in names) == (bias is not None)
            if bias is not None:
                assert found[f"{at}.bias"] == pytest.approx(read(write(bias.detach().double())), abs=1e-6)


def held(norm: Any, x: Tensor, part: Tensor) -> Tensor:
    """What a norm makes of a part of x, without its bias."""
    if not isinstance(norm, Norm):
        return part
    spread = x
    if norm.spec.kind == "layer":
        spread, part = x - x.mean(), part - part.mean()
    return part / (spread.square().mean() + norm.spec.eps).sqrt() * (norm.weight.detach().double() + norm.spec.offset)


AWAY = ("gpt2", "llama", "stablelm-parallel", "bloom", "granite", "mixtral-window", "phi")


@pytest.mark.parametrize("name", AWAY)
def test_taking_a_part_away_takes_its_share(name: str) -> None:
    """With everything after it and the last norm's scale frozen, the model's own logit falls by what the part adds."""
    model = tiny.transformer(name)
    plain = trace(model, [IDS], ("*",))
    base = float(plain["logits"][0, PLACE, 5])
    found = decompose(model, IDS, 5, position=PLACE, neurons=("*.m*",), sources=("*.attn",))

    def without(after: str, edits: dict[str, Any]) -> float:
        names = [*plain]
        frozen = {n: plain[n] for n in names[names.index(after) + 1 :] if n.endswith((".out", "norm.norm_scale"))}
        frozen = {n: value for n, value in frozen.items() if n not in ("embed.out", "decoder.norm.out")}
        now = {n: (lambda _, value=value: value) for n, value in frozen.items()}
        return base - float(trace(model, [IDS], ("logits",), {**now, **edits})["logits"][0, PLACE, 5])

    at = "decoder.layers.1.attn"
    # The branch's own ``out`` is not frozen, and is the first of that name after what is edited.
    assert without(f"{at}.out", {f"{at}.z": zeroed(PLACE, 2)}) == pytest.approx(found[f"{at}.heads.2"], abs=1e-4)
    weights = {f"{at}.weights": zeroed(3, PLACE, 4, lead=(0,))}
    assert without(f"{at}.out", weights) == pytest.approx(float(found.sources[at][3, 4]), abs=1e-4)
    if f"{(mlp := 'decoder.layers.0.mlp')}.act" in plain:
        edit = {f"{mlp}.act": zeroed(PLACE, 11)}
        assert without(f"{mlp}.out", edit) == pytest.approx(float(found.neurons[mlp][11]), abs=1e-4)
    else:
        moe = "decoder.layers.0.moe"
        share = next(share for share in found.shares if share.name.startswith(f"{moe}.experts."))
        edit = {f"{moe}.experts": zeroed(PLACE, int(share.name.split(".")[-1]))}
        assert without(f"{moe}.out", edit) == pytest.approx(share.value, abs=1e-4)
    if "embed.norm_scale" not in plain:
        assert without("embed.out", {"embed.tokens": zeroed(PLACE)}) == pytest.approx(found["embed.tokens"], abs=1e-4)


def zeroed(*index: int, lead: tuple[int, ...] = (0,)) -> Any:
    def edit(value: Tensor) -> Tensor:
        value = value.clone()
        value[(*lead, *index)] = 0
        return value

    return edit


def test_learned_distances_of_values() -> None:
    """Shaw's vectors belong to the position that was read."""
    model = recipe(positions={"type": "shaw", "max_distance": 3}, norm="layer")
    found = decompose(model, IDS, 5, position=PLACE, sources=("*.attn",))
    assert abs(found.gap) <= 1e-4
    details_add_up(found)
    assert float(found.sources["decoder.layers.0.attn"][:, PLACE + 1 :].abs().max()) == 0
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.branches["attn"].body.near_values.zero_()
    assert decompose(model, IDS, 5, position=PLACE).total != pytest.approx(found.total, abs=1e-2)


def test_token_types_and_an_encoder() -> None:
    model = recipe(kind="encoder", types=3, norm="layer", embed_norm=True, positions="learned", causal=False)
    types = [i % 3 for i in range(len(IDS))]
    found = decompose(model, IDS, (5, 9), position=2, types=types)
    assert abs(found.gap) <= 1e-4
    assert {"embed.types", "embed.positions", "embed.tokens", "embed.norm.bias"} <= {s.name for s in found.shares}
    with torch.no_grad():
        logits = model(torch.tensor([IDS]), types=torch.tensor([types]))[0, 2]
    assert found.total == pytest.approx(float(logits[5] - logits[9]), abs=1e-4)


@pytest.mark.parametrize(("pool", "place"), [("first", 0), ("last", len(IDS) - 1)])
def test_scores_of_labels(pool: str, place: int) -> None:
    """The position is the one that the pooler reads."""
    model = recipe(labels=["bad", "so-so", "good"], pool=pool, norm="layer")
    found = decompose(model, IDS, "good")
    with torch.no_grad():
        scores = model(torch.tensor([IDS]))[0]
    assert found.position == place
    assert found.total == pytest.approx(float(scores[2]), abs=1e-4)
    assert found["head.out.bias"] == pytest.approx(float(model.head.out.bias.detach()[2]))
    assert decompose(model, IDS, (2, 0)).total == pytest.approx(float(scores[2] - scores[0]), abs=1e-4)


def test_an_inner_point_is_what_the_logit_lens_reads() -> None:
    model = tiny.transformer("gemma2-caps")
    point = "decoder.layers.1.attn.resid"
    seen = trace(model, [IDS], (point,))[point]
    found = decompose(model, IDS, 5, at=point, position=PLACE)
    with torch.no_grad():
        lens = model.unembed(model.decoder.norm(seen))[0, PLACE, 5]
    assert capped(model, found.total) == pytest.approx(float(lens), abs=1e-4)


@pytest.mark.real
@pytest.mark.skipif(bool(missing()), reason="stored weights need the native library")
def test_a_real_model_as_it_is_stored(smollm2_path: Any) -> None:
    model = cutaway.load(smollm2_path)
    assert any(isinstance(p, Stored) for p in model.transformer.parameters())
    ids = model.tokenizer.encode("The Eiffel Tower is in")
    logits = model.logits(ids)[0, -1]
    best, second = logits.topk(2).indices.tolist()
    details = {"neurons": ("*.29.mlp",), "sources": ("*.29.attn",)}
    found = decompose(model.transformer, ids, (best, second), **details)
    print(f"gap {found.gap:.1e} of {found.value:.3f}")
    assert abs(found.gap) <= 1e-4
    assert found.total == pytest.approx(float(logits[best] - logits[second]), abs=1e-4)
    details_add_up(found)


# ── what cannot be had ───────────────────────────────────────────────────────────────────────────────────────


def encoder(name: str) -> Transformer:
    return tiny.transformer(tiny_encoders.config(name))


@pytest.mark.parametrize("name", ["bart", "marian-swish"])
def test_no_pure_sum(name: str) -> None:
    """A norm after each addition: said so, with what there is instead. Before the first, the stream is a sum."""
    model = tiny_seq2seq.transformer(name)
    with pytest.raises(RequestError, match="post_norm") as caught:
        decompose(model, IDS, 5, source=SOURCE)
    assert caught.value.field == "decoder.layers.0.attn"
    assert all(word in str(caught.value.hint) for word in ("saliency", "integrated_gradients", "attribution_patching"))
    first = decompose(model, IDS, torch.ones(model.spec.d_model), at="decoder.layers.0.resid_in", source=SOURCE)
    assert abs(first.gap) <= 1e-4


def test_heads_with_a_curve() -> None:
    """Of BERT post_norm comes first; ModernBERT's stream is a sum, but not what its head makes of it."""
    with pytest.raises(RequestError, match="post_norm"):
        decompose(encoder("bert-mlm"), IDS, 5)
    model = encoder("modernbert-mlm")
    with pytest.raises(RequestError, match="curve") as caught:
        decompose(model, IDS, 5)
    assert "direction" in str(caught.value.hint)
    assert abs(decompose(model, IDS, torch.ones(32)).gap) <= 1e-4
    with pytest.raises(RequestError, match="curve"):
        decompose(encoder("modernbert-labels"), IDS, "glad")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "log-probability": ({"of": logprob(5)}, "no sum"),
    "no token": ({"of": 64}, "no such token"),
    "below": ({"of": (5, -1)}, "no such token"),
    "text": ({"of": "glad"}, "no such label"),
    "nothing": ({"of": None}, "nothing to explain"),
    "true": ({"of": True}, "nothing to explain"),
    "three": ({"of": (1, 2, 3)}, "nothing to explain"),
    "position": ({"position": len(IDS)}, "no such position"),
    "direction": ({"of": torch.ones(31)}, "no direction"),
    "whole direction": ({"of": torch.ones(32, dtype=torch.long)}, "no direction"),
    "source": ({"source": [3]}, "reads one text"),
    "types": ({"types": [0] * len(IDS)}, "type for each"),
    "pieces": ({"pieces": ["a"]}, "text for each"),
    "ids": ({"ids": [64]}, "vocabulary"),
    "no ids": ({"ids": []}, "no tokens"),
}


@pytest.mark.parametrize("what", WRONG)
def test_refusals(what: str) -> None:
    said, words = WRONG[what]
    with pytest.raises(RequestError, match=words):
        decompose(tiny.transformer("llama"), **{"ids": IDS, "of": 5, **said})


def test_names_that_are_not_there() -> None:
    model = tiny.transformer("llama")
    with pytest.raises(NameNotFound) as caught:
        decompose(model, IDS, 5, at="decoder.layers.1.mpl.resid")
    assert "mlp.resid" in str(caught.value.hint)
    with pytest.raises(NameNotFound, match="several"):
        decompose(model, IDS, 5, at="decoder.layers.*.resid_in")
    with pytest.raises(NameNotFound):
        decompose(model, IDS, 5, neurons=("decoder.layers.1.attn",))
    with pytest.raises(NameNotFound):
        decompose(model, IDS, 5, sources=("decoder.layers.7.attn",))
    with pytest.raises(KeyError):
        decompose(model, IDS, 5)["decoder.layers.7"]
    with pytest.raises(RequestError, match="training"):
        decompose(model.train(), IDS, 5)
    with pytest.raises(RequestError, match="mean of all"):
        decompose(recipe(labels=["a", "b"], pool="mean"), IDS, "a")
    with pytest.raises(RequestError, match="off the decoder"):
        decompose(tiny_seq2seq.transformer("t5"), IDS, 5, source=SOURCE, at="encoder.layers.0.resid_in")


def test_as_data_and_as_a_figure() -> None:
    model = tiny.transformer("gemma2")
    pieces = [f"t{i}" for i in range(len(IDS))]
    found = decompose(model, IDS, 5, neurons=("*.1.mlp",), sources=("*.2.attn",), pieces=pieces)
    plain = json.loads(json.dumps(found.as_dict()))
    assert sum(part["value"] for part in plain["parts"]) == pytest.approx(plain["total"]) == pytest.approx(found.total)
    assert len(plain["neurons"]["decoder.layers.1.mlp"]) == 64
    assert found["decoder.layers.1"] == pytest.approx(sum(s.value for s in found.shares if s.layer == 1))
    assert [abs(s.value) for s in found.top(5)] == sorted((abs(s.value) for s in found.shares), reverse=True)[:5]
    figure = found.figure()
    bars, layers, neurons, sources = figure.parts
    assert sum(value for row in layers.values for value in row if value is not None) == pytest.approx(
        sum(s.value for s in found.shares if s.layer is not None)
    )
    assert layers.columns[:4] == ["attn 0", "attn 1", "attn 2", "attn 3"]
    assert (list(sources.columns), len(sources.rows)) == (pieces, 4)
    assert (len(bars.values), len(neurons.values)) == (len(found.shares), 20)
    notes = " ".join(figure.notes)
    assert all(word in notes for word in ("out_norm", "before its cap", "not an explanation", "add up"))
