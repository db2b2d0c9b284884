"""Small tokenizers, made on the spot."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from cutaway.tokenizers import Tokenizer, from_folder, from_gguf
from tests.tokenizers.texts import random_texts
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level_json() -> str:
    """A byte-level BPE of 600 tokens, as tokenizer.json."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(random_texts(400, seed=7), trainer)
    return backend.to_str()


def tree_of(text: str | None = None) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(text or byte_level_json())
    return tree


def folder(root: Path, tree: dict[str, Any] | str | bytes | None = None, **files: Any) -> Path:
    """A model folder: tokenizer.json and, by stem (``tokenizer_config=…``), further JSON files."""
    root.mkdir(parents=True, exist_ok=True)
    data = byte_level_json() if tree is None else tree
    text = json.dumps(data) if isinstance(data, dict) else data
    (root / "tokenizer.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    for name, content in files.items():
        (root / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return root


def chatml(root: Path) -> Tokenizer:
    """The byte-level one with a ChatML template."""
    made = from_folder(folder(root, tokenizer_config={"eos_token": "<|im_end|>", "chat_template": CHATML}))
    assert made is not None
    return made


def byte_level_metadata(pre: str = "gpt-2") -> dict[str, Any]:
    """The byte-level one as GGUF metadata."""
    model = tree_of()["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in CONTROL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }


@cache
def _pieces() -> list[tuple[str, float]]:
    """Pieces with distinct scores, the commoner the better, and every single character seen."""
    counts: Counter[str] = Counter()
    for text in random_texts(300, seed=3):
        for word in text.split(" "):
            marked = "▁" + word
            for size in range(2, 6):
                counts.update(marked[i : i + size] for i in range(len(marked) - size + 1))
    best = [piece for piece, _ in counts.most_common(900) if " " not in piece]
    chars = sorted({char for piece in best for char in piece} | {"▁"})
    # A piece is of use only if its halves are pieces as well; most are, the rest may stay.
    return [(piece, -float(i)) for i, piece in enumerate([*best, *chars])]


def sentencepiece_metadata(*, prefix: bool = True) -> dict[str, Any]:
    """A SentencePiece-like BPE with byte fallback as GGUF metadata."""
    head = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<|im_start|>", 0.0, 3), ("<|im_end|>", 0.0, 3)]
    rows = head + [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    rows += [(piece, score, 1) for piece, score in _pieces() if piece not in ("</", "s>")]
    # A trap: by their scores alone, these would merge into the control token of the same text.
    rows += [("</", 10.0, 1), ("s>", 10.0, 1)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [token for token, _, _ in rows],
        "tokenizer.ggml.scores": [score for _, score, _ in rows],
        "tokenizer.ggml.token_type": [kind for _, _, kind in rows],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.chat_template": "{{ bos_token }}" + CHATML,
    }


def declared(key: str) -> str:
    return "arr[f32]" if key.endswith("scores") else "arr[i32]"


@cache
def sentencepiece(prefix: bool = True) -> Tokenizer:
    return from_gguf(sentencepiece_metadata(prefix=prefix), declared)


@cache
def byte_level() -> Tokenizer:
    return from_gguf(byte_level_metadata(), declared)


def word_piece() -> dict[str, Any]:
    """BERT's kind, as a tokenizer.json tree."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "un", "##aff", "##able", "cat", "##s", ".", "don", "'", "t"]
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.add_special_tokens([AddedToken(word, special=True) for word in words[:4]])
    return tree_of(backend.to_str())
