"""The tokenizer that a GGUF file carries in its metadata.

Meanings after https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's
src/llama-vocab.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import tokenizers
from cutaway.tokenizers.around import Around
from cutaway.tokenizers.chat import ChatTemplate, LateTemplate
from cutaway.tokenizers.gguf_fields import Fields, Vocabulary
from cutaway.tokenizers.merges import merges_from_scores
from cutaway.tokenizers.pretokenizers import pre_tokenizer_named
from cutaway.tokenizers.rust import rust_errors
from cutaway.tokenizers.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models, normalizers

__all__ = ["CONTROL_LOOK", "ENDS", "from_gguf", "has_vocabulary"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# Files that predate a key for it end their turns with one of these; llama.cpp knows them by name too.
ENDS: Final = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|eom_id|> <end_of_turn> <|endoftext|> <|end_of_text|>
<EOT> [EOT] [EOS] <end_of_utterance> <｜end▁of▁sentence｜>
"""
CONTROL_LOOK: Final = re.compile(r"<\|[^\s|]*\|>|<｜[^\s｜]*｜>")


def has_vocabulary(metadata: Mapping[str, object]) -> bool:
    """Whether a file has tokens: some models are only weights."""
    return metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab")


def from_gguf(
    metadata: Mapping[str, object],
    types: Callable[[str], str] | None = None,
    *,
    vocab_rows: int | None = None,
    path: str | None = None,
) -> Tokenizer:
    """Build the tokenizer of a GGUF file from its key/values.

    Args:
        metadata: key → value; arrays as lists or numpy arrays.
        types: key → declared type of an array's elements (``"f32"``, ``"float32"``, …).
        vocab_rows: rows of the model's embedding; more tokens than that are refused.

    Errors: TokenizerError with the key.
    """
    fields = Fields(metadata, types, path)
    model = fields.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise fields.error("tokenizer.ggml.model", "unknown vocabulary", expected="gpt2 or llama", got=model)
    vocabulary = Vocabulary.read(fields, scored=model == "llama", rows=vocab_rows)

    ids = {name: fields.token_id(f"tokenizer.ggml.{name}_token_id", vocabulary) for name in _ROLES}
    if model == "llama":  # SentencePiece's own numbering, where the file does not say
        for name, usual in (("unknown", 0), ("bos", 1), ("eos", 2)):
            if ids[name] is None and vocabulary.kinds[usual : usual + 1] in ([CONTROL], [UNKNOWN]):
                ids[name] = usual
    special = _special(vocabulary, ids)

    backend, adds_bos = (_sentencepiece if model == "llama" else _byte_level)(fields, vocabulary, special, ids)
    adds_bos = fields.flag("tokenizer.ggml.add_bos_token", adds_bos)
    adds_eos = fields.flag("tokenizer.ggml.add_eos_token", False)
    bos, eos = ids["bos"], ids["eos"]
    if adds_bos and bos is None:
        raise fields.error("tokenizer.ggml.bos_token_id", "is missing, yet every text begins with it")
    if adds_eos and eos is None:
        raise fields.error("tokenizer.ggml.eos_token_id", "is missing, yet every text ends with it")

    ends = [index for name in ("eos", "eot", "eom") if (index := ids[name]) is not None]
    ends += [index for text, index in special.items() if text in ENDS.split()]
    if "<|return|>" in special and "<|call|>" in special and "<|end|>" in special:
        ends = [index for index in ends if index != special["<|end|>"]]  # there it ends a message, not the turn
    roles = {"bos": bos, "eos": eos, "unk": ids["unknown"], "pad": ids["padding"]}
    return Tokenizer(
        backend,
        special=special,
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(ends)),
        pad_id=ids["padding"],
        unk_id=ids["unknown"],
        around=Around((bos,) if adds_bos and bos is not None else (), (eos,) if adds_eos and eos is not None else ()),
        template=_template(fields, path),
        names={f"{name}_token": vocabulary.tokens[index] for name, index in roles.items() if index is not None},
        rows=vocab_rows,
        size=len(vocabulary.tokens),
    )


_ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "mask")  # GGUF's own spelling


def _template(fields: Fields, path: str | None) -> LateTemplate:
    key = "tokenizer.chat_template"
    source: Any = fields.get(key)
    tools: Any = fields.get(f"{key}.tool_use")

    def made() -> ChatTemplate | None:
        other = None if tools is None else ChatTemplate(tools, path=path, field=f"{key}.tool_use")
        return None if source is None else ChatTemplate(source, path=path, field=key, with_tools=other)

    return LateTemplate(made)


def _special(vocabulary: Vocabulary, ids: Mapping[str, int | None]) -> dict[str, int]:
    """Control tokens: those typed so, those with a role, and those that only look like text to the file."""
    # Only these: a padding token may be any token at all, such as "!".
    named = {index for name in ("bos", "eos", "eot", "eom") if (index := ids[name]) is not None}
    other = {index for index, kind in enumerate(vocabulary.kinds) if kind != NORMAL}
    found = {}
    for index in sorted(other | named):
        token, kind = vocabulary.tokens[index], vocabulary.kinds[index]
        if kind in (CONTROL, UNKNOWN) or index in named or (kind == USER_DEFINED and CONTROL_LOOK.fullmatch(token)):
            found[token] = index
    return found


def _byte_level(
    fields: Fields, vocabulary: Vocabulary, special: Mapping[str, int], ids: Mapping[str, int | None]
) -> tuple[Any, bool]:
    rule = pre_tokenizer_named(fields.text("tokenizer.ggml.pre", "default"))
    pairs = fields.merges()
    with rust_errors("merges do not fit the tokens", path=fields.path, field="tokenizer.ggml.merges"):
        try:
            model = models.BPE(vocab=vocabulary.ids, merges=pairs, ignore_merges=rule.whole)
        except Exception:
            pairs = fields.checked_merges(vocabulary)  # says which is wrong, and takes a while
            model = models.BPE(vocab=vocabulary.ids, merges=pairs, ignore_merges=rule.whole)
    backend = tokenizers.Tokenizer(model)
    if rule.nfc:
        backend.normalizer = rule.normalizer()
    backend.pre_tokenizer = rule.build()
    backend.decoder = decoders.ByteLevel()
    _add(backend, fields, vocabulary, special, normalized=False)
    return backend, rule.adds_bos


def _sentencepiece(
    fields: Fields, vocabulary: Vocabulary, special: Mapping[str, int], ids: Mapping[str, int | None]
) -> tuple[Any, bool]:
    usable = {
        token: index
        for token, index in vocabulary.ids.items()
        if vocabulary.kinds[index] in (NORMAL, UNUSED) and token not in special
    }
    unknown = ids["unknown"]
    with rust_errors("tokens cannot be built", path=fields.path, field="tokenizer.ggml.tokens"):
        backend = tokenizers.Tokenizer(
            models.BPE(
                vocab=vocabulary.ids,
                merges=merges_from_scores(usable, vocabulary.scores),
                unk_token=None if unknown is None else vocabulary.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", True)
    space = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    # SentencePiece finds its own symbols after a space has become ▁, so a typed ▁▁ is one too. Where
    # every symbol would get the leading ▁ as well, that cannot be said to the library.
    _add(backend, fields, vocabulary, special, normalized=not prefix)
    return backend, True


def _add(backend: Any, fields: Fields, vocabulary: Vocabulary, special: Mapping[str, int], *, normalized: bool) -> None:
    """Declare control tokens, and those user-defined ones that are found before any merging."""
    added = [
        AddedToken(token, special=token in special, normalized=normalized and " " in token)
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if token in special or kind == USER_DEFINED
    ]
    with rust_errors("tokens cannot be declared", path=fields.path, field="tokenizer.ggml.token_type"):
        backend.add_tokens(added)
    for token in added:
        if backend.token_to_id(token.content) != vocabulary.ids[token.content]:
            raise fields.error("tokenizer.ggml.tokens", "token lost its id", got=token.content)
