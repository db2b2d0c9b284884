"""A model in a few words: what they come to, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from cutaway.errors import ConfigError, LimitExceeded
from cutaway.spec import (
    AlibiBias,
    BucketBias,
    ClassifierSpec,
    EmbeddingSpec,
    HeadSpec,
    LearnedPositions,
    MaskRule,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    PoolerSpec,
    RotarySpec,
    ShawRelative,
    SinusoidalPositions,
    TransformSpec,
    YarnScaling,
)
from cutaway.spec.recipe import LAYER, MODEL, expand
from cutaway.spec.serial import spec_from_json, spec_to_json

LEAST = {"d_model": 64, "n_heads": 4, "layers": 6, "vocab_size": 256}


def spec_of(**words: Any) -> ModelSpec:
    return expand({**LEAST, **words})


def test_the_least() -> None:
    """What most decoders of today have."""
    spec = expand(LEAST)
    attn, mlp = spec.decoder.layers[0].branches
    norm = NormSpec("rms", 1e-5)
    assert (attn.pre_norm, attn.out_norm, attn.post_norm, spec.decoder.norm) == (norm, None, None, norm)
    assert attn.body.rotary == RotarySpec(10_000.0, 16)  # type: ignore[union-attr]
    assert mlp.body == MlpSpec(176, "silu", gated=True)
    assert spec.lm.tied
    assert len({*spec.decoder.layers}) == 1
    assert (spec.n_layers, spec.family, spec.max_positions) == (6, "cutaway", 2048)


def test_the_issue_s_example() -> None:
    """RMSNorm after, ALiBi, squared ReLU, two local layers to one global."""
    spec = spec_of(
        norm="rms",
        where="post",
        positions="alibi",
        activation="relu2",
        pattern=["local", "local", "global"],
        window=32,
    )
    assert [layer.attention.mask.window for layer in spec.decoder.layers] == [32, 32, None, 32, 32, None]
    attn, mlp = spec.decoder.layers[0].branches
    assert (attn.pre_norm, attn.post_norm) == (None, NormSpec("rms", 1e-5))
    assert mlp.body == MlpSpec(256, "relu2")
    assert spec.decoder.norm is None  # the last post_norm is the last norm
    assert {layer.attention.bias for layer in spec.decoder.layers} == {AlibiBias()}
    assert spec.decoder.layers[0].attention.rotary is None


@pytest.mark.parametrize(
    ("where", "slots", "last"),
    [
        ("pre", (True, False, False), True),
        ("post", (False, False, True), False),
        ("out", (False, True, False), True),
        ("sandwich", (True, True, False), True),
        ("none", (False, False, False), False),
    ],
)
def test_where_norms_stand(where: str, slots: tuple[bool, ...], last: bool) -> None:
    spec = spec_of(where=where)
    for branch in spec.decoder.layers[0].branches:
        assert tuple(n is not None for n in (branch.pre_norm, branch.out_norm, branch.post_norm)) == slots
    assert (spec.decoder.norm is not None) == last


def test_norms() -> None:
    assert spec_of(norm="layer").decoder.norm == NormSpec("layer", 1e-5, bias=True)
    assert spec_of(norm={"kind": "layer", "bias": False}).decoder.norm == NormSpec("layer", 1e-5)
    assert spec_of(norm={"eps": 1e-6, "offset": 1}).decoder.norm == NormSpec("rms", 1e-6, offset=1.0)
    assert spec_of(embed_norm=True).embedding.norm == NormSpec("rms", 1e-5)


def test_positions() -> None:
    def attention(positions: Any, **words: Any) -> Any:
        return spec_of(positions=positions, **words).decoder.layers[0].attention

    none = attention("none")
    assert (none.rotary, none.bias, none.relative) == (None, None, None)
    assert attention({"type": "rotary", "base": 500, "share": 0.5}).rotary == RotarySpec(500.0, 8)
    yarn = {"type": "yarn", "factor": 4, "original_max_positions": 512}
    scaled = attention({"type": "rotary", "scaling": yarn, "interleaved": True}).rotary
    assert scaled == RotarySpec(10_000.0, 16, YarnScaling(4.0, 512), interleaved=True)
    assert attention("t5").bias == BucketBias(32, 128)
    assert attention({"type": "t5", "n_buckets": 8, "max_distance": 20}).bias == BucketBias(8, 20)
    assert attention("shaw").relative == ShawRelative(16)
    assert spec_of(positions="learned", max_positions=100).embedding.positions == LearnedPositions(100)
    offset = spec_of(positions={"type": "learned", "offset": 2}, max_positions=100).embedding.positions
    assert offset == LearnedPositions(102, 2)
    assert spec_of(positions="sinusoidal").embedding.positions == SinusoidalPositions()


def test_layers_differ() -> None:
    """An entry of the pattern says what is different; SmolLM3 turns three layers of four, Mixtral-like ones mix."""
    spec = spec_of(
        layers=4,
        n_kv_heads=2,
        pattern=["global", {"positions": "none", "window": 8}, {"experts": 4, "d_ff": 32, "n_kv_heads": 1}],
    )
    one, two, three, four = spec.decoder.layers
    assert (one.attention.rotary is None, two.attention.rotary is None) == (False, True)
    assert (one.attention.mask.window, two.attention.mask.window) == (None, 8)
    assert three.branches[1].body == MoeSpec(4, 2, MlpSpec(32, "silu", gated=True))
    assert three.attention.n_kv_heads == 1
    assert one == four


def test_the_rest() -> None:
    spec = spec_of(
        bias=True,
        qkv_bias=False,
        qk_norm="width",
        score_scale=1,
        score_cap=50,
        clip=8,
        branch_scale=0.5,
        parallel=True,
        shared_norm=True,
        dropout=0.1,
        tied=False,
        embed_scale=8,
        logit_scale=0.25,
        logit_cap=30,
        causal=False,
        chunk=16,
        prefix=True,
        d_head=8,
        gated=True,
        activation="gelu",
    )
    block = spec.decoder.layers[0]
    attn, mlp = block.branches
    a = block.attention
    assert (a.qkv_bias, a.out_bias, a.qk_norm_over, a.d_head) == (False, True, "width", 8)
    assert (a.scale, a.soft_cap, a.clip, a.dropout) == (1.0, 50.0, 8.0, 0.1)
    assert (a.mask.causal, a.mask.chunk, a.mask.prefix) == (False, 16, True)
    assert (block.parallel, block.shared_norm, mlp.pre_norm, attn.scale, mlp.dropout) == (True, True, None, 0.5, 0.1)
    assert mlp.body == MlpSpec(176, "gelu", gated=True, bias=True, out_bias=True)
    assert (spec.lm.tied, spec.lm.scale, spec.lm.soft_cap) == (False, 0.25, 30.0)
    assert (spec.embedding.scale, spec.embedding.dropout) == (8.0, 0.1)


def test_encoder_and_decoder() -> None:
    """The Transformer of 2017: post-norms, waves, ReLU, and a decoder that reads the source."""
    words = {"norm": "layer", "where": "post", "positions": "sinusoidal", "activation": "relu", "bias": True}
    spec = spec_of(encoder_layers=4, embed_scale=8, dropout=0.1, **words)
    assert (len(spec.encoder.layers), len(spec.decoder.layers), spec.main) == (4, 6, "decoder")
    assert spec.generates
    assert spec.source == spec.embedding
    assert spec.source_vocab_size is None
    assert (spec.encoder.norm, spec.decoder.norm) == (None, None)
    reads, writes = spec.encoder.layers[0], spec.decoder.layers[0]
    assert [branch.name for branch in reads.branches] == ["attn", "mlp"]
    assert [branch.name for branch in writes.branches] == ["attn", "cross", "mlp"]
    assert (reads.attention.mask, writes.attention.mask) == (MaskRule(causal=False), MaskRule())
    assert writes.cross == replace(writes.attention, mask=MaskRule(causal=False), cross=True)
    assert {branch.post_norm for branch in writes.branches} == {NormSpec("layer", 1e-5, bias=True)}
    assert writes.branches[2].body == MlpSpec(256, "relu", bias=True, out_bias=True)
    assert spec_of(encoder_layers=2, source_vocab_size=99).source_vocab_size == 99


@pytest.mark.parametrize("positions", ["rotary", "learned", "sinusoidal", "alibi", "t5", "shaw", "none"])
def test_positions_of_both_stacks(positions: str) -> None:
    """A source has no distance from the target's tokens, and an encoder's buckets are of both ways."""
    spec = spec_of(encoder_layers=2, positions=positions, qk_norm="head", where="pre")
    cross, encoder = spec.decoder.layers[0].cross, spec.encoder.layers[0].attention
    assert cross is not None
    assert (cross.rotary, cross.bias, cross.relative) == (None, None, None)
    assert cross.qk_norm is not None
    assert (spec.encoder.norm, spec.decoder.norm) == (NormSpec("rms", 1e-5),) * 2
    if positions == "t5":
        assert encoder.bias == BucketBias(32, 128, both_ways=True)
        assert spec.decoder.layers[0].attention.bias == BucketBias(32, 128)
    assert encoder.rotary == spec.decoder.layers[0].attention.rotary


def test_patterns_go_through_both_stacks() -> None:
    spec = spec_of(layers=3, encoder_layers=4, window=8, pattern=["local", {"window": None, "experts": 4}])
    windows = [[layer.attention.mask.window for layer in stack.layers] for stack in spec.stacks.values()]
    assert windows == [[8, None, 8, None], [8, None, 8]]
    assert [branch.name for branch in spec.decoder.layers[1].branches] == ["attn", "cross", "moe"]
    assert {layer.cross.mask for layer in spec.decoder.layers if layer.cross} == {MaskRule(causal=False)}


def test_encoders() -> None:
    """BERT's kind, in either spelling."""
    words = {"norm": "layer", "where": "post", "positions": "learned", "embed_norm": True, "bias": True, "types": 2}
    more = {"activation": "gelu", "head_transform": True, "head_bias": True}
    spec = spec_of(kind="encoder", **words, **more)
    assert spec == spec_of(layers=0, encoder_layers=6, **words, **more)
    assert spec == expand({**{k: v for k, v in LEAST.items() if k != "layers"}, "encoder_layers": 6, **words, **more})
    assert (spec.main, spec.generates, spec.source, len(spec.encoder.layers)) == ("encoder", False, None, 6)
    norm = NormSpec("layer", 1e-5, bias=True)
    assert spec.head == HeadSpec(tied=True, bias=True, transform=TransformSpec("gelu", norm=norm))
    assert spec.embedding == EmbeddingSpec(positions=LearnedPositions(2048), norm=norm, types=2)
    assert spec.encoder.layers[0].attention.mask == MaskRule(causal=False)


def test_other_heads() -> None:
    def head(**words: Any) -> Any:
        return spec_of(**words).head

    two = ("bad", "good")
    assert head(kind="encoder", labels=["bad", "good"]) == ClassifierSpec(two, PoolerSpec("first"))
    assert head(labels=["bad", "good"], dropout=0.1) == ClassifierSpec(two, PoolerSpec("last"), dropout=0.1)
    assert head(kind="encoder", labels=["bad", "good"], pool="none") == ClassifierSpec(two)
    pooler = PoolerSpec("mean", TransformSpec("tanh"))
    assert head(kind="encoder", labels=two, pool="mean", head_transform=True) == ClassifierSpec(two, pooler)
    assert head(kind="encoder", labels={"labels": ["x"], "kind": "regression", "bias": False}) == ClassifierSpec(
        ("x",), PoolerSpec("first"), bias=False, kind="regression"
    )
    assert head(kind="encoder", pool="mean") == PoolerSpec("mean")


@pytest.mark.parametrize(
    "words",
    [
        {"encoder_layers": 2, "positions": "shaw", "norm": "layer"},
        {"encoder_layers": 2, "positions": "learned", "source_vocab_size": 40, "tied": False, "experts": 2},
        {"kind": "encoder", "types": 2, "head_transform": True, "positions": "alibi"},
        {"kind": "encoder", "labels": ["a", "b"]},
        {"kind": "encoder", "labels": ["a", "b"], "pool": "none"},
        {"kind": "encoder", "pool": "mean", "head_transform": True},
    ],
)
def test_they_run_and_are_data(words: dict[str, Any]) -> None:
    """Built, run, and written as JSON; from YAML the same."""
    import torch
    import yaml

    from cutaway.checkpoints.recipe import read_recipe
    from cutaway.models.init import built

    spec = spec_of(layers=2, **words)
    assert expand(read_recipe(yaml.safe_dump({**LEAST, "layers": 2, **words}))) == spec
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec
    model, ids = built(spec), torch.arange(10).view(2, 5)
    out = model(ids, source=model.read(ids + 1)) if spec.source else model(ids)
    labels = len(spec.head.labels) if isinstance(spec.head, ClassifierSpec) else None
    width = labels or (64 if isinstance(spec.head, PoolerSpec) else 256)
    text = isinstance(spec.head, PoolerSpec) or (labels and spec.head.pooler is not None)  # type: ignore[union-attr]
    assert out.shape == ((2, width) if text else (2, 5, width))
    assert out.isfinite().all()


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown": ("/colour", {"colour": 3}),
    "near": ("/window_", {"window_": 3}),
    "width as text": ("/d_model", {"d_model": "64"}),
    "width true": ("/d_model", {"d_model": True}),
    "heads do not divide": ("/n_heads", {"n_heads": 5}),
    "no width": ("/d_model", {"d_model": None}),
    "too many layers": ("/layers", {"layers": 10_000}),
    "norm unknown": ("/norm/kind", {"norm": "batch"}),
    "norm a number": ("/norm", {"norm": 3}),
    "norm field unknown": ("/norm/epsilon", {"norm": {"epsilon": 1e-5}}),
    "eps is text": ("/norm/eps", {"norm": {"eps": "1e-5"}}),
    "where unknown": ("/where", {"where": "before"}),
    "positions unknown": ("/positions", {"positions": "xpos"}),
    "positions a number": ("/positions", {"positions": 3}),
    "share of 2": ("/positions/share", {"positions": {"type": "rotary", "share": 2}}),
    "share of the whole table": ("/positions/share", {"positions": {"type": "alibi", "share": 0.5}}),
    "pattern empty": ("/pattern", {"pattern": []}),
    "pattern a word": ("/pattern", {"pattern": "local"}),
    "pattern of another word": ("/pattern/0", {"pattern": ["near"]}),
    "pattern too long": ("/pattern", {"pattern": [{}] * 7}),
    "local without window": ("/window", {"pattern": ["local", "global"]}),
    "entry's word unknown": ("/pattern/1/colour", {"pattern": ["global", {"colour": 1}]}),
    "entry's word of the model": ("/pattern/0/tied", {"pattern": [{"tied": True}]}),
    "entry's table": ("/pattern/0/positions", {"pattern": [{"positions": "learned"}]}),
    "activation unknown": ("/activation", {"activation": "swish"}),
    "activation a list": ("/activation", {"activation": ["silu"]}),
    "tied is 1": ("/tied", {"tied": 1}),
    "experts unknown": ("/experts/n", {"experts": {"n": 4}}),
    "experts too few": ("/decoder/blocks/0/branches/1/body/top_k", {"experts": {"n_experts": 2, "top_k": 3}}),
    "dropout of 2": ("/embedding/dropout", {"dropout": 2}),
    "no layers": ("/layers", {"layers": 0}),
    "layers below none": ("/encoder_layers", {"encoder_layers": -1}),
    "too many to read": ("/encoder_layers", {"encoder_layers": 10_000}),
    "kind unknown": ("/kind", {"kind": "both"}),
    "an encoder with a decoder": ("/kind", {"kind": "encoder", "encoder_layers": 2}),
    "a decoder with an encoder": ("/kind", {"kind": "decoder", "encoder_layers": 2}),
    "no source": ("/source_vocab_size", {"source_vocab_size": 9}),
    "types of two texts": ("/types", {"types": 2, "encoder_layers": 2}),
    "labels are numbers": ("/labels", {"labels": [1, 2]}),
    "no labels": ("/head/labels", {"labels": []}),
    "labels unknown": ("/labels/names", {"labels": {"names": ["a"]}}),
    "labels tied": ("/tied", {"labels": ["a"], "tied": True}),
    "a cap on a vector": ("/logit_cap", {"pool": "mean", "logit_cap": 3}),
    "pool of nothing": ("/pool", {"pool": "none"}),
    "pool unknown": ("/pool", {"pool": "max", "labels": ["a"]}),
    "a transform of each token": ("/head_transform", {"labels": ["a"], "pool": "none", "head_transform": True}),
    "scale infinite": ("/embed_scale", {"embed_scale": float("inf")}),
    "scale not a number": ("/embed_scale", {"embed_scale": float("nan")}),
    "scale of 10^400": ("/embed_scale", {"embed_scale": 10**400}),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str) -> None:
    field, words = BAD[case]
    with pytest.raises(ConfigError) as caught:
        spec_of(**words)
    assert caught.value.field == field


def test_near_names_are_offered() -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(activaton="relu")
    assert caught.value.hint == "Did you mean 'activation'?"


def test_more_rows_than_any_model() -> None:
    with pytest.raises(LimitExceeded):
        spec_of(vocab_size=1 << 40)


@pytest.mark.parametrize("value", [None, 3, "x", [], True])
def test_no_recipe(value: Any) -> None:
    with pytest.raises(ConfigError):
        expand(value)


def test_every_word_of_a_wrong_type() -> None:
    for word in MODEL | LAYER:
        for value in (object(), [object()], -1.5j):
            with pytest.raises(ConfigError) as caught:
                spec_of(**{word: value})
            assert (caught.value.field or "").startswith(f"/{word}")


def test_no_torch() -> None:
    program = "import sys, cutaway.spec.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
