"""A SentencePiece file from a stranger: read as SentencePiece reads it, or refused with its place."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from cutaway.errors import CutawayError, LimitExceeded, TokenizerError
from cutaway.tokenizers import from_folder
from cutaway.tokenizers.charsmap import Charsmap
from cutaway.tokenizers.spm import read_spm
from tests.tokenizers import trained
from tests.tokenizers.texts import random_texts


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def part(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value % 2**64)
    return varint(number << 3 | 2) + varint(len(value)) + value


def piece(text: bytes, score: float = -1.0, kind: int = 1) -> bytes:
    return part(1, part(1, text) + part(2, score) + part(3, kind))


UNKNOWN = piece(b"<unk>", 0.0, 2)
GOOD = UNKNOWN + piece(b"a")


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_all_it_says(kind: str):
    data = trained.spm(kind, add_dummy_prefix=False, byte_fallback=True, vocab_size=900)
    found, model = read_spm(data, "x"), trained.processor(data)
    assert (found.kind, found.dummy_prefix, found.tidy_spaces, found.byte_fallback) == (kind, False, True, True)
    assert found.unknown == model.unk_id()
    for i, one in enumerate(found.pieces):
        assert (one.text, one.score) == (model.id_to_piece(i), model.get_score(i))
        flags = (one.kind == 2, one.kind == 3, one.kind == 6)
        assert flags == (model.is_unknown(i), model.is_control(i), model.is_byte(i))


def test_what_is_not_said():
    found = read_spm(GOOD, "x")
    assert (found.kind, found.unknown, found.charsmap) == ("unigram", 0, b"")
    assert (found.dummy_prefix, found.tidy_spaces, found.byte_fallback) == (True, True, False)
    extended = part(1, part(1, b"b") + part(9, b"?") + part(200, 1) + varint(11 << 3 | 1) + b"12345678")
    assert [one.text for one in read_spm(GOOD + extended + part(4, b"tests") + part(300, 5), "x").pieces][2:] == ["b"]


ROWS: dict[str, tuple[bytes, str | None]] = {
    "empty": (b"", "pieces"),
    "no unknown": (piece(b"a"), "pieces"),
    "two unknown": (UNKNOWN + piece(b"b", 0.0, 2), "pieces"),
    "twice": (GOOD + piece(b"a"), "pieces[2].piece"),
    "empty piece": (GOOD + piece(b""), "pieces[2].piece"),
    "no piece": (GOOD + part(1, b""), "pieces[2].piece"),
    "long piece": (GOOD + piece(b"x" * 300), "pieces[2].piece"),
    "not UTF-8": (GOOD + piece(b"a\xff"), "pieces[2].piece"),
    "half a surrogate": (GOOD + piece(b"\xed\xa0\x80"), "pieces[2].piece"),
    "score NaN": (GOOD + piece(b"b", float("nan")), "pieces[2].score"),
    "score infinite": (GOOD + piece(b"b", float("-inf")), "pieces[2].score"),
    "score as a number": (GOOD + part(1, part(1, b"b") + part(2, 5)), "pieces[2].score"),
    "kind 0": (GOOD + piece(b"b", 0.0, 0), "pieces[2].type"),
    "kind 7": (GOOD + piece(b"b", 0.0, 7), "pieces[2].type"),
    "kind -1": (GOOD + piece(b"b", 0.0, -1), "pieces[2].type"),
    "kind 2**40": (GOOD + piece(b"b", 0.0, 2**40), "pieces[2].type"),
    "kind as text": (GOOD + part(1, part(1, b"b") + part(3, b"1")), "pieces[2].type"),
    "no byte": (GOOD + piece(b"<0xZZ>", 0.0, 6), "pieces[2].piece"),
    "piece is a number": (GOOD + part(1, 7), "pieces[2]"),
    "bytes missing": (GOOD + part(2, part(35, 1)), "trainer_spec.byte_fallback"),
    "model of words": (GOOD + part(2, part(3, 3)), "trainer_spec.model_type"),
    "spaces behind": (GOOD + part(2, part(24, 1)), "trainer_spec.treat_whitespace_as_suffix"),
    "spaces bare": (GOOD + part(3, part(5, 0)), "normalizer_spec.escape_whitespaces"),
    "flag 2": (GOOD + part(3, part(3, 2)), "normalizer_spec.add_dummy_prefix"),
    "flag as bytes": (GOOD + part(3, part(4, b"x")), "normalizer_spec.remove_extra_whitespaces"),
    "settings are a number": (GOOD + part(2, 5), "trainer_spec"),
    "field 0": (GOOD + b"\x00\x00", None),
    "group": (GOOD + b"\x0b\x0c", None),
    "wire type 7": (GOOD + b"\x0f", None),
    "endless number": (GOOD + b"\x08" + b"\x80" * 20, None),
    "number cut": (GOOD + b"\x08\x80", None),
    "65 bits": (GOOD + b"\x08" + b"\xff" * 9 + b"\x7f", None),
    "past the end": (GOOD + b"\x0a\x05ab", None),
    "2**60 bytes": (GOOD + b"\x0a" + varint(2**60), None),
    "past the end, inside": (GOOD + part(1, b"\x0a\x05ab"), None),
    "4 bytes cut": (GOOD + part(1, b"\x15\0\0"), None),
}


@pytest.mark.parametrize("row", ROWS)
def test_rows(row: str):
    data, field = ROWS[row]
    with pytest.raises((TokenizerError, LimitExceeded)) as caught:
        read_spm(data, "x.model")
    assert caught.value.path == "x.model"
    assert caught.value.field == field
    assert field in ("pieces", "trainer_spec.byte_fallback") or "twice" in row or caught.value.offset is not None


def test_budgets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cutaway.tokenizers.spm._MOST_PIECES", 100)
    with pytest.raises(LimitExceeded, match="too many pieces"):
        read_spm(GOOD + part(1, b"\x0a\x01z") * 200, "x")
    monkeypatch.setattr("cutaway.tokenizers.spm.MOST_TEXT", 1000)
    with pytest.raises(LimitExceeded, match="too long"):
        read_spm(GOOD + b"".join(piece(f"{i}".encode() * 90) for i in range(10, 20)), "x")
    monkeypatch.setattr("cutaway.tokenizers.spm._LARGEST_MAP", 1000)
    with pytest.raises(LimitExceeded) as caught:
        read_spm(GOOD + part(3, part(2, b"x" * 2000)), "x")
    assert caught.value.field == "normalizer_spec.precompiled_charsmap"


def _result(root: Path, data: bytes) -> str:
    """What becomes of a file: a working tokenizer, or an error of ours."""
    try:
        tokenizer = from_folder(trained.t5(root, data))
        assert tokenizer is not None
        ids = tokenizer.encode("a the é ﬁ 語 e\u0301")
        tokenizer.decode(ids)
    except CutawayError as error:
        return type(error).__name__
    return "fine"


def test_t6_every_prefix(tmp_path: Path):
    data = trained.spm(pad_id=0, eos_id=1, unk_id=2, bos_id=-1, normalization_rule_name="identity")
    ends = [*range(200), *range(200, len(data), 211)]
    assert "fine" not in {_result(tmp_path, data[:end]) for end in ends if not _whole(data, end)}


def _whole(data: bytes, end: int) -> bool:
    try:
        read_spm(data[:end], "x")
    except CutawayError:
        return False
    return True


@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_damage_anywhere(tmp_path: Path, rule: str):
    data = trained.spm(pad_id=0, eos_id=1, unk_id=2, bos_id=-1, normalization_rule_name=rule)
    rng = random.Random(6)
    for _ in range(150 if rule == "identity" else 40):
        broken = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        _result(tmp_path, bytes(broken))


# -- the table of characters


@pytest.mark.parametrize("rule", ["nmt_nfkc", "nfkc", "nmt_nfkc_cf", "identity"])
def test_the_table_as_sentencepiece_has_it(rule: str):
    import unicodedata

    data = trained.spm("bpe", normalization_rule_name=rule, remove_extra_whitespaces=False, add_dummy_prefix=False)
    table, model = Charsmap(read_spm(data, "").charsmap), trained.processor(data)
    texts = random_texts(800, seed=8)
    texts += [unicodedata.normalize("NFD", text) for text in texts] + ["Tiếng Việt", "ｶﾞｷﾞ", "한국어", "ABC"]
    for text in texts:
        assert table.prepare(text).text.replace(" ", "▁") == model.normalize(text)


def test_the_table_keeps_places():
    data = trained.spm("bpe", normalization_rule_name="nmt_nfkc")
    table = Charsmap(read_spm(data, "").charsmap, keep=["①x"])
    text = "aﬁb\x07e\u0323\u0302 ①x①"
    ready = table.prepare(text)
    assert ready.text == "afibệ ①x1"
    for word, place in {"fi": (1, 2), "ệ": (4, 7), "①x": (8, 10), "1": (10, 11)}.items():
        start = ready.text.index(word)
        assert ready.place(start, start + len(word)) == place
    assert ready.place(len(ready.text), len(ready.text)) == (len(text), len(text))


@pytest.mark.parametrize("data", [b"\1", b"\4\0\0\0", b"\3\0\0\0abcd", b"\4\0\0\0abcd" + b"x" * 300])
def test_t3_a_broken_table(data: bytes):
    with pytest.raises(TokenizerError) as caught:
        Charsmap(data, path="x")
    assert caught.value.field == "normalizer_spec.precompiled_charsmap"


def test_a_hostile_table_ends():
    rng = random.Random(9)
    for _ in range(300):
        units: Any = bytes(rng.randrange(256) for _ in range(4 * 64))
        table = Charsmap(len(units).to_bytes(4, "little") + units + b"abc\0defg")
        assert len(table.prepare("the é 語 " * 20).text) <= 256 * 200
