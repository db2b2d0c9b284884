"""Labels and blanks, against transformers' pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway
from cutaway.errors import RequestError
from tests.tasks.small import TEXTS, write

LABELS = {0: "billing", 1: "shipping", 2: "returns"}
TAGS = {0: "O", 1: "B-ORDER", 2: "I-ORDER", 3: "B-ITEM", 4: "I-ITEM"}


def _pipeline(task: str, folder: Path, **options: Any) -> Any:
    import transformers

    kinds = {
        "text-classification": transformers.AutoModelForSequenceClassification,
        "token-classification": transformers.AutoModelForTokenClassification,
        "fill-mask": transformers.AutoModelForMaskedLM,
    }
    model = kinds[task].from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.pipeline(task, model=model, tokenizer=tokenizer, device="cpu", **options)


@pytest.mark.parametrize("problem", [None, "multi_label_classification", "regression"])
def test_classify(tmp_path: Path, problem: str | None) -> None:
    folder = write(tmp_path / "b", "BertForSequenceClassification", id2label=LABELS, problem_type=problem)
    theirs = _pipeline("text-classification", folder)(TEXTS, top_k=None)
    model = cutaway.load(folder)
    ours = model.classify(TEXTS)
    for mine, reference in zip(ours, theirs, strict=True):
        assert [label.label for label in mine] == [entry["label"] for entry in reference]
        for label, entry in zip(mine, reference, strict=True):
            assert label.score == pytest.approx(entry["score"], abs=1e-5)
    assert model.classify(TEXTS[1])[0].label == ours[1][0].label
    # Saved, loaded, the same.
    cutaway.save(model, tmp_path / "copy")
    assert cutaway.load(tmp_path / "copy").classify(TEXTS) == ours


def test_classify_pairs(tmp_path: Path) -> None:
    folder = write(tmp_path / "b", "BertForSequenceClassification", id2label=LABELS)
    pairs = [("the cat sat", "on the mat"), ("a", "my order was late, please refund")]
    theirs = _pipeline("text-classification", folder)([{"text": a, "text_pair": b} for a, b in pairs], top_k=None)
    ours = cutaway.load(folder).classify(pairs)
    for mine, reference in zip(ours, theirs, strict=True):
        for label, entry in zip(mine, reference, strict=True):
            assert (label.label, label.score) == (entry["label"], pytest.approx(entry["score"], abs=1e-5))


@pytest.mark.parametrize("seed", [3, 5, 8])
def test_tag(tmp_path: Path, seed: int) -> None:
    folder = write(tmp_path / "b", "BertForTokenClassification", seed, id2label=TAGS)
    pipe = _pipeline("token-classification", folder, aggregation_strategy="simple")
    model = cutaway.load(folder)
    ours = model.tag(TEXTS)
    assert sum(map(len, ours)) >= 10
    for text, mine in zip(TEXTS, ours, strict=True):
        theirs = pipe(text)
        assert [(s.label, s.start, s.end) for s in mine] == [(e["entity_group"], e["start"], e["end"]) for e in theirs]
        for span, entry in zip(mine, theirs, strict=True):
            assert span.score == pytest.approx(float(entry["score"]), abs=1e-5)
            assert span.text == text[span.start : span.end]
    assert [span.text for span in model.tag(TEXTS[0])] == [span.text for span in ours[0]]


def test_fill(tmp_path: Path) -> None:
    folder = write(tmp_path / "b", "BertForMaskedLM")
    pipe = _pipeline("fill-mask", folder)
    model = cutaway.load(folder)
    for text in ("the [MASK] sat on the mat.", "my [MASK] was [MASK] twice!"):
        theirs = pipe(text, top_k=7)
        theirs = theirs if isinstance(theirs[0], list) else [theirs]
        ours = model.fill(text, top=7)
        assert len(ours) == text.count("[MASK]") == len(theirs)
        for mine, reference in zip(ours, theirs, strict=True):
            assert [c.token for c in mine] == [entry["token"] for entry in reference]
            for candidate, entry in zip(mine, reference, strict=True):
                assert candidate.score == pytest.approx(entry["score"], abs=1e-5)
                assert candidate.text == entry["token_str"]


def test_what_the_model_is_not_for(tmp_path: Path) -> None:
    model = cutaway.load(write(tmp_path / "mlm", "BertForMaskedLM"))
    for call in (model.classify, model.tag):
        with pytest.raises(RequestError, match="does not label"):
            call("the cat")
    with pytest.raises(RequestError, match="there is no blank"):
        model.fill("the cat")
    with pytest.raises(RequestError, match="top"):
        model.fill("the [MASK]", top=0)
    labelled = cutaway.load(write(tmp_path / "labels", "BertForSequenceClassification"))
    with pytest.raises(RequestError, match="does not fill blanks"):
        labelled.fill("the [MASK]")
    with pytest.raises(RequestError, match="does not label tokens"):
        labelled.tag("the cat")
    bare = cutaway.load(write(tmp_path / "bare", "BertModel"))
    with pytest.raises(RequestError, match="scores neither"):
        bare.logits([2, 5, 3])
    assert bare.hidden([2, 5, 3]).shape == (1, 3, 32)
    assert labelled.logits([[2, 5, 3], [2, 3]]).shape == (2, 2)
    assert isinstance(model.logits([[2, 5, 3], [2, 3]]), list)
    for one in (model, labelled, bare):
        with pytest.raises(RequestError):
            one.generate("the cat")
        with pytest.raises(RequestError):
            one.score("the cat")


def test_an_encoder_has_no_cache(tmp_path: Path) -> None:
    model = cutaway.load(write(tmp_path / "bare", "BertModel"))
    with pytest.raises(RequestError, match="keeps no cache"):
        model.transformer.new_cache()
    assert torch.isfinite(model.hidden([2, 5, 3])).all()
