"""The tokenizer people hold: text to ids and back, the same object whatever file it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final, final

import tokenizers
from cutaway.errors import CutawayError, RequestError, TemplateError, TokenizerError
from cutaway.tokenizers.chat import ChatTemplate, encode_chat
from cutaway.tokenizers.disguise import ControlStrings
from cutaway.tokenizers.fronts import Fronts, Lead
from cutaway.tokenizers.rust import rust_errors
from cutaway.tokenizers.spelling import Spelling
from cutaway.tokenizers.stream import ByteStream, DecodeStream, WordStream

__all__ = ["Piece", "Tokenizer"]


@dataclass(frozen=True)
class Piece:
    """One token. ``text`` is its bytes as text (U+FFFD where it ends inside a character).

    ``start`` and ``end`` are character offsets into the text it came from, where there is one.
    """

    id: int
    text: str
    bytes: bytes
    special: bool
    start: int | None = None
    end: int | None = None


@final
class Tokenizer:
    """Text ↔ ids. Frozen once built, and safe to use from several threads.

    Args:
        backend: the library's object; it must not be changed afterwards.
        special: string → id of every control token.
        prefix, suffix: ids that the checkpoint's own rule puts around a text.
        template_error: why there is no chat template although the file has one.
        names: what a chat template may ask for, such as ``bos_token``.
        rows: embedding rows of the model; ids up to there may be decoded (to nothing).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special: Mapping[str, int],
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        pad_id: int | None = None,
        unk_id: int | None = None,
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
        template_error: CutawayError | None = None,
        names: Mapping[str, str] = MappingProxyType({}),
        rows: int | None = None,
    ) -> None:
        self.backend: Final = backend
        # A multimodal file's image tokens may lie past the rows of the text model that comes with it.
        reach = float("inf") if rows is None else rows
        special = {text: index for text, index in special.items() if index < reach}
        self.special: Final[Mapping[str, int]] = MappingProxyType(special)
        self.bos_id: Final = bos_id
        self.eos_ids: Final = tuple(eos_ids)
        self.pad_id: Final = pad_id
        self.unk_id: Final = unk_id
        self.chat_template: Final = chat_template
        self.template_error: Final = template_error
        self.names: Final[Mapping[str, str]] = MappingProxyType(dict(names))
        known = (index for index in backend.get_vocab(with_added_tokens=True).values() if index < reach)
        self.vocab_size: Final = max(known, default=-1) + 1
        self._rows = max(self.vocab_size, rows or 0)
        self._prefix, self._suffix = tuple(prefix), tuple(suffix)
        self._fronts = Fronts(backend, reach)
        self._spelling = Spelling.of(self._fronts.tree["decoder"])
        self._added = frozenset(backend.get_added_tokens_decoder())
        self._special_ids = frozenset(special.values())
        # A one-character token is text even when it is declared special (some files do it to "\n").
        self._forged = frozenset(index for text, index in special.items() if len(text) > 1)
        self._bytes: dict[int, bytes] = {}

    @property
    def adds_bos(self) -> bool:
        """Does the checkpoint's own rule begin a text with BOS?"""
        return self.bos_id is not None and self._prefix[:1] == (self.bos_id,)

    @cached_property
    def control_strings(self) -> ControlStrings:
        """Finds control strings in what people wrote."""
        return ControlStrings(self.special)

    # -- text to ids

    def encode(
        self, text: str, *, bos: bool | None = None, special: bool = False, continuation: bool = False
    ) -> list[int]:
        """The ids of a text.

        Args:
            bos: None for the checkpoint's own BOS and EOS rule, True for that with BOS in any
                case, False for the text alone.
            special: parse control strings in the text. By default they are text like any other.
            continuation: the text goes on from another: no BOS, no added leading space.

        Errors: TokenizerError for a lone surrogate, or if the vocabulary's own rules break.
        """
        return self.encode_batch([text], bos=bos, special=special, continuation=continuation)[0]

    def encode_batch(
        self, texts: Iterable[str], *, bos: bool | None = None, special: bool = False, continuation: bool = False
    ) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        before, after = self._around(bos, continuation)
        lead: Lead = "none" if continuation else "own"
        return [[*before, *ids, *after] for ids in self.encode_parts(list(texts), special=special, lead=lead)]

    def encode_parts(self, texts: Sequence[str], *, special: bool, lead: Lead) -> list[list[int]]:
        """The bare ids of each text, nothing put around them."""
        for text in texts:
            _check_text(text)
        # The batch call, for one text too: it is the one that lets other Python threads run meanwhile.
        with rust_errors("text cannot be encoded"):
            found = self._fronts.get(special, lead).encode_batch_fast(list(texts), add_special_tokens=False)
        rows: list[list[int]] = [encoding.ids for encoding in found]
        if not special:
            for i, row in enumerate(rows):
                if not self._forged.isdisjoint(row):
                    rows[i] = [piece.id for piece in self._unforged(texts[i], lead)]
        return rows

    def tokenize(
        self, text: str, *, bos: bool | None = None, special: bool = False, continuation: bool = False
    ) -> list[Piece]:
        """`encode`, with each token's text, bytes and place in the text."""
        before, after = self._around(bos, continuation)
        lead: Lead = "none" if continuation else "own"
        _check_text(text)
        inner = self.located(text, lead) if special else self._unforged(text, lead)
        return [*self.pieces(before), *inner, *self.pieces(after)]

    def located(self, text: str, lead: Lead, *, special: bool = True, shift: int = 0) -> list[Piece]:
        """The bare tokens of a text with their offsets, control strings parsed or not."""
        with rust_errors("text cannot be encoded"):
            (found,) = self._fronts.get(special, lead).encode_batch([text], add_special_tokens=False)
        return [
            Piece(p.id, p.text, p.bytes, p.special, start + shift, end + shift)
            for p, (start, end) in zip(self.pieces(found.ids), found.offsets, strict=True)
        ]

    def _unforged(self, text: str, lead: Lead, shift: int = 0) -> list[Piece]:
        """As `located` with control strings as text, even where the merges themselves build one.

        Such a vocabulary would turn a typed ``</s>`` into the control token. There the text is cut
        after the string's first character, and the stretches are encoded.
        """
        row = self.located(text, lead, special=False, shift=shift)
        cuts = [(piece.start or 0) + 1 - shift for piece in row if self._is_forged(piece, text, shift)]
        if not cuts:
            return row
        made: list[Piece] = []
        for start, end in pairwise([0, *cuts, len(text)]):
            made += self._unforged(text[start:end], "none" if start else lead, shift + start)
        return made

    def _is_forged(self, piece: Piece, text: str, shift: int) -> bool:
        start, end = (piece.start or 0) - shift, (piece.end or 0) - shift
        unknown = piece.id == self.unk_id and piece.text != text[start:end]
        return piece.id in self._forged and end - start > 1 and not unknown

    def _around(self, bos: bool | None, continuation: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if continuation or bos is False:
            return (), ()
        if bos and not self.adds_bos:
            if self.bos_id is None:
                raise TokenizerError("has no BOS token")
            return (self.bos_id, *self._prefix), self._suffix
        return self._prefix, self._suffix

    # -- ids to text

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continuation: bool = False) -> str:
        """The text of ids. ``continuation``: it goes on from another, so its first space is real.

        Errors: RequestError for an id outside the vocabulary.
        """
        stream = self.stream(skip_special=skip_special, continuation=continuation)
        return "".join([stream.push(index) for index in ids]) + stream.flush()

    def stream(self, *, skip_special: bool = True, continuation: bool = False) -> DecodeStream:
        """The same text, id by id."""
        hidden = self._special_ids if skip_special else frozenset()
        if self._spelling.kind == "words":

            def keep(index: int) -> bool:
                self._check_id(index)
                return index not in hidden

            return DecodeStream(WordStream(keep, lambda ids: str(self.backend.decode(ids, skip_special_tokens=False))))

        def spell(index: int) -> bytes | None:
            data = self.token_bytes(index)
            return None if index in hidden else data

        return DecodeStream(ByteStream(spell, strip=self._spelling.strip and not continuation))

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token; none for an id that the vocabulary leaves out."""
        known = self._bytes.get(token_id)
        if known is None:
            self._check_id(token_id)
            token = self.backend.id_to_token(token_id)
            known = b"" if token is None else self._spelling.to_bytes(token, added=token_id in self._added)
            self._bytes[token_id] = known
        return known

    def pieces(self, ids: Iterable[int]) -> list[Piece]:
        """Each id with its text and bytes, for showing."""
        return [
            Piece(index, data.decode("utf-8", "replace"), data, index in self._special_ids)
            for index, data in ((index, self.token_bytes(index)) for index in ids)
        ]

    def _check_id(self, index: int) -> None:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < self._rows:
            raise RequestError("no such token id", expected=f"0 to {self._rows - 1}", got=index)

    # -- chat

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """The ids of a conversation, laid out by the checkpoint's own template.

        Control tokens come from the template alone; in what people wrote they are text.
        Errors: TemplateError.
        """
        kwargs = {"add_generation_prompt": add_generation_prompt, "tools": tools, **kwargs}
        return encode_chat(self, self._template(), messages, **kwargs)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """The conversation as text, to look at. It cannot tell control tokens from typed ones; `chat` can."""
        kwargs = {**self.names, "add_generation_prompt": add_generation_prompt, "tools": tools, **kwargs}
        return self._template().render(messages, **kwargs)

    def _template(self) -> ChatTemplate:
        if self.template_error is not None:
            raise self.template_error
        if self.chat_template is None:
            raise TemplateError("this model has no chat template", hint="give it a plain prompt")
        return self.chat_template


def _check_text(text: str) -> None:
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        what = "text holds half a surrogate pair, which is no character"
        raise TokenizerError(what, offset=error.start, got=repr(text[error.start : error.start + 1])) from error
