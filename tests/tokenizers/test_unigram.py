"""T5's tokenizer of spiece.model, beside `transformers`' own and SentencePiece."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, T5Tokenizer

from cutaway.errors import CutawayError, TokenizerError
from cutaway.tokenizers import Tokenizer, from_folder
from cutaway.tokenizers.save import tokenizer_files
from cutaway.tokenizers.spm import read_spm
from tests.tokenizers import trained
from tests.tokenizers.test_stream import streamed
from tests.tokenizers.test_wordpiece import load, plainly
from tests.tokenizers.texts import random_texts

TEXTS = random_texts(1500, seed=21)
NUMBERED = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(trained.t5(tmp_path_factory.mktemp("t5")))


@pytest.fixture(scope="module")
def reference() -> Any:
    """As `transformers` makes it of the file, which it can read only with one more library."""
    data = trained.spm(**NUMBERED)
    model = trained.processor(data)
    vocab = [(model.id_to_piece(i), model.get_score(i)) for i in range(len(model))]
    vocab += [(f"<extra_id_{i}>", 0.0) for i in reversed(range(100))]
    return T5Tokenizer(vocab=vocab, _spm_precompiled_charsmap=read_spm(data, "").charsmap)


def test_as_transformers(t5: Tokenizer, reference: Any):
    ids = reference(TEXTS)["input_ids"]
    assert t5.encode_batch(TEXTS, special=True) == ids
    assert t5.encode_batch(TEXTS) == plainly(reference, TEXTS)
    for row in ids:
        for skip in (True, False):
            want = reference.decode(row, skip_special_tokens=skip)
            assert t5.decode(row, skip_special=skip) == want == streamed(t5, row, skip_special=skip)


def test_any_ids_stream_as_a_whole(t5: Tokenizer, reference: Any):
    rng = random.Random(3)
    for _ in range(2000):
        row = [rng.randrange(t5.vocab_size) for _ in range(rng.randint(0, 9))]
        for skip in (True, False):
            want = reference.decode(row, skip_special_tokens=skip)
            assert streamed(t5, row, skip_special=skip) == t5.decode(row, skip_special=skip) == want


def test_as_sentencepiece(t5: Tokenizer):
    """Every difference is one of two: the library's way with the table of characters (`charsmap.py`), or a tie of
    scores, which SentencePiece adds up in 32 bits and the library in 64.
    """
    model = trained.processor(trained.spm(**NUMBERED))
    differ = 0
    for text, ours, theirs in zip(TEXTS, t5.encode_batch(TEXTS, bos=False), model.encode(TEXTS), strict=True):
        if ours == theirs:
            continue
        differ += 1
        normal = "▁".join(t5.backend.normalizer.normalize_str(text).split())
        tie = abs(sum(map(model.get_score, ours)) - sum(map(model.get_score, theirs))) < 1e-4
        assert tie or "▁" + normal != model.normalize(text), text
    assert differ < len(TEXTS) / 100


def test_roles_and_sentinels(t5: Tokenizer, reference: Any):
    assert (t5.pad_id, t5.eos_ids, t5.unk_id, t5.bos_id, t5.mask_id) == (0, (1,), 2, None, None)
    for i in (0, 7, 99):
        assert t5.special[f"<extra_id_{i}>"] == reference.convert_tokens_to_ids(f"<extra_id_{i}>")
    assert t5.encode("a <extra_id_0> b", special=True)[-1] == 1
    assert t5.special["<extra_id_0>"] in t5.encode("a <extra_id_0> b", special=True)
    assert t5.encode("") == [1]
    with pytest.raises(TokenizerError, match="no mask"):
        t5.encode_masked("a")


def test_control_strings_are_text(t5: Tokenizer):
    for text in ("</s>", "a <pad> b", "the <extra_id_3>", "<unk>"):
        assert not ({0, 1} | {*range(t5.vocab_size - 100, t5.vocab_size)}) & set(t5.encode(text, bos=False))
        assert t5.encode(text, bos=False) == trained.processor(trained.spm(**NUMBERED)).encode(text)


def test_pairs(t5: Tokenizer, reference: Any):
    ids, types = t5.encode_pair("the cat", "it is")
    assert ids == reference("the cat", "it is")["input_ids"]
    assert types == [0] * len(ids)


def test_t09_a_text_that_goes_on(t5: Tokenizer):
    for text in ("the", " the", "the words of it", " of the "):
        ids = t5.encode(text, continuation=True)
        assert t5.decode(ids, continuation=True) == text.rstrip()
    assert t5.decode([*t5.encode("of", bos=False), *t5.encode(" the", continuation=True)]) == "of the"


def test_places(t5: Tokenizer):
    ids, spans = t5.encode_with_spans("  the of")
    assert spans[-1] is None
    assert len(ids) == len(spans)
    text = "  the of"
    assert "".join(text[span[0] : span[1]] for span in spans if span) == "theof"
    for text in TEXTS[:300]:
        places = [span for span in t5.encode_with_spans(text)[1] if span is not None]
        assert all(0 <= start <= end <= len(text) for start, end in places)
        assert places == sorted(places)


def test_it_is_saved(tmp_path: Path, t5: Tokenizer):
    for name, data in tokenizer_files(t5).items():
        (tmp_path / name).write_bytes(data)
    again, reference = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert again.encode_batch(TEXTS) == t5.encode_batch(TEXTS)
    assert again.encode_pair("a", "b") == t5.encode_pair("a", "b")
    assert (again.special, again.eos_ids, again.pad_id) == (t5.special, t5.eos_ids, t5.pad_id)
    assert reference(TEXTS)["input_ids"] == t5.encode_batch(TEXTS, special=True)


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        {"add_dummy_prefix": False},
        {"byte_fallback": True, "vocab_size": 900},
        {"kind": "bpe"},
        {"kind": "bpe", "byte_fallback": True, "vocab_size": 900, "add_dummy_prefix": False},
    ],
    ids=str,
)
def test_every_setting_as_sentencepiece(tmp_path: Path, options: dict[str, Any]):
    data = trained.spm(**NUMBERED, **{"normalization_rule_name": "nfkc", **options})
    ours, model = load(trained.t5(tmp_path, data)), trained.processor(data)
    assert read_spm(data, "").kind == options.get("kind", "unigram")
    differ = 0
    for text in TEXTS[:500]:
        got, want = ours.encode(text, bos=False), model.encode(text)
        if got != want:
            differ += 1
        elif "byte_fallback" in options and "▁" not in text:
            assert ours.decode(got) == model.decode(want)
    assert differ <= 10  # the library's way with the table, and ties


def test_symbols_of_the_users_as_transformers(tmp_path: Path):
    """It finds them before SentencePiece's rules apply, which would put no space behind one."""
    data = trained.spm(**NUMBERED, user_defined_symbols="<sep>,the")
    ours = load(trained.t5(tmp_path, data))
    pieces = [ours.backend.id_to_token(index) for index in ours.encode("this<sep>is", bos=False)]
    assert pieces[pieces.index("<sep>") + 1].startswith("▁")
    assert "<sep>" not in ours.special


def test_settings(tmp_path: Path):
    data = trained.spm(**NUMBERED)
    size = len(trained.processor(data))
    root = trained.t5(tmp_path, data, extra_ids=7, tokenizer_class="T5TokenizerFast")
    assert load(root, size + 7).vocab_size == size + 7
    with pytest.raises(TokenizerError, match="embeddings"):
        load(root, size + 6)
    for config in ({"extra_ids": -1}, {"extra_ids": 10**9}, {"extra_ids": "a"}, {"eos_token": "<nope>"}):
        (root / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(TokenizerError):
            load(root)
    (root / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "AlbertTokenizer"}))
    assert from_folder(root) is None


def test_bytes_that_are_typed_are_text(tmp_path: Path):
    data = trained.spm(**NUMBERED, byte_fallback=True, vocab_size=900)
    ours = load(trained.t5(tmp_path, data))
    for text in ("<0x41>", "a <0x0A><0x41> b", "<0x", "語<0x41>語語語"):
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("field", ["charsmap", "score", "type"])
def test_t3_damaged_in_one_place(tmp_path: Path, field: str):
    data = bytearray(trained.spm(**NUMBERED))
    if field == "charsmap":  # the length of its trie
        at = data.index(read_spm(bytes(data), "").charsmap[:64])
        data[at : at + 4] = b"\xff\xff\xff\x7f"
    elif field == "score":
        at = data.index(b"</s>") + 5
        data[at : at + 4] = b"\0\0\xc0\x7f"
    else:
        at = data.index(b"</s>") + 10
        data[at] = 9
    with pytest.raises(CutawayError) as caught:
        load(trained.t5(tmp_path, bytes(data)))
    assert caught.value.path is not None
    assert caught.value.path.endswith("spiece.model")
    assert field in str(caught.value.field)


def test_rows_of_tokenizer_json(tmp_path: Path, t5: Tokenizer):
    """Where a Unigram file lies about sizes: T3, T6, and budgets on what the library would build of it."""
    good = tokenizer_files(t5)["tokenizer.json"]
    table = base64.b64decode(json.loads(good)["normalizer"]["precompiled_charsmap"])
    long = base64.b64encode(table + b"x" * 300).decode()
    rows: list[tuple[tuple[Any, ...], Any, str]] = [
        (("normalizer", "precompiled_charsmap"), "AAAA", "/normalizer/precompiled_charsmap"),
        (("normalizer", "precompiled_charsmap"), "%", "/normalizer/precompiled_charsmap"),
        (("normalizer", "precompiled_charsmap"), long, "/normalizer/precompiled_charsmap"),
        (("model", "unk_id"), t5.vocab_size, "/model/unk_id"),
        (("model", "vocab", 5, 1), "x", "/model/vocab/5"),
        (("model", "vocab", 5, 0), "</s>", "/model/vocab/5"),
        (("model", "vocab", 5, 0), "x" * (7 << 20), "/model/vocab"),
        (("model", "vocab"), {"a": 0}, "/model/vocab"),
    ]
    for (*path, last), value, field in rows:
        tree = json.loads(good)
        node = tree
        for key in path:
            node = node[key]
        node[last] = value
        (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
        with pytest.raises(TokenizerError) as caught:
            load(tmp_path)
        assert caught.value.field == field
