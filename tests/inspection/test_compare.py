"""A change put into one place is found there, and what cannot be compared is named."""

from __future__ import annotations

import copy
import sys

import pytest
import torch

from cutaway.errors import NameNotFound, RequestError
from cutaway.inspection import compare, trace
from cutaway.models import Transformer
from cutaway.spec.names import tap_names
from tests.reference import tiny, tiny_encoders, tiny_seq2seq

IDS = tiny.ids(1, 9)[0].tolist()


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny.transformer("llama")


def changed(model: Transformer, parameter: str, by: float = 0.01) -> Transformer:
    other = copy.deepcopy(model)
    with torch.no_grad():
        dict(other.named_parameters())[parameter].add_(by)
    return other


@pytest.mark.parametrize(
    ("parameter", "first"),
    [
        ("decoder.layers.1.branches.attn.body.k.weight", "decoder.layers.1.attn.k"),
        ("decoder.layers.1.branches.attn.body.v.weight", "decoder.layers.1.attn.v"),
        ("decoder.layers.1.branches.attn.body.out.weight", "decoder.layers.1.attn.body"),
        ("decoder.layers.2.branches.mlp.pre_norm.weight", "decoder.layers.2.mlp.in"),
        ("decoder.layers.0.branches.mlp.body.gate.weight", "decoder.layers.0.mlp.gate"),
        ("decoder.norm.weight", "decoder.norm.out"),
        ("embed.tokens", "embed.tokens"),
    ],
)
def test_the_first_that_differs(model: Transformer, parameter: str, first: str) -> None:
    found = compare(model, changed(model, parameter), IDS)
    assert found.first is not None
    assert found.first.name == first
    before = found.differences[: found.differences.index(found.first)]
    assert all(d.most == 0 and d.cosine == pytest.approx(1) for d in before)
    assert max(found.divergence) > 0


def test_how_much(model: Transformer) -> None:
    """The numbers of one quantity, worked out from two traces."""
    other = changed(model, "decoder.layers.1.branches.attn.body.k.weight")
    name = "decoder.layers.2.mlp.act"
    a, b = (trace(m, [IDS], (name,))[name].double() for m in (model, other))
    found = next(d for d in compare(model, other, IDS).differences if d.name == name)
    assert found.most == pytest.approx(float((a - b).abs().max()), rel=1e-4)
    assert found.relative == pytest.approx(float((a - b).abs().max() / a.abs().max()), rel=1e-4)
    assert found.cosine == pytest.approx(float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0)))
    assert float((a - b).abs()[found.where]) == pytest.approx(found.most, rel=1e-4)
    last = (m(torch.tensor([IDS]))[0].double().log_softmax(-1) for m in (model, other))
    p, q = (x.detach() for x in last)
    got = compare(model, other, IDS)
    torch.testing.assert_close(torch.tensor(got.divergence).double(), (p.exp() * (p - q)).sum(-1), rtol=1e-3, atol=1e-6)
    assert got.agree == tuple((p.argmax(-1) == q.argmax(-1)).tolist())


def test_the_same_twice(model: Transformer) -> None:
    found = compare(model, copy.deepcopy(model), IDS)
    assert found.first is None
    assert all(d.most == 0 for d in found.differences)
    assert all(found.agree)
    names = {d.name for d in found.differences}
    assert names == {n for n in tap_names(model.spec) if not n.endswith("head_out")}
    assert [*found.layers] == ["embed", *(f"decoder.layers.{i}" for i in range(3)), "decoder.norm", "logits"]
    assert found.figure().title.startswith("Nothing differs")


def test_groups_change_nothing(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantities recorded a few at a time are the same as all at once."""
    module = sys.modules["cutaway.inspection.compare"]  # its name in the package is the function's
    other = changed(model, "decoder.layers.1.branches.attn.body.k.weight")
    once = compare(model, other, IDS, names=("*",))
    calls = []
    real = module.trace
    monkeypatch.setattr(module, "trace", lambda *a, **k: calls.append(a[2]) or real(*a, **k))
    monkeypatch.setattr(module, "LARGEST", 2000)
    several = compare(model, other, IDS, names=("*",))
    assert len(calls) > 20
    assert [d.name for d in several.differences] == [d.name for d in once.differences]
    for a, b in zip(several.differences, once.differences, strict=True):
        assert a.most == pytest.approx(b.most, abs=1e-4)


def test_two_texts(model: Transformer) -> None:
    """Aligned from the start, as far as both go: causal attention differs from the first other token on."""
    other = [*IDS[:4], (IDS[4] + 1) % 60 + 3, *IDS[5:], 7, 8]
    found = compare(model, model, IDS, other)
    assert found.first is not None
    assert found.first.name == "embed.tokens"
    assert found.first.where[1] == 4
    for d in found.differences:
        if "query" in d.axes and d.most > 1e-4:
            assert d.where[d.axes.index("query")] >= 4
    assert len(found.pieces) == len(found.divergence) == len(IDS)
    assert max(found.divergence[:4]) < 1e-6
    ended = compare(model, model, IDS, [5, *IDS], names=("embed.tokens",), align="end")
    assert ended.differences[0].most == 0


def test_two_kinds_of_model(model: Transformer) -> None:
    """What only one has is named, and so is what has other sizes."""
    other = tiny.transformer("gpt2")
    found = compare(model, other, IDS)
    assert "decoder.layers.0.attn.q_rot" in found.only_left
    assert "embed.positions" in found.only_right
    wide = tiny.transformer("qwen3")
    found = compare(model, wide, IDS)
    assert "decoder.layers.0.resid_in" in found.other_shape
    assert "logits" in {d.name for d in found.differences}
    titles = [part.title for part in found.figure().parts]
    assert titles[-1] == "Not compared"
    assert found.as_dict()["other_shape"] == [*found.other_shape]


def test_other_kinds() -> None:
    """Encoders, and encoder–decoders with another source."""
    bert = tiny.transformer(tiny_encoders.config("bert-labels"))
    assert compare(bert, bert, IDS).first is None
    t5 = tiny_seq2seq.transformer("t5")
    assert compare(t5, t5, IDS, source=IDS[:5]).first is None
    found = compare(t5, t5, IDS, source=IDS[:5], other_source=[*IDS[:4], 60])
    assert found.first is not None
    assert found.first.name == "source_embed.tokens"
    assert found.first.where[1] == 4


def test_precision(model: Transformer) -> None:
    """Half the bits: everything differs a little, and nothing much."""
    half = copy.deepcopy(model).bfloat16()
    found = compare(model, half, IDS, tolerance=0.2)
    assert 1e-4 < found.differences[0].relative < 1e-2
    assert found.as_dict()["tolerance"] == 0.2


def test_what_is_no_number(model: Transformer) -> None:
    """A NaN on one side is as far away as can be."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.decoder.layers[1].branches["mlp"].body.up.weight[3, 2] = float("nan")
    found = compare(model, other, IDS)
    assert found.first is not None
    assert found.first.name == "decoder.layers.1.mlp.up"
    assert found.first.most == float("inf")
    assert found.first.where[2] == 3


def test_refusals(model: Transformer) -> None:
    with pytest.raises(NameNotFound):
        compare(model, model, IDS, names=("decoder.layers.9.resid",))
    with pytest.raises(RequestError, match="align"):
        compare(model, model, IDS, align="middle")  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        compare(model, model, [999])
    with pytest.raises(RequestError):
        compare(model, model, IDS, tolerance=-1)
