"""What the examples share: a vocabulary learned from their texts, and the order in which they learn."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers


def wordpiece(texts: Sequence[str], folder: Path, size: int = 400) -> Path:
    """Learn a WordPiece vocabulary and write it as ``tokenizer.json``; a text becomes ``[CLS] text [SEP]``."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, special.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def characters(alphabet: str, folder: Path) -> Path:
    """A vocabulary of single characters, as ``tokenizer.json``; ``</s>`` ends a text and ``<s>`` begins an answer."""
    special = ["<pad>", "<s>", "</s>"]
    pieces = [*special, *pre_tokenizers.ByteLevel.alphabet()]
    kept = special + [piece for piece in pieces if piece in alphabet.replace(" ", "Ġ")]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(kept)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}')
    return folder


def batches(n: int, size: int, epochs: int, seed: int = 0) -> Iterator[list[int]]:
    """Which of ``n`` examples come together, in a new order every time round."""
    order, source = list(range(n)), random.Random(seed)
    for _ in range(epochs):
        source.shuffle(order)
        for start in range(0, n, size):
            yield order[start : start + size]
