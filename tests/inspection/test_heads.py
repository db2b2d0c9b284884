"""Scores against loops over transformers' attentions, and made-up patterns that are one thing only."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.inspection import Heads, head_scores, repeated
from tests.inspection.against import Pair, pair
from tests.reference import oracle, tiny, tiny_seq2seq

CASES = ("llama", "gemma2", "falcon-40b", "mixtral-window", "gpt2", "bert-mlm", "modernbert-mlm", "t5", "bart")
TEXT = [5, 9, 5, 7, 9, 5, 30, 9, 9, 7, 5]  # some tokens come again


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        oracle.use_attention_cap(patch)
        yield pair(request.param, tmp_path_factory.mktemp("heads") / request.param)


def by_loops(weights: Tensor, ids: list[int]) -> dict[str, float]:
    """One head, a query at a time. [query, key]"""
    w, n = weights.tolist(), len(ids)
    previous = [w[i][i - 1] for i in range(1, n)]
    duplicate = [sum(w[i][j] for j in range(i) if ids[j] == ids[i]) for i in range(n) if ids[i] in ids[:i]]
    induction = [sum(w[i][j + 1] for j in range(i) if ids[j] == ids[i]) for i in range(n) if ids[i] in ids[:i]]
    return {
        "previous": sum(previous) / len(previous),
        "duplicate": sum(duplicate) / len(duplicate),
        "induction": sum(induction) / len(induction),
        "sink": sum(w[i][0] for i in range(1, n)) / (n - 1),
        "entropy": sum(-x * math.log(x) for row in w for x in row if x > 0) / n,
        "distance": sum(w[i][j] * abs(i - j) for i in range(n) for j in range(n)) / n,
    }


def same(found: Heads, layer: int, head: int, expected: dict[str, float]) -> None:
    for kind, value in expected.items():
        assert float(found.scores[kind][layer, head]) == pytest.approx(value, rel=1e-3, abs=1e-5), kind


def test_every_head(case: Pair) -> None:
    source = None if case.source is None else TEXT[:7]
    case.ids = TEXT
    case.source = source
    with torch.no_grad():
        out = case.theirs(**case.inputs(), output_attentions=True)
    found = head_scores(case.ours, [TEXT], sources=None if source is None else [source])
    if source is None:
        stack = case.ours.spec.main
        theirs = {f"{stack}.layers.{i}.attn": (a, TEXT) for i, a in enumerate(out.attentions)}
    else:
        theirs = {f"encoder.layers.{i}.attn": (a, source) for i, a in enumerate(out.encoder_attentions)}
        theirs |= {f"decoder.layers.{i}.attn": (a, TEXT) for i, a in enumerate(out.decoder_attentions)}
        for i, weights in enumerate(out.cross_attentions):
            at = found.layers.index(f"decoder.layers.{i}.cross")
            torch.testing.assert_close(
                found.scores["sink"][at, : weights.shape[1]], weights[0, :, :, 0].mean(-1), rtol=1e-3, atol=1e-5
            )
            assert found.scores["induction"][at].isnan().all()
    for name, (weights, ids) in theirs.items():
        for head in range(weights.shape[1]):
            same(found, found.layers.index(name), head, by_loops(weights[0, head], ids))
    assert set(theirs) == {name for name in found.layers if name.endswith("attn")}


@pytest.mark.parametrize("kind", ["previous", "duplicate", "induction", "sink"])
def test_a_head_that_does_one_thing(kind: str) -> None:
    """Its own score is 1, whatever the others are."""
    scored = sys.modules["cutaway.inspection.heads"]._scored
    ids = repeated(50, 8, 1, seed=3)[0]
    n = len(ids)
    weights = torch.zeros(1, 1, n, n)
    for i in range(n):
        at = {"previous": max(i - 1, 0), "duplicate": i - 8, "induction": i - 7, "sink": 0}[kind]
        weights[0, 0, i, max(at, 0)] = 1.0
    assert float(scored(weights, torch.tensor([ids]))[kind]) == 1.0


def test_several_texts_and_what_cannot_be_had() -> None:
    model = tiny.transformer("llama")
    rows = tiny.ids(3, 9).tolist()
    each = [head_scores(model, [row]).scores["sink"] for row in rows]
    torch.testing.assert_close(head_scores(model, rows).scores["sink"], torch.stack(each).mean(0), rtol=1e-4, atol=1e-6)
    found = head_scores(model, [[5, 6, 7, 8]])
    assert found.scores["induction"].isnan().all()
    assert found.top("induction") == []
    assert found.as_dict()["scores"]["induction"][0] == [None] * 4
    with pytest.raises(RequestError, match="too short"):
        head_scores(model, [[5]])
    for rows_of, says in (([], "no texts"), ([[5, 6], [5, 6, 7]], "one length")):
        with pytest.raises(RequestError, match=says):
            head_scores(model, rows_of)
    with pytest.raises(RequestError, match="no such score"):
        found.top("importance")
    layer, head, value = found.top("sink", 1)[0]
    assert value == float(found.scores["sink"].max())
    assert float(found.scores["sink"][found.layers.index(layer), head]) == value
    assert "no explanation" in " ".join(found.figure().notes)
    mixed = tiny_seq2seq.transformer("bart")  # four heads and two
    assert head_scores(mixed, rows, sources=rows).scores["sink"][-1, 2:].isnan().all()


def test_nothing_is_kept() -> None:
    """A layer's weights are gone when the next layer's are there."""
    import weakref

    module = sys.modules["cutaway.inspection.heads"]
    model, alive, most = tiny.transformer("llama"), [], []
    real = module._scored

    def watched(weights: Tensor, ids: Tensor) -> dict[str, Tensor]:
        alive.append(weakref.ref(weights))
        most.append(sum(one() is not None for one in alive))
        return real(weights, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_scored", watched)
        head_scores(model, tiny.ids(1, 9).tolist())
    assert most == [1, 1, 1]


def test_repeated() -> None:
    rows = repeated([7, 8, 9], 5, 3, times=3, seed=1, first=2)
    assert [len(row) for row in rows] == [16] * 3
    assert all(row[0] == 2 and row[1:6] == row[6:11] == row[11:] and set(row[1:]) <= {7, 8, 9} for row in rows)
    assert rows == repeated([7, 8, 9], 5, 3, times=3, seed=1, first=2)
    assert rows != repeated([7, 8, 9], 5, 3, times=3, seed=2, first=2)


def test_seeds_and_counts_that_are_none() -> None:
    for seed in ("a", 1 << 80, 1.5, True):
        with pytest.raises(RequestError, match="seed"):
            repeated(9, 3, 1, seed=seed)  # type: ignore[arg-type]
    found = head_scores(tiny.transformer("llama"), tiny.ids(1, 9).tolist())
    assert found.top("sink", 0) == []
    for n in (-1, 1.5, None):
        with pytest.raises(RequestError, match="n: not a whole number"):
            found.top("sink", n)  # type: ignore[arg-type]
