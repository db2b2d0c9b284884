"""The tokenizer people hold: text to ids and back, the same object whatever file it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, final

import tokenizers
from cutaway.errors import CutawayError, RequestError, TokenizerError
from cutaway.tokenizers.around import NOTHING, Around
from cutaway.tokenizers.chat import NO_TEMPLATE, ChatTemplate, LateTemplate, encode_chat
from cutaway.tokenizers.cutter import Cutter, Source
from cutaway.tokenizers.disguise import ControlStrings
from cutaway.tokenizers.fronts import Lead
from cutaway.tokenizers.rust import components, vocabulary_size
from cutaway.tokenizers.spelling import Spelling
from cutaway.tokenizers.stream import ByteStream, DecodeStream, Start, WordStream
from cutaway.tokenizers.tidy import Tidy

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
        around: what the checkpoint's own rule puts around a text, and around two.
        template: the file's chat template.
        names: what a chat template may ask for, such as ``bos_token``.
        rows: embedding rows of the model; ids up to there may be decoded (to nothing).
        size: one beyond the greatest id, where that is known.
        source: what cuts a text, if not ``backend`` alone.
        target: the tokenizer for what a translation model writes, if it is another.
        files: what to save, where no tokenizer.json can say it.
        trims: a decoded text has no white space at its ends.
        tidies: it has none before punctuation (`tidy.py`).
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
        cls_id: int | None = None,
        sep_id: int | None = None,
        mask_id: int | None = None,
        around: Around = NOTHING,
        template: LateTemplate = NO_TEMPLATE,
        names: Mapping[str, str] = MappingProxyType({}),
        rows: int | None = None,
        size: int | None = None,
        source: Source | None = None,
        target: Tokenizer | None = None,
        files: Mapping[str, bytes] = MappingProxyType({}),
        trims: bool = False,
        tidies: bool = False,
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
        self.cls_id: Final = cls_id
        self.sep_id: Final = sep_id
        self.mask_id: Final = mask_id
        self._template = template
        self.names: Final[Mapping[str, str]] = MappingProxyType(dict(names))
        self.around: Final = around
        self.target: Final = self if target is None else target
        self.files: Final[Mapping[str, bytes]] = MappingProxyType(dict(files))
        self.vocab_size: Final = vocabulary_size(backend, reach) if size is None else size
        self._rows = max(self.vocab_size, rows or 0)
        self._spelling = Spelling.of(components(backend)["decoder"])
        self._trims = trims
        self.tidies: Final = tidies
        self._added = frozenset(backend.get_added_tokens_decoder())
        self._special_ids = frozenset(special.values())
        self._cutter = Cutter(
            source or Source(backend),
            special=special,
            spelled=self._byte_tokens(),
            unknown=unk_id,
            reach=reach,
        )
        self._bytes: dict[int, bytes] = {}

    def _byte_tokens(self) -> dict[str, int]:
        """Of a Unigram model, whose own scores would make a byte of a typed ``<0x41>``."""
        if not self._spelling.fallback or not isinstance(self.backend.model, tokenizers.models.Unigram):
            return {}
        names = (f"<0x{byte:02X}>" for byte in range(256))
        return {name: index for name in names if (index := self.backend.token_to_id(name)) is not None}

    @property
    def adds_bos(self) -> bool:
        """Does the checkpoint's own rule begin a text with BOS?"""
        return self.bos_id is not None and self.around.before[:1] == (self.bos_id,)

    @property
    def exact(self) -> bool:
        """Is a text that goes on from another just the bytes of its tokens?"""
        return self._spelling.kind != "words" and not self.tidies and not self._trims

    @property
    def chat_template(self) -> ChatTemplate | None:
        """What lays conversations out, if the file has it and nothing is wrong with it."""
        return self._template.made

    @property
    def template_error(self) -> CutawayError | None:
        """Why there is no chat template although the file has one."""
        return self._template.error

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

    def encode_pair(self, a: str, b: str, *, special: bool = False) -> tuple[list[int], list[int]]:
        """Ids and types (BERT's segments) of two texts, laid out by the checkpoint's own rule.

        Errors: TokenizerError if it has none.
        """
        if not self.around.pair:
            raise TokenizerError("has no rule for two texts")
        return self.around.lay_out(*self.encode_parts([a, b], special=special, lead="own"))

    def encode_with_spans(self, text: str, *, special: bool = False) -> tuple[list[int], list[tuple[int, int] | None]]:
        """`encode`, and where each token stands in the text: start and end in characters, without white space.

        None for control tokens, those put around the text and those parsed in it.
        """
        before, after = self.around.before, self.around.after
        cuts = self._cutter.cuts(text, special=special, lead="own")
        control = self._special_ids - {self.unk_id}
        inner = [None if cut.id in control else cut.word(text) for cut in cuts]
        spans = [*[None] * len(before), *inner, *[None] * len(after)]
        return [*before, *(cut.id for cut in cuts), *after], spans

    def encode_masked(self, text: str) -> list[int]:
        """`encode` of a text in which ``[MASK]``, or the tokenizer's own string for it, is the mask token.

        Errors: TokenizerError if there is no mask token.
        """
        mask = self.names.get("mask_token")
        if self.mask_id is None or mask is None:
            raise TokenizerError("has no mask token")
        if self.backend.token_to_id("[MASK]") is None:
            text = text.replace("[MASK]", mask)
        inner = [cut.id for cut in self._cutter.masked(text, self.mask_id)]
        return [*self.around.before, *inner, *self.around.after]

    def encode_parts(self, texts: Sequence[str], *, special: bool, lead: Lead) -> list[list[int]]:
        """The bare ids of each text, nothing put around them."""
        return self._cutter.ids(texts, special=special, lead=lead)

    def tokenize(
        self, text: str, *, bos: bool | None = None, special: bool = False, continuation: bool = False
    ) -> list[Piece]:
        """`encode`, with each token's text, bytes and place in the text."""
        before, after = self._around(bos, continuation)
        inner = self.located(text, "none" if continuation else "own", special=special)
        return [*self.pieces(before), *inner, *self.pieces(after)]

    def located(self, text: str, lead: Lead, *, special: bool = True) -> list[Piece]:
        """The bare tokens of a text with their offsets, control strings parsed or not."""
        cuts = self._cutter.cuts(text, special=special, lead=lead)
        pieces = self.pieces(cut.id for cut in cuts)
        return [replace(piece, start=cut.start, end=cut.end) for piece, cut in zip(pieces, cuts, strict=True)]

    def _around(self, bos: bool | None, continuation: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if continuation or bos is False:
            return (), ()
        if bos and not self.adds_bos:
            if self.bos_id is None:
                raise TokenizerError("has no BOS token")
            return (self.bos_id, *self.around.before), self.around.after
        return self.around.before, self.around.after

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
        tidy = Tidy() if self.tidies else None
        if self._spelling.kind == "words":

            def keep(index: int) -> bool:
                self._check_id(index)
                return index not in hidden and self.backend.id_to_token(index) is not None

            return DecodeStream(
                WordStream(keep, lambda ids: str(self.backend.decode(ids, skip_special_tokens=False))), tidy
            )

        def spell(index: int) -> bytes | None:
            data = self.token_bytes(index)
            return None if index in hidden else data

        start: Start = "" if continuation else "all" if self._trims else "one" if self._spelling.strip else ""
        return DecodeStream(ByteStream(spell, start=start, end=self._trims), tidy)

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
        return encode_chat(self, self._template.wanted(), messages, **kwargs)

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
        return self._template.wanted().render(messages, **kwargs)
