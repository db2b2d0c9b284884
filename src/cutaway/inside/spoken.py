"""What people say, as a model reads it: texts as ids and pieces, words as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias

from cutaway.errors import RequestError
from cutaway.generation.checks import check_ids
from cutaway.generation.inputs import is_list, plain
from cutaway.generation.voice import Prompt, Voice
from cutaway.inspection.readout import Spell
from cutaway.inspection.target import Target
from cutaway.spec import ClassifierSpec, HeadSpec
from cutaway.tokenizers.tokenizer import Piece

Word: TypeAlias = str | int
"""A text that is one token, such as ``" Paris"``, or a token's id."""


@dataclass(frozen=True, slots=True)
class Heard:
    """One text.

    Attributes:
        ids: of an encoder–decoder, what its decoder reads.
        pieces: a text for each, or None without a tokenizer.
        source, source_pieces: what an encoder–decoder's encoder reads, and a text for each of that.
    """

    ids: list[int]
    pieces: list[str] | None
    source: list[int] | None = None
    source_pieces: list[str] | None = None


@dataclass(frozen=True, slots=True)
class Spoken:
    """Turns what people say into what functions of this room take.

    Attributes:
        voice: the model and its tokenizer.
    """

    voice: Voice

    @property
    def spell(self) -> Spell | None:
        """A token's id → its text; None without a tokenizer."""
        tokenizer = self.voice.tokenizer
        return None if tokenizer is None else lambda token: _shown(tokenizer.target.pieces([token])[0])

    def read(self, text: Prompt, target: str | Sequence[int] | None = None, field: str = "text") -> Heard:
        """A text, messages or ids; where a model fills blanks, ``[MASK]`` in a text is one.

        Args:
            text: of an encoder–decoder, the source.
            target: of an encoder–decoder, what its decoder reads after its start token; nothing by default.
            field: what an error calls the text.

        Raises:
            RequestError: no token of its own, no tokenizer for a text, or a target where there is none.
        """
        spec, tokenizer = self.voice.model.spec, self.voice.tokenizer
        if isinstance(text, str) and tokenizer is not None and tokenizer.encode(text) == tokenizer.encode(""):
            hint = "To look at a start token alone, give its id in a list."
            raise RequestError("there is nothing to look at", field=field, expected="words", got=repr(text), hint=hint)
        blanks = isinstance(spec.head, HeadSpec) and not spec.generates
        if blanks and isinstance(text, str) and tokenizer is not None and tokenizer.mask_id is not None:
            ids = tokenizer.encode_masked(text)
        else:
            ids = self.voice.ids(text, field)
        if spec.source is None:
            if target is not None:
                what = "this model reads one text, not a source and a target"
                raise RequestError(what, field="target", got=target)
            return Heard(ids, self._pieces(ids))
        more: list[int] = []
        if isinstance(target, str):
            more = self.voice.cutter("target").target.encode(target, bos=False)
        elif target is not None:
            more = check_ids(plain(target), spec.vocab_size, "target")
        own = [*self.voice.start(), *more]
        return Heard(own, self._pieces(own, written=True), ids, self._pieces(ids))

    def several(self, texts: Any, target: str | Sequence[int] | None = None, field: str = "texts") -> list[Heard]:
        """One text or a list of them."""
        if not is_list(texts):
            return [self.read(texts, target, field)]
        return [self.read(one, target, f"{field}/{i}") for i, one in enumerate(plain(texts))]

    def token(self, word: Word, field: str = "word") -> int:
        """The token that a word is.

        Raises:
            RequestError: it is several, or none; the hint shows how it splits.
        """
        asked: Any = word
        if isinstance(asked, bool) or not isinstance(asked, (str, Integral)) or asked == "":
            raise RequestError("not a token", field=field, expected="a text or an id", got=repr(asked))
        if not isinstance(word, str):
            return check_ids([word], self.voice.model.spec.vocab_size, field)[0]
        found = self._cut(word, field)
        if len(found) == 1:
            return found[0]
        pieces = self._pieces(found, written=True) or []
        spaced = not word.startswith(" ") and len(self._cut(f" {word}", field)) == 1
        hint = f"With a space before it, it is one: {' ' + word!r}." if spaced else "Give one of these, or an id."
        got = f"{len(pieces)}: {' + '.join(map(repr, pieces))}" if pieces else "none"
        raise RequestError(f"{word!r} is not one token", field=field, expected="one token", got=got, hint=hint)

    def tokens(self, words: Word | Sequence[Word], field: str = "words") -> list[int]:
        """The tokens that words are."""
        if not isinstance(words, (str, int, Sequence)) or (not isinstance(words, int) and not words):
            raise RequestError("not words", field=field, expected="a text, an id, or a list of them", got=words)
        some: list[Word] = [words] if isinstance(words, (str, int)) else list(words)
        return [self.token(word, f"{field}/{i}" if len(some) > 1 else field) for i, word in enumerate(some)]

    def goal(self, of: Any, field: str = "of") -> Any:
        """What is explained, as :mod:`cutaway.inspection.target` has it: words as tokens, labels as they are."""
        labels = isinstance(self.voice.model.spec.head, ClassifierSpec)
        if labels or not isinstance(of, (str, tuple, list)):
            return of
        if isinstance(of, str):
            return self.token(of, field)
        return tuple(self.token(word, f"{field}/{i}") for i, word in enumerate(of))

    def worded(self, of: Any) -> str | None:
        """A goal in words; None where ids, labels or a function say it already."""
        spell = self.spell
        if spell is None or not isinstance(self.voice.model.spec.head, HeadSpec):
            return None
        target = of if isinstance(of, Target) else None
        ids = target.ids if target else of if isinstance(of, tuple) else (of,) if isinstance(of, int) else ()
        names = [f"“{spell(int(token))}”" for token in ids]
        match len(names), target.kind if target else None:
            case 1, "logprob":
                return f"log-probability of {names[0]}"
            case 1, _:
                return f"logit of {names[0]}"
            case 2, _:
                return f"logit of {names[0]} minus logit of {names[1]}"
        return None

    def vocabulary(self) -> list[int]:
        """Ids of ordinary tokens: no control tokens, none that stand for nothing."""
        tokenizer = self.voice.tokenizer
        rows = self.voice.model.spec.vocab_size
        if tokenizer is None:
            return list(range(rows))
        control = set(tokenizer.target.special.values())
        return [i for i in range(rows) if i not in control and tokenizer.target.token_bytes(i)]

    def _cut(self, word: str, field: str) -> list[int]:
        """A word's tokens; one that goes on from a text comes as it stands, its space too."""
        tokenizer = self.voice.cutter(field).target
        found = tokenizer.encode(word, special=True, continuation=True) if tokenizer.exact else []
        return found if len(found) == 1 else tokenizer.encode(word, special=True, bos=False)

    def _pieces(self, ids: Sequence[int], written: bool = False) -> list[str] | None:
        tokenizer = self.voice.tokenizer
        if tokenizer is None:
            return None
        return [_shown(piece) for piece in (tokenizer.target if written else tokenizer).pieces(ids)]


def _shown(piece: Piece) -> str:
    """A token's text; its bytes where they are no whole letters."""
    return f"<{piece.bytes.hex(' ').upper()}>" if "\ufffd" in piece.text else piece.text
