"""What a head looks for and writes, against texts that are run: in the first layer a token is its embedding alone."""

from __future__ import annotations

import pytest
import torch

from cutaway.errors import NameNotFound, RequestError
from cutaway.inspection import copying_scores, head_looks_for, head_writes, readout, trace
from cutaway.models import Transformer
from tests.reference import tiny, tiny_encoders, tiny_seq2seq

CASES = (
    "llama", "gemma2", "gemma3-caps", "qwen3", "olmo2", "bloom", "mpt", "falcon-40b", "falcon-rw", "gpt-neox",
    "phi-qk-norm", "granite-biases", "mixtral-window", "phi3-longrope",
)  # fmt: skip
ASKED = [5, 17, 40]
ALL = 64


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest) -> Transformer:
    return tiny.transformer(request.param)


def whole(view: object) -> torch.Tensor:
    """Values in the order of the vocabulary. [token, vocab]"""
    return torch.zeros(view.values.shape).scatter(1, view.best, view.values)


@pytest.mark.parametrize("distance", [0, 1, 4])
def test_looking(model: Transformer, distance: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token at that distance before the query, in texts of their own: the scores of the first layer."""
    monkeypatch.setattr(readout, "LARGEST", 3000)
    spec = model.spec.decoder.layers[0].attention
    for head in (0, spec.n_heads - 1):
        view = head_looks_for(model, "decoder.layers.0.attn", head, ASKED, distance=distance, k=ALL)
        assert view.kv_head == head // (spec.n_heads // spec.n_kv_heads)
        for row, query in enumerate(ASKED):
            texts = [[key, *[9] * (distance - 1), query] for key in range(ALL)] if distance else [[query]]
            seen = trace(model, texts, ("decoder.layers.0.attn.scores",))["decoder.layers.0.attn.scores"]
            expected = seen[:, head, -1, 0]
            got = whole(view)[row]
            got = got if distance else got[[query]]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4)
            assert float(view.own[row]) == pytest.approx(float(whole(view)[row, query]))


def test_writing(model: Transformer) -> None:
    """A head that reads one token alone: what it adds, through the norms' weights and the output table."""
    spec, norm = model.spec, model.decoder.norm
    branch, attention = model.decoder.layers[0].branches["attn"], spec.decoder.layers[0].attention
    table = (model.embed.tokens if model.head.weight is None else model.head.weight).detach()
    head = attention.n_heads - 1
    view = head_writes(model, "decoder.layers.0.attn", head, ASKED, k=ALL)

    def added(token: int) -> torch.Tensor:
        return trace(model, [[token]], ("decoder.layers.0.attn.head_out",))["decoder.layers.0.attn.head_out"][
            0, 0, head
        ]

    outs = torch.stack([added(token) for token in ASKED])
    for follows in (branch.out_norm, norm):
        if isinstance(follows, torch.nn.Identity):
            continue
        outs = outs - outs.mean(-1, keepdim=True) if follows.spec.kind == "layer" else outs
        outs = outs * (follows.weight + follows.spec.offset).detach()
    expected = outs * branch.spec.scale @ table.t() * spec.head.scale
    found = whole(view)
    if attention.qkv_bias or branch.pre_norm.__dict__["_parameters"].get("bias") is not None:
        # Biases add the same to every token.
        expected, found = expected - expected[0], found - found[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-4)
    assert view.rank.tolist() == [int((whole(view)[i] > whole(view)[i, t]).sum()) for i, t in enumerate(ASKED)]
    torch.testing.assert_close(view.lows[:, 0], whole(view).min(1).values)


def test_copying(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The eigenvalues of the whole circuit, a row and a column for each token."""
    monkeypatch.setattr(readout, "LARGEST", 1000)
    found = copying_scores(model)
    for layer in (0, len(model.decoder.layers) - 1):
        for head in (0, 3 if model.spec.decoder.layers[0].attention.n_heads > 3 else 0):
            at = f"decoder.layers.{layer}.attn"
            if model.spec.decoder.layers[0].attention.clip is not None:
                continue  # no product of matrices
            circuit = whole(head_writes(model, at, head, range(ALL), k=ALL))
            values = torch.linalg.eigvals(circuit.double())
            expected = float(values.real.sum() / values.abs().sum())
            assert float(found.scores["copying"][layer, head]) == pytest.approx(expected, abs=2e-3)
    assert found.figure().parts[0].rows[0][0] == "copying"


def test_a_head_made_to_copy() -> None:
    """Values and outputs that hand on what is read, of a tied table: 1, and −1 with the sign turned."""
    model = tiny.transformer("gemma3")  # tied
    at = model.decoder.layers[1].branches["attn"]
    body, d_head = at.body, at.body.spec.d_head
    with torch.no_grad():
        for norm in (at.pre_norm, at.out_norm, model.decoder.norm):
            norm.weight.fill_(1.0 - norm.spec.offset)
        body.out.weight[:, :d_head] = body.v.weight[:d_head].t()
        assert float(copying_scores(model).scores["copying"][1, 0]) == pytest.approx(1.0, abs=1e-3)
        body.out.weight[:, :d_head] *= -1
    assert float(copying_scores(model).scores["copying"][1, 0]) == pytest.approx(-1.0, abs=1e-3)


def test_encoders() -> None:
    """Both ways, with a bias by distance or none; cross-attention has no tokens for keys."""
    t5 = tiny_seq2seq.transformer("t5")
    view = head_looks_for(t5, "encoder.layers.0.attn", 2, ASKED, distance=-3, k=ALL)
    texts = [[ASKED[1], 9, 9, key] for key in range(ALL)]
    name = "encoder.layers.0.attn.scores"
    seen = trace(t5, [[0]] * ALL, (name,), sources=texts)[name]
    torch.testing.assert_close(whole(view)[1], seen[:, 2, 0, 3], rtol=1e-4, atol=2e-4)
    for view_of in (head_looks_for, head_writes):
        with pytest.raises(RequestError, match="of what an encoder made"):
            view_of(t5, "decoder.layers.0.cross", 0, ASKED)
    two = tiny_seq2seq.transformer("marian-two-tables")
    assert head_looks_for(two, "encoder.layers.0.attn", 0, [79], k=100).best.shape == (1, 80)
    bert = tiny.transformer(tiny_encoders.config("bert-mlm"))
    assert head_looks_for(bert, "encoder.layers.1.attn", 0, ASKED).best.shape == (3, 10)
    for model in (bert, two):
        with pytest.raises(RequestError, match=r"no sum|curve"):
            head_writes(model, next(iter(model.spec.stacks)) + ".layers.0.attn", 0, ASKED)


@pytest.mark.parametrize(
    ("name", "branch", "least", "most"),
    [
        ("llama", "decoder.layers.0.attn", 0, 63),
        ("bloom", "decoder.layers.0.attn", 0, 2047),
        ("mixtral-window", "decoder.layers.0.attn", 0, 7),
        ("t5", "encoder.layers.0.attn", -511, 511),
    ],
)
def test_no_further_than_a_text_or_a_window(name: str, branch: str, least: int, most: int) -> None:
    model = tiny_seq2seq.transformer(name) if name == "t5" else tiny.transformer(name)
    for distance in (least, most):
        assert head_looks_for(model, branch, 0, ASKED, distance=distance).distance == distance
    for distance in (least - 1, most + 1, 10**9, 10**30, 1.0, True):
        with pytest.raises(RequestError, match="look there") as caught:
            head_looks_for(model, branch, 0, ASKED, distance=distance)  # type: ignore[arg-type]
        assert caught.value.expected == f"an int in {least}…{most}"
    if name == "mixtral-window":  # one further, the model's own mask hides the key
        seen = trace(model, [[5, *[9] * 7, 17]], (f"{branch}.weights",))[f"{branch}.weights"]
        assert float(seen[0, 0, 8, 0]) == 0 < float(seen[0, 0, 7, 0])


def test_refusals_and_shown() -> None:
    model = tiny.transformer("llama")
    with pytest.raises(NameNotFound, match="branch with heads"):
        head_looks_for(model, "decoder.layers.0.mlp", 0, ASKED)
    with pytest.raises(RequestError, match="no such head"):
        head_writes(model, "decoder.layers.0.attn", 4, ASKED)
    with pytest.raises(RequestError, match="look there"):
        head_looks_for(model, "decoder.layers.0.attn", 0, ASKED, distance=-1)
    with pytest.raises(RequestError):
        head_writes(model, "decoder.layers.0.attn", 0, [64])
    view = head_looks_for(model, "decoder.layers.0.attn", 1, ASKED, distance=2, k=2, spell=lambda t: f"w{t}")
    row = view.figure().parts[0].rows[0]
    assert row[0] == "w5"
    assert row[1].startswith(f"w{int(view.best[0, 0])} ")
    assert "2 tokens" in view.notes[1]
    best = view.pairs(1)[0]
    assert best[2] == float(view.values.max())
    assert view.as_dict()["words"][0][0] == f"w{int(view.best[0, 0])}"
