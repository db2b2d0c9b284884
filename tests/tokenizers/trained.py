"""Small vocabularies of every kind that encoders have, trained here, as the folders their authors would publish."""

from __future__ import annotations

import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece

import tokenizers
from tests.tokenizers.texts import _WORDS, random_texts
from tokenizers import models, normalizers, pre_tokenizers, trainers

ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def _lines(seed: int) -> list[str]:
    rng = random.Random(seed)
    words = [" ".join(rng.choices(_WORDS, k=12)) for _ in range(600)]
    return words + [text.replace("\n", " ") for text in random_texts(100, seed=7 + seed)]


@cache
def spm(kind: str = "unigram", seed: int = 0, **options: Any) -> bytes:
    """A SentencePiece model of a few hundred pieces."""
    out = io.BytesIO()
    settings = {"vocab_size": 600, "character_coverage": 0.985} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_lines(seed)),
        model_writer=out,
        model_type=kind,
        minloglevel=2,
        hard_vocab_limit=False,
        num_threads=1,
        **settings,
    )
    return out.getvalue()


def processor(data: bytes) -> Any:
    return sentencepiece.SentencePieceProcessor(model_proto=data)


def t5(root: Path, data: bytes | None = None, **config: Any) -> Path:
    """spiece.model, numbered as T5's."""
    root.mkdir(parents=True, exist_ok=True)
    made = spm(pad_id=0, eos_id=1, unk_id=2, bos_id=-1) if data is None else data
    (root / "spiece.model").write_bytes(made)
    return _settings(root, config)


def marian(root: Path, kind: str = "unigram", **config: Any) -> Path:
    """source.spm, target.spm and vocab.json, which lacks some of their pieces."""
    root.mkdir(parents=True, exist_ok=True)
    sides = {"source.spm": spm(kind, 0), "target.spm": spm(kind, 5)}
    for name, data in sides.items():
        (root / name).write_bytes(data)
    models = [processor(data) for data in sides.values()]
    pieces = sorted({model.id_to_piece(i) for model in models for i in range(len(model))} - {"<s>", "</s>", "<unk>"})
    random.Random(1).shuffle(pieces)
    names = ["</s>", "<unk>", ">>fra<<", ">>deu<<", *pieces[20:], "<pad>"]
    (root / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    return _settings(root, config)


@cache
def _merges() -> tuple[str, str]:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 600, "special_tokens": ROBERTA, "initial_alphabet": alphabet, "show_progress": False}
    backend.train_from_iterator(random_texts(400, seed=7), trainers.BpeTrainer(**options))
    model = json.loads(backend.to_str())["model"]
    return json.dumps(model["vocab"]), "#version: 0.2\n" + "\n".join(map(" ".join, model["merges"])) + "\n"


def byte_level(root: Path, **config: Any) -> Path:
    """vocab.json and merges.txt, with RoBERTa's control tokens."""
    root.mkdir(parents=True, exist_ok=True)
    for name, text in zip(("vocab.json", "merges.txt"), _merges(), strict=True):
        (root / name).write_text(text)
    return _settings(root, config)


@cache
def word_piece_lines() -> tuple[str, ...]:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=BERT, show_progress=False, limit_alphabet=400)
    backend.train_from_iterator(_lines(2), trainer)
    vocab = backend.get_vocab()
    return tuple(sorted(vocab, key=vocab.__getitem__))


def bert(root: Path, lines: tuple[str, ...] | None = None, **config: Any) -> Path:
    """vocab.txt."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "vocab.txt").write_text("\n".join(lines or word_piece_lines()) + "\n")
    return _settings(root, config)


def _settings(root: Path, config: dict[str, Any]) -> Path:
    if config:
        (root / "tokenizer_config.json").write_text(json.dumps(config))
    return root
