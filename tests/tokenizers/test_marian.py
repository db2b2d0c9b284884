"""Marian's two SentencePiece models and one vocabulary, beside `transformers`' own tokenizer."""

from __future__ import annotations

import json
import random
import unicodedata
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import MarianTokenizer

from cutaway.errors import CutawayError, LimitExceeded, TokenizerError
from cutaway.tokenizers import Tokenizer, from_folder
from cutaway.tokenizers.save import tokenizer_files
from tests.tokenizers import trained
from tests.tokenizers.test_stream import streamed
from tests.tokenizers.test_wordpiece import load
from tests.tokenizers.texts import random_texts

TEXTS = random_texts(1200, seed=31)
TEXTS += [f">>deu<< {text}" for text in TEXTS[:100]] + [unicodedata.normalize("NFD", text) for text in TEXTS[:300]]
TEXTS += [">>fra<< hello", ">>xyz<< the", ">>fra<<", ">> <<", ">>fra<", "a >>fra<< b", " >>fra<<x", ">>fra<<>>deu<< a"]


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any, str]:
    root = trained.marian(tmp_path_factory.mktemp("marian"), request.param)
    names = (str(root / name) for name in ("source.spm", "target.spm", "vocab.json"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it would like a library that it then makes no use of
        reference = MarianTokenizer(*names)
    return load(root), reference, request.param


def compare(texts: list[str], ours: list[list[int]], theirs: list[list[int]], model: Any, kind: str) -> None:
    """Equal; but of cuts whose scores are equal, SentencePiece, which adds in 32 bits, may choose another."""
    ties = 0
    for text, a, b in zip(texts, ours, theirs, strict=True):
        if a != b:
            ties += 1
            assert kind == "unigram", text
            assert sorted(a) == sorted(b), text
    assert ties <= len(texts) / 300


def test_source(both: tuple[Tokenizer, Any, str]):
    ours, reference, kind = both
    ids = reference(TEXTS)["input_ids"]
    compare(TEXTS, ours.encode_batch(TEXTS, special=True), ids, reference.spm_source, kind)
    for row in ids:
        text = reference.decode(row, skip_special_tokens=True)
        assert ours.decode(row) == ours.target.decode(row) == text == streamed(ours, row)


def test_target(both: tuple[Tokenizer, Any, str]):
    ours, reference, kind = both
    ids = reference(text_target=TEXTS)["input_ids"]
    compare(TEXTS, ours.target.encode_batch(TEXTS, special=True), ids, reference.spm_target, kind)


def test_any_ids_stream_as_a_whole(both: tuple[Tokenizer, Any, str]):
    ours, reference, _ = both
    rng = random.Random(3)
    for _ in range(1500):
        row = [rng.randrange(ours.vocab_size) for _ in range(rng.randint(0, 9))]
        want = reference.decode(row, skip_special_tokens=True)
        assert streamed(ours.target, row) == ours.target.decode(row) == want
        shown = reference.decode(row, skip_special_tokens=False)  # puts a space behind a control token; we do not
        got = ours.target.decode(row, skip_special=False)
        assert streamed(ours.target, row, skip_special=False) == got
        assert got.replace(" ", "") == shown.replace(" ", "")


def test_roles(both: tuple[Tokenizer, Any, str]):
    ours, reference, _ = both
    assert (ours.eos_ids, ours.unk_id, ours.bos_id) == ((0,), 1, None)
    assert ours.pad_id == reference.pad_token_id
    assert ours.encode("") == [0]
    assert ours.encode_pair("the", "cat")[0] == reference("the", "cat")["input_ids"]
    assert ours.target is ours.target.target
    text = "a </s> b <pad><unk>"
    assert not {0, ours.pad_id} & set(ours.encode(text, bos=False))
    assert {0, ours.pad_id} < set(ours.encode(text, bos=False, special=True))


def test_places(both: tuple[Tokenizer, Any, str]):
    ours = both[0]
    text = ">>fra<< the ﬁ e\u0323\u0302  of"
    ids, spans = ours.encode_with_spans(text)
    assert ids[0] == 2
    assert (spans[0], spans[-1]) == ((0, 7), None)
    assert "".join(text[span[0] : span[1]] for span in spans if span)[:10] == ">>fra<<the"
    for text in TEXTS:
        places = [span for span in ours.encode_with_spans(text)[1] if span is not None]
        assert all(0 <= start <= end <= len(text) for start, end in places)
        assert places == sorted(places)


def test_it_is_saved(tmp_path: Path, both: tuple[Tokenizer, Any, str]):
    ours = both[0]
    files = tokenizer_files(ours)
    assert set(files) == {"source.spm", "target.spm", "vocab.json"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert load(tmp_path).encode_batch(TEXTS[:300]) == ours.encode_batch(TEXTS[:300])


def test_one_vocabulary_a_side(tmp_path: Path):
    root = trained.marian(tmp_path, separate_vocabs=True)
    vocab = json.loads((root / "vocab.json").read_text())
    inner = [name for name in vocab if name not in ("</s>", "<unk>", "<pad>")]
    turned = vocab | dict(zip(reversed(inner), map(vocab.__getitem__, inner), strict=True))
    (root / "target_vocab.json").write_text(json.dumps(turned))
    names = [str(root / name) for name in ("source.spm", "target.spm", "vocab.json", "target_vocab.json")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = MarianTokenizer(*names, separate_vocabs=True)
    ours = load(root)
    texts = [text for text in TEXTS[:300] if not text.startswith(">>")]
    want = reference(text_target=texts)["input_ids"]
    assert ours.target.encode_batch(texts, special=True) == want
    assert [ours.target.decode(row) for row in want] == reference.batch_decode(want, skip_special_tokens=True)
    assert set(tokenizer_files(ours)) == {Path(name).name for name in names} | {"tokenizer_config.json"}


def test_damage(tmp_path: Path):
    root = trained.marian(tmp_path)
    good = {path.name: path.read_bytes() for path in root.iterdir()}
    vocab = json.loads(good["vocab.json"])
    rows: list[tuple[str, bytes | None, str | None]] = [
        ("target.spm", None, None),
        ("vocab.json", None, None),
        ("vocab.json", b"{}", None),
        ("vocab.json", b"[", None),
        ("vocab.json", json.dumps(vocab | {"x": 0}).encode(), "/x"),
        ("vocab.json", json.dumps(vocab | {"x": -1}).encode(), "/x"),
        ("vocab.json", json.dumps(vocab | {"x": 2.5}).encode(), "/x"),
        ("vocab.json", json.dumps(vocab | {"x": 2**32 - 1}).encode(), "/x"),
        ("vocab.json", json.dumps({"a": 0, "</s>": 1}).encode(), None),
        ("vocab.json", json.dumps({"<unk>": 0, "a": 1}).encode(), None),
        ("source.spm", good["source.spm"][:1000], None),
        ("target.spm", b"", "pieces"),
    ]
    for name, data, field in rows:
        for kept, content in good.items():
            (root / kept).write_bytes(content)
        if data is None:
            (root / name).unlink()
        else:
            (root / name).write_bytes(data)
        with pytest.raises(CutawayError) as caught:
            load(root)
        assert Path(str(caught.value.path)).name == name
        assert field is None or caught.value.field == field
    (root / "target.spm").write_bytes(good["target.spm"])
    with pytest.raises(TokenizerError, match="past the model's embedding"):
        load(root, len(vocab) - 1)
    with pytest.raises(LimitExceeded):
        from_folder(root, limit=1000)


def test_t12_long_texts(both: tuple[Tokenizer, Any, str]):
    for char in ("a", " ", "\u0301", "👩‍👩‍👧", "語"):
        assert both[0].encode(char * 20_000)[-1] == 0
