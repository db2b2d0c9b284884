"""A tokenizer as GGUF key/values: the inverse of :mod:`cutaway.tokenizers.gguf`.

What is written is read back, and some texts are cut by both: a tokenizer whose ids would change is refused.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cutaway.errors import TokenizerError
from cutaway.formats.gguf_write import Typed
from cutaway.tokenizers.gguf import (
    BYTE,
    CONTROL,
    CONTROL_LOOK,
    ENDS,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    from_gguf,
)
from cutaway.tokenizers.merges import merges_from_scores, scores_from_merges
from cutaway.tokenizers.pretokenizers import pre_tokenizer_name
from cutaway.tokenizers.spelling import Spelling, byte_alphabet
from cutaway.tokenizers.tokenizer import Tokenizer

__all__ = ["gguf_vocabulary"]

PRE = "tokenizer.ggml"
_ENDS = ("eos", "eot", "eom")  # of a text, a turn, a message
_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_SAMPLE = (
    "Hello, world! It's 12345 o'clock; she'll  pay 3.14€ (≈ $3.40).",
    " leading, trailing \n\n\tand\r\n   many     spaces   ",
    "naïve Ångström café e\u0301 ﬁ 東京 привет мир ١٢٣ 🙂👩‍👩‍👧 İI",
    "def f(x_1):\n    return {'a': [x_1 ** 2, 0x7F]}  # CamelCase URLs: http://a.b/c?d=1",
    "a",
    "",
)


@dataclass(frozen=True, slots=True)
class _Table:
    """Tokens by id, with their kinds."""

    tokens: list[str]
    kinds: list[int]


def gguf_vocabulary(tokenizer: Tokenizer | None, rows: int, *, eos_ids: Iterable[int] = ()) -> dict[str, Typed]:
    """The key/values of a tokenizer.

    Args:
        tokenizer: byte-level BPE, or SentencePiece's BPE with bytes to fall back on; None says that there is none.
        rows: of the model's embedding; ids that are no token become unused ones.
        eos_ids: tokens that end an answer, beside the tokenizer's own.

    Raises:
        TokenizerError: something of it that the format cannot say, by its place in tokenizer.json.
    """
    if tokenizer is None:
        ends = dict(zip(_ENDS, dict.fromkeys(eos_ids), strict=False))
        ids: dict[str, Typed] = {f"{PRE}.{name}_token_id": ("u32", index) for name, index in ends.items()}
        return {f"{PRE}.model": ("str", "none"), **ids}
    tree: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    model = tree["model"]
    if model["type"] != "BPE":
        raise _refused("/model/type", "BPE", model["type"])
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise _refused(f"/model/{option}", None, model[option])
    spelling = Spelling.of(tree["decoder"])
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    table = _table(tokenizer, model["vocab"], rows, spelling)
    if spelling.kind == "byte_level":
        found = _byte_level(tree, merges)
    elif spelling.kind == "sentencepiece" and model.get("byte_fallback") and not model.get("ignore_merges"):
        found = _sentencepiece(tree, merges, table, tokenizer)
    else:
        raise _refused("/decoder", "byte-level, or SentencePiece's with byte fallback", tree["decoder"])
    found |= {
        f"{PRE}.tokens": ("arr[str]", table.tokens),
        f"{PRE}.token_type": ("arr[i32]", table.kinds),
        **_roles(tokenizer, table, [*tokenizer.eos_ids, *eos_ids]),
        **_around(tokenizer),
        **_templates(tokenizer),
    }
    _compare(tokenizer, found, rows)
    return found


def _refused(field: str, expected: object, got: object) -> TokenizerError:
    what = "GGUF cannot say this of a tokenizer"
    return TokenizerError(what, field=field, expected="none" if expected is None else expected, got=got)


def _table(tokenizer: Tokenizer, vocab: Mapping[str, int], rows: int, spelling: Spelling) -> _Table:
    by_id = {index: token for token, index in vocab.items()}
    added = tokenizer.backend.get_added_tokens_decoder()
    by_id |= {index: token.content for index, token in added.items()}
    tokens, kinds = [], []
    for index in range(rows):
        token = by_id.get(index)
        unused = f"[PAD{index}]"  # as llama.cpp's converter has it
        tokens.append(unused if token is None else token)
        if token is None or (token == unused and index not in added):
            kinds.append(UNUSED)
        elif index == tokenizer.unk_id and spelling.kind == "sentencepiece":
            kinds.append(UNKNOWN)
        elif token in tokenizer.special:
            kinds.append(CONTROL)
        elif index in added:
            kinds.append(USER_DEFINED)
            if spelling.kind == "sentencepiece":  # found in the text as it was typed
                tokens[-1] = tokens[-1].replace("▁", " ")
        else:
            fallback = spelling.kind == "sentencepiece" and len(token) == 6 and token.startswith("<0x")
            kinds.append(BYTE if fallback and token.endswith(">") else NORMAL)
    if len({*tokens}) < rows:
        twice = next(token for i, token in enumerate(tokens) if token in tokens[:i])
        raise _refused("/model/vocab", "no token twice", twice)
    return _Table(tokens, kinds)


def _byte_level(tree: dict[str, Any], merges: list[Any]) -> dict[str, Typed]:
    model = tree["model"]
    missing = [char for char in byte_alphabet() if char not in model["vocab"]]
    if missing and model.get("unk_token") is not None:
        raise _refused("/model/unk_token", None, f"{model['unk_token']}, for {' '.join(missing[:8])}")
    for i, (left, right) in enumerate(merges):
        if " " in left[1:] or " " in right or not right:
            raise _refused(f"/model/merges/{i}", "tokens without spaces", [left, right])
    name = pre_tokenizer_name(tree["normalizer"], tree["pre_tokenizer"], whole=bool(model.get("ignore_merges")))
    return {
        f"{PRE}.model": ("str", "gpt2"),
        f"{PRE}.pre": ("str", name),
        f"{PRE}.merges": ("arr[str]", [f"{left} {right}" for left, right in merges]),
    }


def _sentencepiece(tree: dict[str, Any], merges: list[Any], table: _Table, tokenizer: Tokenizer) -> dict[str, Typed]:
    usable = {
        token: index
        for index, (token, kind) in enumerate(zip(table.tokens, table.kinds, strict=True))
        if kind in (NORMAL, UNUSED) and token not in tokenizer.special
    }
    # Symbols of the user's are found before any merging. The order of one piece's own merges is SentencePiece's affair.
    among = [merge for merge in merges if all(part in usable for part in (*merge, "".join(merge)))]
    scores = scores_from_merges(usable, among, len(table.tokens))
    if {*merges_from_scores(usable, scores)} != {*among}:
        raise _refused("/model/merges", "those of SentencePiece, all ways of making a piece by its score", "others")
    return {
        f"{PRE}.model": ("str", "llama"),
        f"{PRE}.pre": ("str", "default"),
        f"{PRE}.scores": ("arr[f32]", scores),
        f"{PRE}.add_space_prefix": ("bool", _leading_space(tree)),
    }


def _leading_space(tree: dict[str, Any]) -> bool:
    """Whether a text gets a space in front."""
    normalizer, pre = tree["normalizer"], tree["pre_tokenizer"]
    metaspace = pre is not None and pre["type"] == "Metaspace" and normalizer is None and pre.get("split") is False
    if metaspace and pre.get("prepend_scheme") == "never":  # the other schemes add no second space, as GGUF would
        return False
    # Gemma's split at spaces finds none: they have become ▁ by then.
    if pre is not None and (pre["type"] != "Split" or pre["pattern"] != {"String": " "}):
        raise _refused("/pre_tokenizer", None, pre)
    if normalizer == _SPACE:
        return False
    steps = (normalizer or {}).get("normalizers")
    if steps != [{"type": "Prepend", "prepend": "▁"}, _SPACE]:
        raise _refused("/normalizer", "spaces as ▁, perhaps one in front", normalizer)
    return True


def _roles(tokenizer: Tokenizer, table: _Table, ends: list[int]) -> dict[str, Typed]:
    """Ids of tokens with a role. Further ends are the turn's and the message's, unless their names say so."""
    ids = {"bos": tokenizer.bos_id, "unknown": tokenizer.unk_id, "padding": tokenizer.pad_id}
    ends = [index for index in dict.fromkeys(ends) if index < len(table.tokens)]
    known = ENDS.split()
    further = [i for i in ends[1:] if not (table.tokens[i] in known and table.tokens[i] in tokenizer.special)]
    if len(further) > 2:
        raise _refused("/eos_token_id", "at most three ends", ends)
    ids |= dict(zip(_ENDS, [*ends[:1], *further], strict=False))
    return {f"{PRE}.{name}_token_id": ("u32", index) for name, index in ids.items() if index is not None}


def _around(tokenizer: Tokenizer) -> dict[str, Typed]:
    bare = tokenizer.encode("")
    rest = bare[1:] if tokenizer.adds_bos else bare
    eos = tokenizer.eos_ids[:1]
    if rest and tuple(rest) != eos:
        raise _refused("/post_processor", "BOS before a text, EOS after it", bare)
    return {f"{PRE}.add_bos_token": ("bool", tokenizer.adds_bos), f"{PRE}.add_eos_token": ("bool", bool(rest))}


def _templates(tokenizer: Tokenizer) -> dict[str, Typed]:
    template = tokenizer.chat_template
    if tokenizer.template_error is not None:
        warnings.warn(f"the chat template is left out: {tokenizer.template_error}", stacklevel=4)
    if template is None:
        return {}
    found: dict[str, Typed] = {"tokenizer.chat_template": ("str", template.source)}
    if template.with_tools is not None:
        found["tokenizer.chat_template.tool_use"] = ("str", template.with_tools.source)
        found["tokenizer.chat_templates"] = ("arr[str]", ["tool_use"])
    return found


def _compare(tokenizer: Tokenizer, found: Mapping[str, Typed], rows: int) -> None:
    """Cut some texts as before and as a reader of the file would."""
    values = {key: value for key, (_, value) in found.items()}
    again = from_gguf(values, lambda key: found[key][0], vocab_rows=rows)
    added = list(tokenizer.backend.get_added_tokens_decoder().values())[:64]
    woven = [f"so {token.content}it is{token.content} {token.content}" for token in added]
    # Typed in a text, what looks like a control token is text to whoever reads the file.
    plain = [text for token, text in zip(added, woven, strict=True) if not CONTROL_LOOK.fullmatch(token.content)]
    for special, texts in ((False, [*_SAMPLE, *plain]), (True, [*_SAMPLE, *woven])):
        wanted, got = (one.encode_batch(texts, special=special) for one in (tokenizer, again))
        for text, ours, theirs in zip(texts, wanted, got, strict=True):
            if ours != theirs:
                what = "a reader of the GGUF file would cut a text in another way"
                raise TokenizerError(what, field=repr(text), expected=ours, got=theirs)
