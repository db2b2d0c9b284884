"""A SentencePiece model file: its pieces, and how it wants a text prepared.

The file is one protocol buffer, ``ModelProto`` of
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from cutaway.errors import LimitExceeded, TokenizerError
from cutaway.tokenizers.protobuf import Entry, Reader, Span

__all__ = [
    "BYTE",
    "CONTROL",
    "MOST_TEXT",
    "NORMAL",
    "UNKNOWN",
    "UNUSED",
    "USER_DEFINED",
    "SpmModel",
    "SpmPiece",
    "read_spm",
]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_MOST_PIECES = 1 << 20
_LONGEST_PIECE = 256  # bytes; SentencePiece's own default is 16 characters
MOST_TEXT = 6 << 20  # bytes of all pieces together; the largest vocabularies have 3 M, and a trie is 100 times that
_LARGEST_MAP = 8 << 20  # bytes; nmt_nfkc_cf, the largest of SentencePiece's own, has 0.3 M
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_MODELS: Final[dict[int, Literal["unigram", "bpe"]]] = {1: "unigram", 2: "bpe"}


@dataclass(frozen=True, slots=True)
class SpmPiece:
    """A piece, its log-probability or negated rank, and its kind (`NORMAL` …)."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SpmModel:
    """What the file says.

    Attributes:
        pieces: by id.
        kind: how a text is cut.
        unknown: id of the piece for what no other covers.
        charsmap: the table that normalizes characters, compiled; empty for none.
        dummy_prefix: a text gets a space in front.
        tidy_spaces: spaces at its ends go, and of several in a row one stays.
        byte_fallback: what no piece covers is cut into bytes.
    """

    pieces: tuple[SpmPiece, ...]
    kind: Literal["unigram", "bpe"] = "unigram"
    unknown: int = 0
    charsmap: bytes = b""
    dummy_prefix: bool = True
    tidy_spaces: bool = True
    byte_fallback: bool = False


def read_spm(data: bytes, path: str) -> SpmModel:
    """Read the file.

    Errors: TokenizerError for damage, with field and byte offset, and for what is not supported; LimitExceeded.
    """
    reader = Reader(data, path)
    pieces: list[SpmPiece] = []
    total = 0
    model = SpmModel(())
    for entry in reader.entries(Span(0, len(data))):
        if entry.number == 1:
            if len(pieces) == _MOST_PIECES:
                most = f"at most {_MOST_PIECES}"
                raise LimitExceeded("too many pieces", path=path, field="pieces", offset=entry.at, expected=most)
            pieces.append(_piece(reader, entry, f"pieces[{len(pieces)}]"))
            total += len(pieces[-1].text.encode())
            if total > MOST_TEXT:
                most = f"at most {MOST_TEXT} bytes"
                raise LimitExceeded("pieces are too long", path=path, field="pieces", offset=entry.at, expected=most)
        elif entry.number == 2:
            model = _trainer(reader, reader.span(entry, "trainer_spec"), model)
        elif entry.number == 3:
            model = _normalizer(reader, reader.span(entry, "normalizer_spec"), model)
    return _checked(replace(model, pieces=tuple(pieces)), path)


def _piece(reader: Reader, entry: Entry, field: str) -> SpmPiece:
    text, score, kind = "", 0.0, NORMAL
    for part in reader.entries(reader.span(entry, field)):
        if part.number == 1:
            text = reader.text(part, f"{field}.piece", _LONGEST_PIECE)
        elif part.number == 2:
            score = reader.real(part, f"{field}.score")
        elif part.number == 3:
            kind = reader.whole(part, f"{field}.type")
    if not text:
        raise reader.error("is empty", entry.at, field=f"{field}.piece")
    if not math.isfinite(score):
        raise reader.error("is not finite", entry.at, field=f"{field}.score", got=score)
    if not NORMAL <= kind <= BYTE:
        raise reader.error("unknown kind", entry.at, field=f"{field}.type", expected="1 to 6", got=kind)
    if kind == BYTE and not _BYTE.fullmatch(text):
        raise reader.error("is no byte", entry.at, field=f"{field}.piece", expected="<0x00> to <0xFF>", got=text)
    return SpmPiece(text, score, kind)


def _trainer(reader: Reader, span: Span, model: SpmModel) -> SpmModel:
    change: dict[str, Any] = {}
    for part in reader.entries(span):
        if part.number == 3:
            kind = reader.whole(part, "trainer_spec.model_type")
            if kind not in _MODELS:
                expected = "1 (unigram) or 2 (BPE)"
                raise reader.error(
                    "unknown kind of model", part.at, field="trainer_spec.model_type", expected=expected, got=kind
                )
            change["kind"] = _MODELS[kind]
        elif part.number == 24:
            _only(reader, part, "trainer_spec.treat_whitespace_as_suffix", False)
        elif part.number == 35:
            change["byte_fallback"] = reader.flag(part, "trainer_spec.byte_fallback")
    return replace(model, **change)


def _normalizer(reader: Reader, span: Span, model: SpmModel) -> SpmModel:
    readers: dict[int, tuple[str, str, Callable[..., Any], tuple[Any, ...]]] = {
        2: ("charsmap", "precompiled_charsmap", reader.bytes, (_LARGEST_MAP,)),
        3: ("dummy_prefix", "add_dummy_prefix", reader.flag, ()),
        4: ("tidy_spaces", "remove_extra_whitespaces", reader.flag, ()),
    }
    change: dict[str, Any] = {}
    for part in reader.entries(span):
        if part.number in readers:
            ours, theirs, read, more = readers[part.number]
            change[ours] = read(part, f"normalizer_spec.{theirs}", *more)
        elif part.number == 5:
            _only(reader, part, "normalizer_spec.escape_whitespaces", True)
    return replace(model, **change)


def _only(reader: Reader, part: Entry, field: str, wanted: bool) -> None:
    if reader.flag(part, field) is not wanted:
        raise reader.error("is not supported", part.at, field=field, expected=wanted, got=not wanted)


def _checked(model: SpmModel, path: str) -> SpmModel:
    """The same, if its pieces fit together; the id of the unknown one is read off."""

    def fail(what: str, field: str, **facts: Any) -> TokenizerError:
        return TokenizerError(what, path=path, field=field, **facts)

    if not model.pieces:
        raise fail("holds no pieces", "pieces")
    seen: dict[str, int] = {}
    for i, piece in enumerate(model.pieces):
        if seen.setdefault(piece.text, i) != i:
            raise fail(f"stands at {seen[piece.text]} already", f"pieces[{i}].piece", got=piece.text)
    unknown = [i for i, piece in enumerate(model.pieces) if piece.kind == UNKNOWN]
    if len(unknown) != 1:
        raise fail("not one piece for what is unknown", "pieces", expected=1, got=len(unknown))
    count = sum(piece.kind == BYTE for piece in model.pieces)
    if model.byte_fallback and count < 256:
        raise fail("bytes to fall back on are missing", "trainer_spec.byte_fallback", expected=256, got=count)
    return replace(model, unknown=unknown[0])
