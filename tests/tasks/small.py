"""Small BERTs with a vocabulary of their own, written by transformers."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch

WORDS = """
    the a cat dog sat on mat is my order number was charged twice for item late parcel refund please
    """.split()  # noqa: SIM905 (a list of words is read as words)
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *string.ascii_lowercase, *string.digits, *".,!?-#"]
VOCABULARY = [*dict.fromkeys(PIECES), *(f"##{letter}" for letter in string.ascii_lowercase + string.digits)]
TEXTS = [
    "My order 4711 was charged twice!",
    "the cat sat on the mat.",
    "a",
    "Refund please, for item 12-9: the parcel is late and the number was wrong",
    "ünïcödé 🙂 ???",
]


def write(folder: Path, kind: str, seed: int = 7, **options: Any) -> Path:
    """A checkpoint of this kind of BERT, its weights random and scaled, with its tokenizer."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=True)
    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        **options,
    )
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "LayerNorm.weight" in name
            spread = 0.5 if norm else 0.3 if name.endswith("bias") else 0.25
            parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if norm else 0.0))
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
