"""Reading ``tokenizer.ggml.*`` values that a stranger wrote: right types, right lengths, ids in range."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutaway.errors import LimitExceeded, TokenizerError

__all__ = ["Fields", "Vocabulary"]

_MOST_TOKENS = 1 << 21
_MOST_MERGES = 1 << 22
_MERGES = "tokenizer.ggml.merges"
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_BYTE_LIKE = re.compile("<0x[^>]{0,8}>")


class Fields:
    """Typed access to the metadata; every error names its key."""

    def __init__(self, metadata: Mapping[str, object], types: Callable[[str], str] | None, path: str | None) -> None:
        self._metadata = metadata
        self._types = types
        self.path = path

    def error(self, key: str, what: str, *, expected: object = None, got: object = None) -> TokenizerError:
        return TokenizerError(what, path=self.path, field=key, expected=expected, got=got)

    def get(self, key: str) -> object:
        return self._metadata.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._metadata.get(key, default)
        if not isinstance(value, str):
            what = "is missing" if value is None else "is not text"
            raise self.error(key, what, expected="a string", got=None if value is None else type(value).__name__)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(key, default)
        if not isinstance(value, bool | np.bool_):
            raise self.error(key, "is not a flag", expected="true or false", got=value)
        return bool(value)

    def token_id(self, key: str, vocabulary: Vocabulary) -> int | None:
        value = self._metadata.get(key)
        if value is None:
            return None
        size = len(vocabulary.tokens)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < size:
            raise self.error(key, "no such token", expected=f"0 to {size - 1}", got=value)
        return int(value)

    def strings(self, key: str, most: int) -> list[str]:
        row = self._array(key, most)
        if {*map(type, row)} <= {str}:  # of a hundred thousand, without a look at each
            return [*row]
        for i, item in enumerate(row):
            if not isinstance(item, str):
                raise self.error(f"{key}[{i}]", "is not text", expected="a string", got=type(item).__name__)
        return [str(item) for item in row]

    def numbers(self, key: str, kinds: tuple[str, ...], length: int) -> list[Any] | None:
        """A number array of one of the declared ``kinds``, as Python numbers; None if absent."""
        if self._metadata.get(key) is None:
            return None
        row = self._array(key, _MOST_TOKENS)
        declared = str(getattr(row, "dtype", "")) or self._declared(key, row)
        if not declared.endswith((*kinds, *(kind[0] + kind[-2:] for kind in kinds))):
            raise self.error(key, "array of a wrong type", expected=" or ".join(kinds), got=declared)
        if len(row) != length:
            raise self.error(key, "length differs from the tokens", expected=length, got=len(row))
        try:
            values = np.asarray(row)
        except (TypeError, ValueError, OverflowError) as error:
            raise self.error(key, "holds something that is no number") from error
        if values.dtype.kind not in "iuf" or values.ndim != 1:
            raise self.error(key, "holds something that is no number")
        if not np.isfinite(values).all():
            at = int(np.flatnonzero(~np.isfinite(values))[0])
            raise self.error(f"{key}[{at}]", "is not finite", got=values[at])
        made: list[Any] = values.tolist()
        return made

    def _declared(self, key: str, row: Any) -> str:
        if self._types is not None:
            return self._types(key).lower().strip("[]<>() ")
        return "float32" if all(isinstance(item, float) for item in row) else "int32"

    def _array(self, key: str, most: int) -> Any:
        row = self._metadata.get(key)
        if row is None:
            raise self.error(key, "is missing")
        if not isinstance(row, list | tuple | np.ndarray) or getattr(row, "ndim", 1) != 1:
            raise self.error(key, "is not an array", got=type(row).__name__)
        if len(row) > most:
            raise LimitExceeded("too many entries", path=self.path, field=key, expected=f"at most {most}", got=len(row))
        return row

    def merges(self) -> list[Any]:
        """``tokenizer.ggml.merges``, cut at their spaces: pairs, where they are as they nearly always are."""
        return [tuple(line.split(" ")) for line in self.strings(_MERGES, _MOST_MERGES)]

    def checked_merges(self, vocabulary: Vocabulary) -> list[tuple[str, str]]:
        """The same, each looked at: the left part may begin with a space. Errors: TokenizerError with its index."""
        made: list[tuple[str, str]] = []
        for i, line in enumerate(self.strings(_MERGES, _MOST_MERGES)):
            left, gap, right = line[:1], *line[1:].partition(" ")[::2]
            left, right = left + gap, right
            if not right:
                raise self.error(f"{_MERGES}[{i}]", "is not two tokens with a space between", got=line)
            for part in (left, right, left + right):
                if part not in vocabulary.ids:
                    raise self.error(f"{_MERGES}[{i}]", "names an unknown token", got=part)
            made.append((left, right))
        return made


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, with their kinds (GGUF's ``token_type``) and, for SentencePiece, scores."""

    tokens: list[str]
    ids: dict[str, int]
    kinds: list[int]
    scores: list[float]

    @classmethod
    def read(cls, fields: Fields, *, scored: bool, rows: int | None) -> Vocabulary:
        key = "tokenizer.ggml.tokens"
        tokens = fields.strings(key, _MOST_TOKENS)
        if not tokens:
            raise fields.error(key, "is empty")
        if rows is not None and len(tokens) > rows:
            what = "more tokens than the model has embeddings"
            raise fields.error(key, what, expected=f"at most {rows}", got=len(tokens))
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]  # llama.cpp's stand-in
        ids = dict(zip(tokens, range(len(tokens)), strict=True))
        if len(ids) < len(tokens):
            first: dict[str, int] = {}
            i, token = next((i, token) for i, token in enumerate(tokens) if first.setdefault(token, i) != i)
            raise fields.error(f"{key}[{i}]", f"stands at {first[token]} already", got=token)
        kinds = fields.numbers("tokenizer.ggml.token_type", ("int32", "uint32"), len(tokens))
        scores = fields.numbers("tokenizer.ggml.scores", ("float32", "float64", "int32"), len(tokens)) if scored else []
        if scores is None:
            raise fields.error("tokenizer.ggml.scores", "is missing")
        if kinds is None:
            kinds = [6 if scored and _BYTE_LIKE.fullmatch(token) else 1 for token in tokens]
        if not {*kinds} <= {*range(7)}:
            i, kind = next((i, kind) for i, kind in enumerate(kinds) if kind not in range(7))
            raise fields.error(f"tokenizer.ggml.token_type[{i}]", "unknown kind", expected="1 to 6", got=kind)
        if scored or 6 in kinds:
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
                odd = kind == 6 or (scored and kind == 1 and _BYTE_LIKE.fullmatch(token))
                if odd and not _BYTE.fullmatch(token):
                    raise fields.error(f"{key}[{i}]", "is no byte", expected="<0x00> to <0xFF>", got=token)
        return cls(tokens, ids, [int(kind) for kind in kinds], scores)
