"""Vocabularies from before tokenizer.json, in its words: BERT's vocab.txt, GPT-2's vocab.json with merges.txt."""

from __future__ import annotations

from typing import Any

from cutaway.errors import LimitExceeded, TokenizerError
from cutaway.formats.strict_json import parse_json, pointer

__all__ = ["byte_level_tree", "read_lines", "read_vocabulary", "word_piece_tree"]

_MOST = 1 << 21  # lines
_LONGEST = 4096  # characters of a line
# What the library takes off the end of a line: Unicode's white space.
_WHITE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


def read_lines(data: bytes, path: str) -> list[str]:
    """A text file's lines without their ends.

    Errors: TokenizerError for what is not UTF-8 or has a byte order mark; LimitExceeded.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as bad:
        raise TokenizerError("is not UTF-8", path=path, offset=bad.start) from bad
    if text.startswith("\ufeff"):
        raise TokenizerError("starts with a byte order mark", path=path, offset=0, expected="plain UTF-8")
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    if len(lines) > _MOST:
        raise LimitExceeded("too many lines", path=path, expected=f"at most {_MOST}", got=len(lines))
    for i, line in enumerate(lines):
        if len(line) > _LONGEST:
            raise LimitExceeded(
                "line is too long", path=path, field=f"line {i + 1}", expected=f"at most {_LONGEST}", got=len(line)
            )
    return lines


def read_vocabulary(data: bytes, path: str, limit: int) -> dict[str, int]:
    """vocab.json: token → id, each id once.

    Errors: TokenizerError with a JSON pointer; LimitExceeded.
    """
    tree = parse_json(data, path=path, limit=limit, error=TokenizerError)
    if not isinstance(tree, dict) or not tree:
        raise TokenizerError("is no object or empty", path=path, expected="token to id")
    owners: dict[int, str] = {}
    made: dict[str, int] = {}
    for token, index in tree.items():
        if type(index) is not int or not 0 <= index < _MOST:
            raise TokenizerError("is no token id", path=path, field=pointer(token), got=index)
        if owners.setdefault(index, token) != token:
            raise TokenizerError(f"duplicate id, also of {owners[index]!r}", path=path, field=pointer(token), got=index)
        made[token] = index
    return made


def word_piece_tree(
    data: bytes, path: str, *, unknown: str, lowercase: bool, strip_accents: bool | None, chinese: bool
) -> dict[str, Any]:
    """BERT's vocab.txt, a token a line. The rules are those of google-research/bert's tokenization.py.

    Args:
        unknown: the token for a word that cannot be made of pieces.
        lowercase, strip_accents, chinese: what happens to a text first; accents go with capitals unless it is said.
    """
    vocab: dict[str, int] = {}
    for i, line in enumerate(read_lines(data, path)):
        token = line.rstrip(_WHITE)
        if token and vocab.setdefault(token, i) != i:
            what = f"stands in line {vocab[token] + 1} already"
            raise TokenizerError(what, path=path, field=f"line {i + 1}", got=token)
    if not vocab:
        raise TokenizerError("holds no tokens", path=path)
    if unknown not in vocab:
        raise TokenizerError("has no line for the unknown token", path=path, expected=unknown)
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": chinese}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": normalizer | {"strip_accents": strip_accents, "lowercase": lowercase},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }


def byte_level_tree(vocabulary: dict[str, int], merges: bytes, path: str, *, prefix_space: bool) -> dict[str, Any]:
    """GPT-2's vocab.json and merges.txt, the best merge first.

    Args:
        path: of merges.txt.
        prefix_space: a text gets a space in front.
    """
    pairs: list[list[str]] = []
    for i, line in enumerate(read_lines(merges, path)):
        if line.startswith("#version"):
            continue
        pair = line.removesuffix("\r").split(" ")
        if len(pair) != 2 or not all(pair):
            raise TokenizerError("is not two tokens with a space between", path=path, field=f"line {i + 1}", got=line)
        for part in (*pair, "".join(pair)):
            if part not in vocabulary:
                raise TokenizerError("names an unknown token", path=path, field=f"line {i + 1}", got=part)
        pairs.append(pair)
    level = {"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": pairs},
    }
