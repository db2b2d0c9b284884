"""Marian's translation models: one SentencePiece model a side cuts, one vocabulary for both sides numbers.

The rules are those of ``MarianTokenizer`` (transformers 5.24): a text may begin with the code of the language wanted,
``>>fra<<``; each piece is looked up in vocab.json; ``</s>`` ends a text.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from cutaway.errors import TokenizerError
from cutaway.formats.strict_json import pointer
from cutaway.tokenizers.around import Around
from cutaway.tokenizers.charsmap import Charsmap
from cutaway.tokenizers.check import check_tokenizer_json
from cutaway.tokenizers.cutter import Source
from cutaway.tokenizers.plain import hide
from cutaway.tokenizers.rust import rust_errors
from cutaway.tokenizers.settings import Settings
from cutaway.tokenizers.spm import CONTROL, UNKNOWN, USER_DEFINED, read_spm
from cutaway.tokenizers.spm_tree import added_token, spm_tree
from cutaway.tokenizers.tokenizer import Tokenizer
from cutaway.tokenizers.vocab_files import read_vocabulary
from tokenizers import AddedToken, decoders, models

__all__ = ["from_marian"]

_ROLES = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_FILES = ("source.spm", "target.spm", "vocab.json")


def from_marian(root: Path, read: Any, settings: Settings, *, rows: int | None, limit: int) -> Tokenizer | None:
    """The tokenizer of the source side, which knows that of the target side; None if this is no such folder.

    Args:
        read: ``read(root, name, limit)`` gives a file's bytes, None if it is not there.
        rows: of the embedding.
        limit: bytes of one file.

    Errors: TokenizerError with the file and the place in it; LimitExceeded.
    """
    if settings.kind() not in (None, "Marian"):
        return None
    separate = settings.flag("separate_vocabs") is True
    names = (*_FILES, "target_vocab.json") if separate else _FILES
    files = {name: read(root, name, limit) for name in names}
    if files["source.spm"] is None:
        return None
    for name, data in files.items():
        if data is None:
            raise TokenizerError("is missing beside source.spm", path=str(root / name))
    roles = {name: settings.role(name) if settings.has_role(name) else text for name, text in _ROLES.items()}
    known = {name: text for name, text in roles.items() if text is not None}

    def side(spm: str, vocabulary: str, **more: Any) -> Tokenizer:
        path = str(root / vocabulary)
        vocab = read_vocabulary(files[vocabulary], path, limit)
        return _side(files[spm], str(root / spm), vocab, path, known, **more)

    target = side("target.spm", "target_vocab.json" if separate else "vocab.json", rows=None if separate else rows)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        files[name] = read(root, name, limit)
    kept = {name: data for name, data in files.items() if data is not None}
    return side("source.spm", "vocab.json", rows=rows, target=target, files=kept)


def _side(
    data: bytes,
    spm_path: str,
    vocab: dict[str, int],
    path: str,
    roles: dict[str, str],
    *,
    rows: int | None,
    **more: Any,
) -> Tokenizer:
    for token, index in vocab.items():
        if rows is not None and index >= rows:
            what = "id is past the model's embedding"
            raise TokenizerError(what, path=path, field=pointer(token), expected=f"below {rows}", got=index)
    for name in ("unk_token", "eos_token"):
        if roles.get(name) not in vocab:
            raise TokenizerError(f"has no {name}", path=path, expected=roles.get(name))
    ids = {name: vocab[text] for name, text in roles.items() if text in vocab}
    special = {text: vocab[text] for text in roles.values() if text in vocab}
    with rust_errors("is not a vocabulary", path=path):
        backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=roles["unk_token"]))
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return Tokenizer(
        backend,
        special=special,
        eos_ids=[ids["eos_token"]],
        pad_id=ids.get("pad_token"),
        unk_id=ids["unk_token"],
        around=Around((), (ids["eos_token"],), (("a", 0), ("b", 0), (ids["eos_token"], 0))),
        names=roles,
        rows=rows,
        source=_source(data, spm_path, vocab, special),
        trims=True,
        **more,
    )


def _source(data: bytes, path: str, vocab: dict[str, int], special: dict[str, int]) -> Source:
    """What cuts a text of one side."""
    spm = read_spm(data, path)
    tree = spm_tree(replace(spm, charsmap=b""))
    model = tree["model"]
    if model["type"] == "Unigram":
        silent = {i for i, piece in enumerate(spm.pieces) if piece.kind in (CONTROL, UNKNOWN)}
        model["vocab"] = hide(model["vocab"], silent)
    found = {piece.text: i for i, piece in enumerate(spm.pieces) if piece.kind == USER_DEFINED}
    names = {**found, **special}
    tree["added_tokens"] = [added_token(i, text, special=text in special) for i, text in enumerate(names)]
    check_tokenizer_json({**tree, "added_tokens": []}, path=path)
    with rust_errors("is not a tokenizer", path=path):
        backend = tokenizers.Tokenizer.from_str(json.dumps(tree))
    return Source(backend, backend.model, vocab, spm.unknown, Charsmap(spm.charsmap, keep=names, path=path))
