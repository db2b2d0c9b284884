"""Folders from before tokenizer.json: which files they have, and what the reference makes of them.

==========================  =========================  ==================================================
files                       class in the settings      cut by
==========================  =========================  ==================================================
source.spm target.spm …     Marian                     SentencePiece, one model a side (`marian.py`)
spiece.model                T5                         SentencePiece
vocab.json merges.txt       GPT2, Roberta, Bart …      byte-level BPE
vocab.txt                   Bert, DistilBert, Electra  WordPiece
==========================  =========================  ==================================================

The defaults are those of ``transformers``' tokenizer classes. A class that is not here has no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cutaway.errors import TokenizerError
from cutaway.tokenizers.around import template
from cutaway.tokenizers.settings import Settings
from cutaway.tokenizers.spm import read_spm
from cutaway.tokenizers.spm_tree import t5_tree
from cutaway.tokenizers.vocab_files import byte_level_tree, read_vocabulary, word_piece_tree

__all__ = ["Legacy", "legacy"]

_BERT = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
_ROBERTA = {"bos": "<s>", "eos": "</s>", "sep": "</s>", "cls": "<s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
_GPT2 = {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "unk": "<|endoftext|>"}
_T5 = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
_MOST_EXTRA = 10_000


@dataclass(frozen=True)
class Legacy:
    """A folder's vocabulary as a tokenizer.json.

    Attributes:
        path: the file that it is of.
        roles: the tokens that have a role unless the settings say otherwise, such as ``eos_token``.
    """

    path: str
    tree: dict[str, Any]
    roles: dict[str, str] = field(default_factory=dict)


def legacy(root: Path, read: Any, settings: Settings, limit: int) -> Legacy | None:
    """What the folder has, or None.

    Args:
        read: ``read(root, name, limit)`` gives a file's bytes, None if it is not there.
        limit: bytes of one file.

    Errors: TokenizerError with the file and the place in it; LimitExceeded.
    """
    kind = settings.kind()
    data = read(root, "spiece.model", limit) if kind in (None, "T5", "MT5") else None
    if data is not None:
        return _t5(data, str(root / "spiece.model"), settings)
    if kind in (None, "GPT2", "CodeGen", "Roberta", "Bart", "Longformer", "LED"):
        vocabulary, merges = read(root, "vocab.json", limit), read(root, "merges.txt", limit)
        if vocabulary is not None and merges is not None:
            return _byte_level(vocabulary, merges, root, settings, limit)
        if merges is not None or (vocabulary is not None and kind is not None):
            here, away = ("merges.txt", "vocab.json") if vocabulary is None else ("vocab.json", "merges.txt")
            raise TokenizerError("is missing", path=str(root / away), hint=f"It belongs to {here}, which is here.")
    data = read(root, "vocab.txt", limit) if kind in (None, "Bert", "DistilBert", "Electra") else None
    return None if data is None else _bert(data, str(root / "vocab.txt"), settings)


def _roles(settings: Settings, usual: dict[str, str]) -> dict[str, str]:
    """The usual roles, without those that the settings have a word about; and those that they give."""
    names = {f"{role}_token": text for role, text in usual.items()}
    said = {name: settings.role(name) for name in names if settings.has_role(name)}
    return {name: text for name, text in (names | said).items() if text is not None}


def _bert(data: bytes, path: str, settings: Settings) -> Legacy:
    roles = _roles(settings, _BERT)
    if settings.flag("do_basic_tokenize") is False:
        raise settings.fail("is not supported", "do_basic_tokenize", expected=True, got=False)
    lowercase, chinese = settings.flag("do_lower_case"), settings.flag("tokenize_chinese_chars")
    tree = word_piece_tree(
        data,
        path,
        unknown=roles.get("unk_token", "[UNK]"),
        lowercase=lowercase is not False,
        strip_accents=settings.flag("strip_accents"),
        chinese=chinese is not False,
    )
    vocab = tree["model"]["vocab"]
    cls, sep = (_known(vocab, roles, name, path) for name in ("cls_token", "sep_token"))
    two = ((cls, 0), ("a", 0), (sep, 0), ("b", 1), (sep, 1))
    tree["post_processor"] = template(
        (cls, "a", sep), two, {vocab[text]: text for text in roles.values() if text in vocab}
    )
    return Legacy(path, tree, roles)


def _known(vocab: dict[str, int], roles: dict[str, str], name: str, path: str) -> int:
    text = roles.get(name)
    if text is None or text not in vocab:
        raise TokenizerError(f"has no {name}", path=path, expected=text)
    return vocab[text]


def _byte_level(vocabulary: bytes, merges: bytes, root: Path, settings: Settings, limit: int) -> Legacy:
    path = str(root / "vocab.json")
    vocab = read_vocabulary(vocabulary, path, limit)
    tree = byte_level_tree(
        vocab, merges, str(root / "merges.txt"), prefix_space=settings.flag("add_prefix_space") is True
    )
    # Old folders do not name the class. GPT-2's vocabulary has one control token; those of RoBERTa and BART have these.
    plain = settings.kind() in ("GPT2", "CodeGen") or (settings.kind() is None and not {"<s>", "</s>"} <= vocab.keys())
    roles = _roles(settings, _GPT2 if plain else _ROBERTA)
    if not plain:
        cls, sep = (_known(vocab, roles, name, path) for name in ("cls_token", "sep_token"))
        one, two = (cls, "a", sep), ((cls, 0), ("a", 0), (sep, 0), (sep, 0), ("b", 0), (sep, 0))
        tree["post_processor"] = template(one, two, {cls: roles["cls_token"], sep: roles["sep_token"]})
    return Legacy(path, tree, roles)


def _t5(data: bytes, path: str, settings: Settings) -> Legacy:
    spm = read_spm(data, path)
    roles = _roles(settings, _T5)
    tree = t5_tree(spm, settings.whole("extra_ids", 100, _MOST_EXTRA))
    vocab = {piece.text: i for i, piece in enumerate(spm.pieces)}
    eos = _known(vocab, roles, "eos_token", path)
    two = (("a", 0), (eos, 0), ("b", 0), (eos, 0))
    tree["post_processor"] = template(("a", eos), two, {eos: roles["eos_token"]})
    return Legacy(path, tree, roles)
