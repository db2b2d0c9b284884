"""Text to bare ids, with nothing put around them: the part of a tokenizer that guards what people type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, final

import tokenizers
from cutaway.errors import TokenizerError
from cutaway.tokenizers.charsmap import Charsmap, Prepared
from cutaway.tokenizers.fronts import Fronts, Lead
from cutaway.tokenizers.rust import rust_errors

__all__ = ["Cut", "Cutter", "Source"]


class Cut(NamedTuple):
    """A token and where it stands in the text, in characters."""

    id: int
    start: int
    end: int

    def word(self, text: str) -> tuple[int, int]:
        """Its place without white space."""
        word = text[self.start : self.end]
        start = self.start + len(word) - len(word.lstrip())
        return start, max(start, self.start + len(word.rstrip()))


@dataclass(frozen=True)
class Source:
    """What cuts a text, where that is more than the vocabulary's own object.

    Attributes:
        backend: the library's object that cuts.
        plain: its model for a text in which control strings are text. None: the same; what it forges is cut apart.
        names: piece → id, where ``backend`` does not number pieces as the tokenizer does. A text's first ``>>…<<``
            is then one piece, the code of a language.
        unknown: with ``names``, ``backend``'s id for what it has no piece for. That is looked up too.
        charsmap: what happens to a text before ``backend`` sees it.
    """

    backend: tokenizers.Tokenizer
    plain: Any = None
    names: Mapping[str, int] | None = None
    unknown: int | None = None
    charsmap: Charsmap | None = None


@final
class Cutter:
    """Cuts texts, control strings parsed or not. Safe to use from several threads.

    Args:
        source: what cuts.
        special: string → id of every control token, as the tokenizer numbers them.
        spelled: token → id of those that stand for a byte; the text that spells one is text.
        unknown: id for what no token covers.
        reach: the first id that the model has no row for.
    """

    def __init__(
        self,
        source: Source,
        *,
        special: Mapping[str, int],
        spelled: Mapping[str, int],
        unknown: int | None,
        reach: float,
    ) -> None:
        self._source = source
        self._unknown = unknown
        self._fronts = Fronts(source.backend, reach if source.names is None else float("inf"), source.plain)
        self._renamed = None if source.names is None else _renamed(source, source.names, unknown)
        self._strings = {index: text for text, index in (*special.items(), *spelled.items())}
        self._exact = {unknown, *spelled.values()}  # these may also be what they are meant for
        # A one-character token is text even when it is declared special (some files do it to "\n").
        self._forged = frozenset(index for text, index in (*special.items(), *spelled.items()) if len(text) > 1)
        if source.plain is not None and unknown is not None:  # such a model cannot forge it
            self._forged -= {unknown}

    def ids(self, texts: Sequence[str], *, special: bool, lead: Lead) -> list[list[int]]:
        """The ids of each text."""
        for text in texts:
            _check_text(text)
        if self._source.names is not None:
            return [[cut.id for cut in self.cuts(text, special=special, lead=lead)] for text in texts]
        # The batch call, for one text too: it is the one that lets other Python threads run meanwhile.
        with rust_errors("text cannot be encoded"):
            found = self._fronts.get(special, lead).encode_batch_fast(list(texts), add_special_tokens=False)
        rows: list[list[int]] = [encoding.ids for encoding in found]
        if not special:
            for i, row in enumerate(rows):
                if not self._forged.isdisjoint(row):
                    rows[i] = [cut.id for cut in self._unforged(texts[i], lead)]
        return rows

    def cuts(self, text: str, *, special: bool, lead: Lead) -> list[Cut]:
        """The tokens of a text with their places."""
        _check_text(text)
        end = 0 if self._source.names is None or lead != "own" else _code(text)
        cut = (self._parsed if special else self._unforged)(text[end:], lead)
        if not end or self._source.names is None:
            return cut
        index = self._source.names.get(text[:end], self._unknown)
        assert index is not None
        return [Cut(index, 0, end), *(Cut(token.id, token.start + end, token.end + end) for token in cut)]

    def masked(self, text: str, mask: int) -> list[Cut]:
        """The tokens of a text in which the mask token's string is that token, and all else is text."""
        _check_text(text)
        found: list[Cut] = []
        at = 0
        for token in self._parsed(text, "own"):
            if token.id == mask:
                found += [*self._stretch(text, at, token.start), token]
                at = token.end
        return found + self._stretch(text, at, len(text))

    def _stretch(self, text: str, start: int, end: int) -> list[Cut]:
        if start >= end:
            return []
        cuts = self.cuts(text[start:end], special=False, lead="middle" if start else "own")
        return [Cut(token.id, token.start + start, token.end + start) for token in cuts]

    def _parsed(self, text: str, lead: Lead, *, special: bool = True) -> list[Cut]:
        ready = Prepared(text) if self._source.charsmap is None else self._source.charsmap.prepare(text)
        with rust_errors("text cannot be encoded"):
            (found,) = self._fronts.get(special, lead).encode_batch([ready.text], add_special_tokens=False)
        cuts = [Cut(index, *place) for index, place in zip(found.ids, found.offsets, strict=True)]
        if self._renamed is not None:
            cuts = [self._rename(cut, ready.text, self._renamed) for cut in cuts]
        return [Cut(cut.id, *ready.place(cut.start, cut.end)) for cut in cuts]

    def _rename(self, cut: Cut, text: str, ids: Sequence[int]) -> Cut:
        if cut.id != self._source.unknown or self._source.names is None:
            return Cut(ids[cut.id], cut.start, cut.end)
        with rust_errors("text cannot be encoded"):
            piece = self._fronts.get(False, "none").normalizer.normalize_str(text[cut.start : cut.end])
        return Cut(self._source.names.get(piece, ids[cut.id]), cut.start, cut.end)

    def _unforged(self, text: str, lead: Lead) -> list[Cut]:
        """As `_parsed` with control strings as text, even where the model itself makes one.

        Such a vocabulary would turn a typed ``</s>`` into the control token. There the text is cut
        after the string's first character, and the stretches are encoded.
        """
        row = self._parsed(text, lead, special=False)
        cuts = [token.start + 1 for token in row if self._is_forged(token, text)]
        if not cuts:
            return row
        made: list[Cut] = []
        for start, end in pairwise([0, *cuts, len(text)]):
            inner = self._unforged(text[start:end], "none" if start else lead)
            made += [Cut(token.id, token.start + start, token.end + start) for token in inner]
        return made

    def _is_forged(self, token: Cut, text: str) -> bool:
        if token.id not in self._forged or token.end - token.start < 2:
            return False
        return token.id not in self._exact or text[token.start : token.end] == self._strings[token.id]


def _renamed(source: Source, names: Mapping[str, int], unknown: int | None) -> list[int]:
    """The tokenizer's id for each of the backend's."""
    if unknown is None:
        raise TokenizerError("has no unknown token")
    table = [unknown] * source.backend.get_vocab_size(with_added_tokens=True)
    for piece, index in source.backend.get_vocab(with_added_tokens=True).items():
        table[index] = names.get(piece, unknown)
    return table


def _code(text: str) -> int:
    """How long the language code is that a text begins with; 0 without one."""
    end = text.find("<<") if text.startswith(">>") else -1
    return end + 2 if end >= 0 else 0


def _check_text(text: str) -> None:
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        what = "text holds half a surrogate pair, which is no character"
        raise TokenizerError(what, offset=error.start, got=repr(text[error.start : error.start + 1])) from error
