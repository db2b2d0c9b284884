"""BERT's tokenizer, of vocab.txt and of tokenizer.json, beside `transformers`' own."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import BertTokenizer

from cutaway.errors import CutawayError, TokenizerError
from cutaway.tokenizers import Tokenizer, from_folder
from cutaway.tokenizers.save import tokenizer_files
from cutaway.tokenizers.tidy import Tidy, tidy
from tests.tokenizers import small, trained
from tests.tokenizers.test_stream import streamed
from tests.tokenizers.texts import random_texts

TEXTS = [*random_texts(1500, seed=11), "a [SEP] b[MASK]", "[CLS]", "[UNK] [PAD]x"]
OPTIONS = [
    {},
    {"do_lower_case": False},
    {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
    {"do_lower_case": True, "strip_accents": False},
]


def load(root: Path, rows: int | None = None) -> Tokenizer:
    tokenizer = from_folder(root, vocab_rows=rows)
    assert tokenizer is not None
    return tokenizer


def plainly(reference: Any, texts: list[str]) -> list[list[int]]:
    """What it makes of texts in which control strings are text."""
    ids: list[list[int]] = reference(texts, split_special_tokens=True)["input_ids"]
    return ids


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(trained.bert(tmp_path_factory.mktemp("bert")))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_vocab_txt(tmp_path: Path, options: dict[str, Any]):
    root = trained.bert(tmp_path, **options)
    ours, reference = load(root), BertTokenizer.from_pretrained(root)
    ids = reference(TEXTS)["input_ids"]
    assert ours.encode_batch(TEXTS, special=True) == ids
    assert ours.encode_batch(TEXTS) == plainly(reference, TEXTS)
    for row in ids:
        for skip in (True, False):
            want = reference.decode(row, skip_special_tokens=skip)
            assert ours.decode(row, skip_special=skip) == want == streamed(ours, row, skip_special=skip)


@pytest.mark.real
def test_minilm():
    root = Path(os.environ["CUTAWAY_TEST_MODELS"]) / "minilm"
    assert root.exists(), f"{root} is missing: run `make models` (or leave these out with -m 'not real')"
    ours, reference = load(root, 30522), BertTokenizer.from_pretrained(root)
    reference.backend_tokenizer.no_truncation()
    reference.backend_tokenizer.no_padding()
    texts = random_texts(3000, seed=12)
    assert ours.encode_batch(texts, special=True) == reference(texts, padding=False, truncation=False)["input_ids"]
    assert ours.encode_batch(texts) == plainly(reference, texts)
    assert (ours.cls_id, ours.sep_id, ours.mask_id, ours.pad_id, ours.unk_id) == (101, 102, 103, 0, 100)
    assert len(ours.encode("word " * 200)) == 202  # the file would cut at 128 and pad up to it
    ids, spans = ours.encode_with_spans("The Café's cats")
    assert ids == [101, 1996, 7668, 1005, 1055, 8870, 102]
    assert spans == [None, (0, 3), (4, 8), (8, 9), (9, 10), (11, 15), None]
    assert ours.encode_pair("the cat", "sat") == ([101, 1996, 4937, 102, 2938, 102], [0, 0, 0, 0, 1, 1])


def test_roles(bert: Tokenizer):
    roles = (bert.pad_id, bert.unk_id, bert.cls_id, bert.sep_id, bert.mask_id)
    assert roles == tuple(range(5))
    assert bert.bos_id == bert.cls_id
    assert bert.eos_ids == ()
    assert {trained.BERT[i] for i in roles if i is not None} == set(bert.special)
    assert bert.encode("") == [2, 3]


def test_control_strings_are_text(bert: Tokenizer):
    for text in ("[SEP]", "a [MASK] b[CLS]", "[UNK]"):
        assert not {0, 2, 3, 4} & set(bert.encode(text, bos=False))


def test_offsets(bert: Tokenizer):
    for text in TEXTS[:400]:
        ids, spans = bert.encode_with_spans(text)
        assert ids == bert.encode(text)
        assert spans[0] is spans[-1] is None
        places = [span for span in spans if span is not None]
        assert len(places) == len(ids) - 2
        assert all(0 <= start < end <= len(text) for start, end in places)
        assert places == sorted(places)
        assert all(text[start:end].strip() == text[start:end] for start, end in places)
        assert [(piece.start, piece.end) for piece in bert.tokenize(text, bos=False)] == places


@pytest.mark.parametrize("cleanup", [True, False])
@pytest.mark.parametrize("tidies", [True, False])
def test_any_ids_stream_as_a_whole(tmp_path: Path, cleanup: bool, tidies: bool):
    """Clean-up inside a token is the library's, that across tokens the reference's."""
    tree = small.word_piece()
    words = [*tree["model"]["vocab"], "n't", "'m", "do", "not", "##'", "?", "##.", "n", "'s", "##e", "'v"]
    tree["model"]["vocab"] = {word: i for i, word in enumerate(words)}
    tree["decoder"]["cleanup"] = cleanup
    settings = {"clean_up_tokenization_spaces": tidies}
    ours = from_folder(small.folder(tmp_path, tree, tokenizer_config=settings), vocab_rows=len(words) + 3)
    assert ours is not None
    rng = random.Random(4)
    for _ in range(3000):
        ids = [rng.randrange(len(words) + 3) for _ in range(rng.randint(0, 9))]
        for skip in (True, False):
            want = ours.backend.decode(ids, skip_special_tokens=skip)
            want = tidy(want) if tidies else want
            assert streamed(ours, ids, skip_special=skip) == ours.decode(ids, skip_special=skip) == want


def test_tidying_piece_by_piece():
    rng = random.Random(5)
    parts = [" ", "  ", "'", "n", "n't", "'m", "m", "s", ".", "?", "x", "ve", "re", "t", " ' ", " n"]
    for _ in range(20_000):
        text = "".join(rng.choices(parts, k=rng.randint(0, 10)))
        one = Tidy()
        assert "".join(map(one.push, text)) + one.flush() == tidy(text), text


def test_tidy_is_the_reference(tmp_path: Path):
    root = trained.bert(tmp_path, clean_up_tokenization_spaces=True)
    ours, reference = load(root), BertTokenizer.from_pretrained(root)
    for row in ours.encode_batch(["it 's fine , is n't it ?", "the dogs ' tails", *TEXTS[:300]]):
        assert ours.decode(row) == reference.decode(row, skip_special_tokens=True)


def test_it_is_saved(tmp_path: Path, bert: Tokenizer):
    for name, data in tokenizer_files(bert).items():
        (tmp_path / name).write_bytes(data)
    again, reference = load(tmp_path), BertTokenizer.from_pretrained(tmp_path)
    assert again.encode_batch(TEXTS) == bert.encode_batch(TEXTS)
    assert again.encode_pair("a", "b") == bert.encode_pair("a", "b")
    assert again.special == bert.special
    assert (again.bos_id, again.cls_id, again.sep_id, again.mask_id, again.pad_id) == (2, 2, 3, 4, 0)
    assert bert.encode_batch(TEXTS, special=True) == reference(TEXTS)["input_ids"]


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"", None),
        (b"\xef\xbb\xbf[UNK]\n[CLS]\n[SEP]", None),
        (b"[UNK]\n\xff", None),
        (b"[CLS]\n[SEP]\na", None),
        (b"[UNK]\n[SEP]\na", None),
        (b"[UNK]\n[CLS]\n[SEP]\na\na \n", "line 5"),
        (b"[UNK]\n[CLS]\n[SEP]\n" + b"x" * 5000, "line 4"),
    ],
)
def test_damaged_vocab_txt(tmp_path: Path, data: bytes, place: str | None):
    (tmp_path / "vocab.txt").write_bytes(data)
    with pytest.raises(CutawayError) as caught:
        from_folder(tmp_path)
    assert caught.value.path.endswith("vocab.txt")
    assert caught.value.field == place


def test_t5_rows_and_settings_of_vocab_txt(tmp_path: Path):
    root = trained.bert(tmp_path)
    size = len(trained.word_piece_lines())
    assert load(root, size).vocab_size == size
    for rows, config in ((size - 1, {}), (None, {"do_lower_case": "yes"}), (None, {"do_basic_tokenize": False})):
        (root / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(TokenizerError):
            load(root, rows)
    (root / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MPNetTokenizer"}))
    assert from_folder(root) is None


def test_t12_long_texts(bert: Tokenizer):
    for char in ("a", " ", "\u0301", "👩‍👩‍👧", "語"):
        assert bert.encode(char * 30_000)[0] == 2


def test_t6_word_length(tmp_path: Path):
    tree = small.word_piece()
    for bad in (0, -1, 10**6, "x", None, True):
        tree["model"]["max_input_chars_per_word"] = bad
        with pytest.raises(TokenizerError) as caught:
            from_folder(small.folder(tmp_path, tree))
        assert caught.value.field == "/model/max_input_chars_per_word"
