"""A SentencePiece model in the words of tokenizer.json.

SentencePiece normalizes characters by a table, tidies spaces, puts one in front, writes spaces as ``▁``, and cuts the
text as a whole (Kudo & Richardson 2018, https://arxiv.org/abs/1808.06226). The library says the same in steps.
"""

from __future__ import annotations

import base64
from typing import Any

from cutaway.tokenizers.fronts import TRIM
from cutaway.tokenizers.merges import merges_from_scores
from cutaway.tokenizers.spm import CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, SpmModel

__all__ = ["added_token", "spm_tree", "t5_tree"]

SPACE = "▁"


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def added_token(index: int, content: str, *, special: bool) -> dict[str, Any]:
    """An entry of tokenizer.json's ``added_tokens``, found wherever it stands."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, **flags, "special": special}


def spm_tree(spm: SpmModel) -> dict[str, Any]:
    """The tokenizer.json that cuts a text as SentencePiece does; nothing is put around it."""
    space = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normal: list[dict[str, Any]] = [*_charsmap(spm)]
    if spm.tidy_spaces:
        normal += [TRIM, _replace(" {2,}", " ")]
    if spm.dummy_prefix:
        normal.append({"type": "Prepend", "prepend": SPACE})
    normal.append(space)
    if spm.tidy_spaces:  # it looks for its own spaces at the end, so a typed one goes with them
        normal.append(_replace(rf"{SPACE}+\z", ""))
    decode: list[dict[str, Any]] = [{**space, "pattern": {"String": SPACE}, "content": " "}]
    decode += [{"type": "ByteFallback"}] if spm.byte_fallback else []
    decode.append({"type": "Fuse"})
    decode += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if spm.dummy_prefix else []
    return _tree(
        spm,
        normalizer={"type": "Sequence", "normalizers": normal},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decode},
    )


def t5_tree(spm: SpmModel, extra: int) -> dict[str, Any]:
    """T5's published tokenizer.json: words apart at white space, and ``<extra_id_…>`` after the pieces, last first.

    Args:
        extra: how many of those there are.
    """
    if spm.kind == "unigram" and spm.dummy_prefix and spm.tidy_spaces and not spm.byte_fallback:
        metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
        steps = [{"type": "WhitespaceSplit"}, metaspace]
        charsmap = _charsmap(spm)
        tree = _tree(
            spm,
            normalizer=charsmap[0] if charsmap else None,
            pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
            decoder=metaspace,
        )
    else:
        tree = spm_tree(spm)
    vocab = tree["model"]["vocab"]
    known = {piece.text for piece in spm.pieces}
    for i in reversed(range(extra)):
        token = f"<extra_id_{i}>"
        if token in known:
            continue
        tree["added_tokens"].append(added_token(len(vocab), token, special=True))
        if isinstance(vocab, list):
            vocab.append([token, 0.0])
        else:
            vocab[token] = len(vocab)
    return tree


def _charsmap(spm: SpmModel) -> list[dict[str, Any]]:
    table = base64.b64encode(spm.charsmap).decode()
    return [{"type": "Precompiled", "precompiled_charsmap": table}] if spm.charsmap else []


def _tree(spm: SpmModel, **parts: Any) -> dict[str, Any]:
    unknown = spm.pieces[spm.unknown].text
    model: dict[str, Any]
    if spm.kind == "unigram":
        vocab = [[piece.text, piece.score] for piece in spm.pieces]
        model = {"type": "Unigram", "unk_id": spm.unknown, "vocab": vocab}
    else:
        ids = {piece.text: i for i, piece in enumerate(spm.pieces)}
        usable = {piece.text: i for i, piece in enumerate(spm.pieces) if piece.kind in (NORMAL, UNUSED)}
        merges = merges_from_scores(usable, [piece.score for piece in spm.pieces])
        model = {"type": "BPE", "vocab": ids, "merges": [list(merge) for merge in merges]}
        model |= {"unk_token": unknown, "fuse_unk": True}
    added = [
        added_token(i, piece.text, special=piece.kind != USER_DEFINED)
        for i, piece in enumerate(spm.pieces)
        if piece.kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": None,
        **parts,
        "model": {**model, "byte_fallback": spm.byte_fallback},
    }
