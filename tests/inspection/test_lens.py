"""The lens against models that really end there, and parts that add up to the score."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cutaway.errors import NameNotFound, RequestError
from cutaway.inspection import Lens, lens, readout, trace
from tests.inspection.against import Pair, pair
from tests.reference import oracle, tiny, tiny_encoders, tiny_seq2seq

CASES = (
    "llama", "gemma2", "gemma3-caps", "granite-biases", "gpt-neox", "phi", "olmo2", "bloom", "mixtral-window", "gpt2",
    "bert-mlm", "modernbert-mlm", "distilbert-mlm", "t5", "t5-v1.1", "bart", "marian-swish",
)  # fmt: skip
ALL = 64  # of the vocabulary
NORMED = ("bert-mlm", "distilbert-mlm", "bart", "marian-swish")


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        oracle.use_attention_cap(patch)
        yield pair(request.param, tmp_path_factory.mktemp("lens") / request.param)


def whole(found: Lens, point: int) -> Tensor:
    """The values of the whole vocabulary, put back in its order. [position, vocab]"""
    return torch.zeros(found.values[point].shape).scatter(-1, found.tokens[point], found.values[point]).double()


def agrees(found: Lens, point: int, logits: Tensor, final: Tensor) -> None:
    """One point, with what is worked out anew from transformers' logits. [position, vocab] each"""
    close = {"rtol": 2e-3, "atol": 2e-5}
    logits, final = logits.double(), final.double()
    expected, last = logits.softmax(-1), final.softmax(-1)
    torch.testing.assert_close(whole(found, point), expected, **close)
    divergence = (last * (final.log_softmax(-1) - logits.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(found.divergence[point].double(), divergence, rtol=2e-3, atol=1e-4)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(found.entropy[point].double(), entropy, rtol=2e-3, atol=1e-4)
    target = final.argmax(-1)
    torch.testing.assert_close(found.target_value[point].double(), expected.gather(-1, target[:, None])[:, 0], **close)
    assert found.rank[point].tolist() == (logits > logits.gather(-1, target[:, None])).sum(-1).tolist()


def test_layer_by_layer(case: Pair) -> None:
    """The stream before layer n is where a model of n layers ends."""
    found = lens(case.ours, case.ids, k=ALL, source=case.source)
    assert len(found.points) == case.layers + 1
    assert set(found.kinds) == {"stream"}
    final = case.cut_short(case.layers)
    for n in range(case.layers + 1):
        agrees(found, n, case.cut_short(n), final)
    assert found.target.tolist() == final.argmax(-1).tolist()


def test_the_end_is_the_logits(case: Pair) -> None:
    found = lens(case.ours, case.ids, ("*.norm.out",), k=1, source=case.source)
    assert found.divergence.abs().max() == 0
    assert found.rank.abs().max() == 0


def test_parts_add_up(case: Pair) -> None:
    """Embeddings, heads, experts, feed-forward networks and biases: to the score before its cap."""
    model, spec = case.ours, case.ours.spec
    if not readout.whole_sum(model) or spec.head.transform is not None:
        with pytest.raises(RequestError, match=r"no sum|curve"):
            lens(model, case.ids, ("*.mlp.out",), source=case.source)
        return
    sources = None if case.source is None else [case.source]
    seen = trace(model, [case.ids], ("*.body", "*.out", "*.norm_scale"), sources=sources)
    last, norm = seen[f"{spec.main}.norm.out"][0], readout.main_stack(model).norm
    total = readout.contributed(model, norm.bias.detach()) if norm.bias is not None else torch.zeros(ALL)
    outs = lens(model, case.ids, ("embed.out", "*.out"), k=ALL, source=case.source)
    embedded = readout.held(norm, seen["embed.out"], seen[f"{spec.main}.norm.norm_scale"])[0]
    total = total + readout.contributed(model, embedded).detach()
    parts = [i for i, kind in enumerate(outs.kinds) if kind == "part"]
    assert len(parts) == sum(len(layer.branches) for layer in spec.stacks[spec.main].layers)
    total = total.double() + sum(whole(outs, i) for i in parts)
    expected = readout.contributed(model, last).detach().double()
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=2e-4)

    # Of one branch: its heads and its bias, through the norm that follows it, if there is one.
    heads = lens(model, case.ids, (f"{spec.main}.layers.1.attn.head_out",), k=ALL, source=case.source)
    branch = readout.main_stack(model).layers[1].branches["attn"]
    whole_out = whole(outs, outs.points.index(f"{spec.main}.layers.1.attn.out"))
    assert heads.points[-1] == f"{spec.main}.layers.1.attn.head_out[{branch.body.spec.n_heads - 1}]"
    bias, body = branch.body.out.bias, seen[f"{spec.main}.layers.1.attn.body"][0]
    own = torch.zeros_like(body) if bias is None else bias.detach().expand_as(body)
    if branch.spec.out_norm is not None:
        own = readout.held(branch.out_norm, own, readout.spread(branch.spec.out_norm, body))
    own = readout.held(norm, own * branch.spec.scale, seen[f"{spec.main}.norm.norm_scale"][0])
    together = sum(whole(heads, i) for i in range(len(heads.points))) + readout.contributed(model, own).detach()
    torch.testing.assert_close(together, whole_out, rtol=1e-4, atol=2e-4)


def test_what_follows(case: Pair) -> None:
    """The target may be the next token, one token, or one for each position; positions may be few."""
    ids, source = case.ids, case.source
    after = lens(case.ours, ids, target="next", k=2, source=source)
    assert after.target.tolist() == [*ids[1:], -1]
    assert after.rank[:, -1].tolist() == [-1] * len(after.points)
    assert after.target_value[:, -1].isnan().all()
    one = lens(case.ours, ids, target=ids[3], positions=[2, -1], k=2, source=source)
    assert one.positions == (2, len(ids) - 1)
    torch.testing.assert_close(one.target_value[:, 0], after.target_value[:, 2], rtol=1e-4, atol=1e-7)
    each = lens(case.ours, ids, target=[ids[3], 5], positions=[2, 4], k=2, source=source)
    torch.testing.assert_close(each.target_value[:, 0], one.target_value[:, 0], rtol=1e-4, atol=1e-7)


def test_blocks_of_positions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many positions are read at once, and never more scores than are allowed."""
    model, ids = tiny.transformer("gemma3"), tiny.ids(1, 30)[0].tolist()
    whole_text = lens(model, ids, ("*",))
    most = []
    head = model.head.forward

    def watched(x: Tensor, *args: object) -> Tensor:
        most.append(x.shape[1])
        return head(x, *args)

    monkeypatch.setattr(readout, "LARGEST", 4 * model.spec.vocab_size)
    monkeypatch.setattr(model.head, "forward", watched)
    few = lens(model, ids, ("*",), target=whole_text.target.tolist())
    assert max(most) == 4
    for name in ("values", "divergence", "entropy", "target_value"):
        torch.testing.assert_close(getattr(few, name), getattr(whole_text, name), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_refusals() -> None:
    model, ids = tiny.transformer("llama"), tiny.ids(1, 5)[0].tolist()
    with pytest.raises(NameNotFound):
        lens(model, ids, ("decoder.layers.0.attn.q",))
    with pytest.raises(RequestError, match="no such position"):
        lens(model, ids, positions=[5])
    with pytest.raises(RequestError, match="not a target"):
        lens(model, ids, target="last")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="for each position"):
        lens(model, ids, target=[1, 2])
    with pytest.raises(RequestError, match="not a list"):
        lens(model, ids, "embed.out")
    with pytest.raises(RequestError, match="no head that scores tokens"):
        lens(tiny.transformer(tiny_encoders.config("bert")), ids)
    with pytest.raises(RequestError, match="embeddings' sum is normed"):
        lens(tiny.transformer("bloom"), ids, ("embed.tokens",))
    with pytest.raises(NameNotFound):
        lens(tiny_seq2seq.transformer("t5"), ids, ("encoder.layers.0.resid_in",), source=ids)


def test_shown() -> None:
    """Words where they are known, numbers where not, and what has to be said of them."""
    model, ids = tiny.transformer("llama"), tiny.ids(1, 5)[0].tolist()
    found = lens(
        model, ids, ("*.resid", "*.attn.head_out", "*.norm.out"), k=2, pieces=list("abcde"), spell=lambda t: f"<{t}>"
    )
    titles = [part.title for part in found.figure().parts]
    assert titles[:3] == ["Likeliest token", "Nats from the final distribution", "Most raised token"]
    assert found.figure().parts[0].texts[-1][0] == f"<{int(found.target[0])}>"
    assert found.figure().parts[0].rows == [
        "0 attn.resid",
        "0 mlp.resid",
        "1 attn.resid",
        "1 mlp.resid",
        "2 attn.resid",
        "2 mlp.resid",
        "end",
    ]
    assert len(found.figure().notes) == 2
    said = found.as_dict()
    assert said["words"][0][0][0] == f"<{int(found.tokens[0, 0, 0])}>"
    assert said["divergence"][found.kinds.index("part")] == [None] * 5
    assert "bias" in " ".join(lens(model, ids, ("*.out",)).notes)
    assert any("norms the stream" in note for note in lens(tiny_seq2seq.transformer("bart"), ids, source=ids).notes)
