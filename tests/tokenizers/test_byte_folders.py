"""vocab.json with merges.txt: GPT-2, RoBERTa and BART, beside `transformers`' own tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BartTokenizer, GPT2Tokenizer, RobertaTokenizer

from cutaway.errors import CutawayError, TokenizerError
from cutaway.tokenizers import Tokenizer, from_folder
from cutaway.tokenizers.save import tokenizer_files
from tests.tokenizers import small, trained
from tests.tokenizers.test_stream import streamed
from tests.tokenizers.test_wordpiece import load, plainly
from tests.tokenizers.texts import random_texts

TEXTS = [*random_texts(800, seed=41), "a <mask> b", "<mask>", "x</s>y <mask>", "<s> a"]
GREEDY = {"content": "<mask>", "lstrip": True, "rstrip": False, "single_word": False, "normalized": False}
GPT2 = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (RobertaTokenizer, {}),
        (RobertaTokenizer, {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True}),
        (RobertaTokenizer, {"mask_token": GREEDY | {"__type": "AddedToken"}}),
        (BartTokenizer, {"tokenizer_class": "BartTokenizerFast"}),
        (GPT2Tokenizer, {"tokenizer_class": "GPT2Tokenizer", **GPT2}),
        (GPT2Tokenizer, {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, **GPT2}),
    ],
    ids=str,
)
def test_as_transformers(tmp_path: Path, kind: Any, config: dict[str, Any]):
    root = trained.byte_level(tmp_path, **config)
    ours, reference = load(root), kind.from_pretrained(root)
    ids = reference(TEXTS)["input_ids"]
    assert ours.encode_batch(TEXTS, special=True) == ids
    assert ours.encode_batch(TEXTS) == plainly(reference, TEXTS)
    assert ours.encode_pair("the cat", " it is")[0] == reference("the cat", " it is")["input_ids"]
    for row in ids[:300]:
        for skip in (True, False):
            want = reference.decode(row, skip_special_tokens=skip)
            assert ours.decode(row, skip_special=skip) == want == streamed(ours, row, skip_special=skip)


def test_roberta(tmp_path: Path):
    ours = load(trained.byte_level(tmp_path, mask_token=GREEDY))
    assert (ours.bos_id, ours.pad_id, ours.eos_ids, ours.unk_id, ours.mask_id) == (0, 1, (2,), 3, 4)
    assert (ours.cls_id, ours.sep_id) == (0, 2)
    ids, types = ours.encode_pair("a", "b")
    a, b = ours.encode("a", bos=False), ours.encode("b", bos=False)
    assert (ids, types) == ([0, *a, 2, 2, *b, 2], [0] * len(ids))


def test_gpt2_is_told_by_its_vocabulary(tmp_path: Path):
    model = small.tree_of()["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])))
    ours = load(tmp_path)
    assert ours.encode("") == []
    assert (ours.bos_id, ours.eos_ids) == (0, (0,))
    assert ours.encode("a <|endoftext|>") == small.byte_level().encode("a <|endoftext|>")


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(trained.byte_level(tmp_path_factory.mktemp("roberta"), mask_token=GREEDY))


def test_masked(roberta: Tokenizer):
    """As the reference parses it, and nothing but the mask is parsed."""
    for text in ("the <mask> sat", "<mask>", "a<mask>b <mask>", "  <mask>  x", "none here", ""):
        assert roberta.encode_masked(text) == roberta.encode(text, special=True)
        assert roberta.encode_masked(text.replace("<mask>", "[MASK]")) == roberta.encode(text, special=True)
    ids = roberta.encode_masked("<s> a </s> <mask> <pad>")
    assert ids.count(4) == 1
    assert (ids.count(0), ids.count(2), ids.count(1)) == (1, 1, 0)
    assert roberta.encode("a <mask>").count(4) == 0


def test_masked_words(tmp_path: Path):
    bert = load(trained.bert(tmp_path))
    for text in ("the [MASK] is", "[MASK]", "a[MASK]b [MASK]"):
        assert bert.encode_masked(text) == bert.encode(text, special=True)
    assert bert.encode_masked("[SEP] [MASK] [CLS] <mask>").count(4) == 1
    assert bert.encode_masked("[SEP] [MASK]").count(3) == 1


def test_spans_are_words(roberta: Tokenizer):
    text = " the  naïve 🙂 cat "
    ids, spans = roberta.encode_with_spans(text)
    assert ids == roberta.encode(text)
    assert spans[0] is spans[-1] is None
    assert {char for span in spans if span for char in text[span[0] : span[1]]} == set(text) - {" "}
    ids, spans = roberta.encode_with_spans("a</s>b", special=True)
    assert [index for index, span in zip(ids, spans, strict=True) if span is None] == [0, 2, 2]


def test_no_rule_for_two():
    with pytest.raises(TokenizerError, match="two texts"):
        small.byte_level().encode_pair("a", "b")


def test_it_is_saved(tmp_path: Path, roberta: Tokenizer):
    for name, data in tokenizer_files(roberta).items():
        (tmp_path / name).write_bytes(data)
    again, reference = load(tmp_path), RobertaTokenizer.from_pretrained(tmp_path)
    assert again.encode_batch(TEXTS, special=True) == roberta.encode_batch(TEXTS, special=True)
    assert again.encode_pair("a", "b") == roberta.encode_pair("a", "b")
    assert (again.bos_id, again.eos_ids, again.mask_id, again.sep_id) == (0, (2,), 4, 2)
    assert reference("a b", "c")["input_ids"] == roberta.encode_pair("a b", "c")[0]


@pytest.mark.parametrize(
    ("name", "data", "field"),
    [
        ("merges.txt", b"#version: 0.2\na b c\n", "line 2"),
        ("merges.txt", b"ab\n", "line 1"),
        ("merges.txt", b"\n", "line 1"),
        ("merges.txt", "語 a\n".encode(), "line 1"),
        ("merges.txt", b"\xff", None),
        ("vocab.json", b"{}", None),
        ("vocab.json", b'{"a": 0, "b": 0}', "/b"),
        ("vocab.json", b'{"a": 0, "a": 1}', "/a"),
        ("vocab.json", b'{"a": true}', "/a"),
    ],
)
def test_t6_damage(tmp_path: Path, name: str, data: bytes, field: str | None):
    root = trained.byte_level(tmp_path)
    (root / name).write_bytes(data)
    with pytest.raises(CutawayError) as caught:
        load(root)
    assert Path(str(caught.value.path)).name == name
    assert caught.value.field == field


def test_half_a_folder(tmp_path: Path):
    root = trained.byte_level(tmp_path)
    (root / "merges.txt").unlink()
    assert from_folder(root) is None
    with pytest.raises(TokenizerError, match="embedding"):
        load(trained.byte_level(tmp_path), 599)
