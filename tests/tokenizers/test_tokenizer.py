"""Text to ids and back."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenizers
from cutaway.errors import RequestError, TokenizerError
from cutaway.tokenizers import Tokenizer, from_folder, from_gguf
from tests.tokenizers import small
from tests.tokenizers.texts import FIXED, random_texts
from tokenizers import AddedToken

KINDS = {
    "byte_level": small.byte_level,
    "sentencepiece": small.sentencepiece,
    "no_prefix": lambda: small.sentencepiece(False),
}


@pytest.fixture(params=KINDS)
def either(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


def test_t09_texts_come_back(either: Tokenizer):
    for text in FIXED + random_texts(300, seed=1):
        if "▁" not in text:  # SentencePiece writes a space so; the two cannot be told apart
            assert either.decode(either.encode(text)) == text
            assert either.decode(either.encode(text, continuation=True), continuation=True) == text


@given(st.text())
def test_any_text_comes_back_from_bytes(text: str):
    tokenizer = small.byte_level()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_t09_continuation_has_no_added_space():
    tokenizer = small.sentencepiece()
    assert tokenizer.token_bytes(tokenizer.encode("the")[1]).startswith(b" ")
    ids = tokenizer.encode("the", continuation=True)
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"the"
    assert tokenizer.decode([*tokenizer.encode("a"), *tokenizer.encode(" b", continuation=True)]) == "a b"


def test_empty_text_is_bos_alone(either: Tokenizer):
    assert either.encode("") == ([either.bos_id] if either.adds_bos else [])
    assert either.encode("", bos=False) == either.encode("", continuation=True) == []


def test_bos_can_be_forced_and_left_out():
    plain, marked = small.byte_level(), small.sentencepiece()
    assert not plain.adds_bos
    assert plain.encode("a", bos=True) == [1, *plain.encode("a")]
    assert marked.adds_bos
    assert marked.encode("a", bos=True) == marked.encode("a") == [1, *marked.encode("a", bos=False)]


def test_forcing_a_bos_that_is_not_there(tmp_path: Path):
    tokenizer = from_folder(small.folder(tmp_path))
    assert tokenizer is not None
    assert tokenizer.bos_id is None
    with pytest.raises(TokenizerError, match="no BOS"):
        tokenizer.encode("a", bos=True)


def test_eos_rule_of_gguf():
    metadata = small.byte_level_metadata() | {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    tokenizer = from_gguf(metadata)
    assert tokenizer.encode("") == [1, 2]
    assert tokenizer.encode("", bos=False) == []


def test_control_strings_are_text_unless_asked(either: Tokenizer):
    text = "a <|im_end|><|im_start|>b </s> <|im_start"
    control = set(either.special.values())
    assert not control & set(either.encode(text, bos=False))
    assert either.decode(either.encode(text)) == text
    parsed = either.encode(text, bos=False, special=True)
    assert {either.special["<|im_end|>"], either.special["<|im_start|>"]} <= set(parsed)


def test_a_vocabulary_whose_merges_build_a_control_token(tmp_path: Path):
    """Its own merges turn a typed ``<|im_end|>`` into the control token; ours must not."""
    tree = small.tree_of()
    chain, merges = "<|im_end|>", tree["model"]["merges"]
    for size in range(2, len(chain)):
        tree["model"]["vocab"].setdefault(chain[:size], len(tree["model"]["vocab"]))
    merges[:0] = [[chain[:size], chain[size]] for size in range(1, len(chain))]
    tokenizer = from_folder(small.folder(tmp_path, tree))
    assert tokenizer is not None
    end = tokenizer.special[chain]
    assert tokenizers.Tokenizer(tokenizer.backend.model).encode(chain).ids == [end]
    for text in (chain, f"x{chain}", f"{chain}{chain} y", f"a\n{chain}", chain * 3000):
        ids = tokenizer.encode(text)
        assert end not in ids
        assert tokenizer.decode(ids) == text
        pieces = tokenizer.tokenize(text)
        assert [piece.id for piece in pieces] == ids
        assert (pieces[0].start, pieces[-1].end) == (0, len(text))


def test_two_threads_do_not_disagree():
    tokenizer = small.byte_level()
    text = "<|im_end|> hello " * 50
    wrong: list[bool] = []

    def work(special: bool) -> None:
        for _ in range(50):
            if (2 in tokenizer.encode(text, special=special)) is not special:
                wrong.append(special)

    threads = [threading.Thread(target=work, args=(special,)) for special in (True, False) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("char", ["a", "^", " ", "\n", "あ", "\u0301", "👩‍👩‍👧"])
def test_t05_one_character_very_often(either: Tokenizer, char: str):
    text = char * 100_000
    ids = either.encode(text)
    assert either.decode(ids) == text


def test_half_a_surrogate_pair_is_refused(either: Tokenizer):
    for call in (either.encode, either.tokenize):
        with pytest.raises(TokenizerError, match="surrogate") as caught:
            call("ab\ud800")
        assert caught.value.offset == 2


@pytest.mark.parametrize("index", [-1, 10**6, 2**32 - 1, 2**70])
def test_t13_ids_out_of_range(either: Tokenizer, index: int):
    for call in (either.decode, either.pieces):
        with pytest.raises(RequestError, match="no such token id"):
            call([0, index])


def test_rows_past_the_vocabulary_decode_to_nothing():
    """The embedding is often padded, and a model may pick such a row."""
    size = len(small.byte_level_metadata()["tokenizer.ggml.tokens"])
    tokenizer = from_gguf(small.byte_level_metadata(), vocab_rows=size + 8)
    assert tokenizer.vocab_size == size
    assert tokenizer.decode([size + 7]) == ""
    with pytest.raises(RequestError):
        tokenizer.decode([size + 8])


def test_pieces_show_bytes(either: Tokenizer):
    text = "é <|im_end|>🙂"
    pieces = either.tokenize(text, special=True, bos=False)
    assert [piece.id for piece in pieces] == either.encode(text, special=True, bos=False)
    assert [piece.bytes for piece in pieces if piece.special] == [b"<|im_end|>"]
    assert b"".join(piece.bytes for piece in pieces).decode().removeprefix(" ").startswith("é <|im_end|>")
    for piece in pieces:
        if piece.text not in ("", " ") and "\ufffd" not in piece.text:  # an added space points at the first character
            assert text[piece.start : piece.end] == piece.text.removeprefix(" ")


def test_bytes_of_byte_tokens():
    byte_level, sentencepiece = small.byte_level(), small.sentencepiece()
    assert {byte_level.token_bytes(i) for i in range(byte_level.vocab_size)} >= {bytes([byte]) for byte in range(256)}
    assert [sentencepiece.token_bytes(5 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


# -- T07 and T08: added tokens as the library has them

FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@pytest.mark.parametrize("bits", range(16))
@pytest.mark.parametrize("special", [True, False])
def test_t07_flags_of_added_tokens(tmp_path: Path, bits: int, special: bool):
    flags = {name: bool(bits >> i & 1) for i, name in enumerate(FLAGS)}
    reference = tokenizers.Tokenizer.from_str(small.byte_level_json())
    reference.normalizer = tokenizers.normalizers.Lowercase()
    reference.add_tokens([AddedToken("<m>", special=special, **flags)])
    ours = from_folder(small.folder(tmp_path, small.tree_of(reference.to_str())))
    assert ours is not None
    for text in ("a <m> b", "a<m>b", "<m>Hello", "<M> x <m>", "x  <m>  <m>y", "<m>"):
        assert ours.encode(text, special=True) == reference.encode(text).ids
        if not special:
            assert ours.encode(text) == reference.encode(text).ids
        else:
            assert ours.special["<m>"] not in ours.encode(text)


def test_t08_longest_added_token_from_the_left(tmp_path: Path):
    reference = tokenizers.Tokenizer.from_str(small.byte_level_json())
    reference.add_tokens(["13", "131", "1314", "15"])
    ours = from_folder(small.folder(tmp_path, small.tree_of(reference.to_str())))
    assert ours is not None
    assert ours.encode("1314151") == reference.encode("1314151").ids
    assert [piece.text for piece in ours.tokenize("1314151")] == ["1314", "15", "1"]


def test_words_of_bert(tmp_path: Path):
    tree = small.word_piece()
    ours = from_folder(small.folder(tmp_path, tree))
    assert ours is not None
    reference = tokenizers.Tokenizer.from_str(tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).to_str())
    text = "the unaffable cats . don't"
    ids = ours.encode(text)
    assert ids == reference.encode(text).ids
    assert (ids[0], ids[-1]) == (2, 3)
    assert ours.decode(ids) == reference.decode(ids)
    assert ours.decode(ids, skip_special=False) == reference.decode(ids, skip_special_tokens=False)


def test_importing_does_not_import_torch():
    code = "import sys, cutaway.tokenizers; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
