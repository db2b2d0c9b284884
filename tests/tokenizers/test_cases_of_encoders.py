"""Cases T05, T07 and T08 for WordPiece and Unigram, beside `transformers`' and the library's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import BertTokenizer, T5Tokenizer

import tokenizers
from cutaway.tokenizers import Tokenizer, from_folder
from cutaway.tokenizers.spm import read_spm
from tests.tokenizers import small, trained
from tests.tokenizers.test_unigram import NUMBERED
from tests.tokenizers.texts import random_texts
from tokenizers import AddedToken

FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
MARKED = ("a <m> b", "a<m>b", "<m>Hello", "<M> x <m>", "x  <m>  <m>y", "<m>")
RARE = [" Việt", "\n\n", "12345", "don't", "a     b", "x\u2029y", "1314151"]


def pair(kind: str, root: Path) -> tuple[Tokenizer, Any]:
    """Ours, and the library's object as transformers makes it."""
    if kind == "wordpiece":
        folder = trained.bert(root)
        reference = BertTokenizer.from_pretrained(folder).backend_tokenizer
    else:
        folder = trained.t5(root)
        data = trained.spm(**NUMBERED)
        model = trained.processor(data)
        vocab = [(model.id_to_piece(i), model.get_score(i)) for i in range(len(model))]
        vocab += [(f"<extra_id_{i}>", 0.0) for i in reversed(range(100))]
        reference = T5Tokenizer(vocab=vocab, _spm_precompiled_charsmap=read_spm(data, "").charsmap).backend_tokenizer
    ours = from_folder(folder)
    assert ours is not None
    return ours, reference


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_t05_one_character(kind: str, tmp_path: Path) -> None:
    ours, reference = pair(kind, tmp_path)
    for character in ("a", "^", " ", "\n", "あ"):
        text = character * 100_000
        ids = ours.encode(text)
        assert ids == reference.encode(text).ids
        assert ours.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
@pytest.mark.parametrize("bits", range(16))
def test_t07_flags_of_added_tokens(kind: str, bits: int, tmp_path: Path) -> None:
    flags = {name: bool(bits >> i & 1) for i, name in enumerate(FLAGS)}
    _, reference = pair(kind, tmp_path / "plain")
    for special in (True, False):
        marked = tokenizers.Tokenizer.from_str(reference.to_str())
        marked.add_tokens([AddedToken("<m>", special=special, **flags)])
        ours = from_folder(small.folder(tmp_path / str(special), small.tree_of(marked.to_str())))
        assert ours is not None
        for text in MARKED:
            assert ours.encode(text, special=True) == marked.encode(text).ids
            if not special:
                assert ours.encode(text) == marked.encode(text).ids


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_t08_ten_thousand_texts(kind: str, tmp_path: Path) -> None:
    ours, reference = pair(kind, tmp_path)
    texts = [*random_texts(10_000, seed=31), *RARE]
    wanted = [found.ids for found in reference.encode_batch(texts)]
    differ = sum(a != b for a, b in zip(ours.encode_batch(texts, special=True), wanted, strict=True))
    print(f"\n{kind}: {differ} of {len(texts)} differ")
    assert differ == 0
    marked = tokenizers.Tokenizer.from_str(reference.to_str())
    marked.add_tokens(["13", "131", "1314", "15"])
    again = from_folder(small.folder(tmp_path / "marked", small.tree_of(marked.to_str())))
    assert again is not None
    assert again.encode("1314151") == marked.encode("1314151").ids
