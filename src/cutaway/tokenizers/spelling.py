"""How the bytes of a token are written in its vocabulary entry, and how to read them back.

===============  ======================================================  =====================
kind             a token's string                                        used by
===============  ======================================================  =====================
byte_level       each byte as one printable character (GPT-2's table)    GPT-2, Llama 3, Qwen
sentencepiece    text with ``▁`` for a space; ``<0xNN>`` for a byte      Llama 2, Gemma, T5
words            depends on its neighbours; the library's decoder reads  BERT
===============  ======================================================  =====================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

__all__ = ["Spelling", "byte_alphabet"]


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: itself where printable, else the next free one from U+0100.

    >>> byte_alphabet()["a"], byte_alphabet()["Ġ"]
    (97, 32)
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Spelling:
    """The rule of one vocabulary. ``strip``: a text's first space was added by the encoder."""

    kind: Literal["byte_level", "sentencepiece", "words"]
    replace: tuple[tuple[str, str], ...] = ()
    fallback: bool = False
    strip: bool = False

    @classmethod
    def of(cls, decoder: dict[str, Any] | None) -> Spelling:
        """Read the rule off tokenizer.json's decoder."""
        replace: list[tuple[str, str]] = []
        fallback = strip = False
        parts = [] if decoder is None else decoder.get("decoders", [decoder])
        for part in parts:
            kind = part["type"]
            if kind == "ByteLevel":
                return cls("byte_level")
            if kind == "Metaspace":
                replace.append((part["replacement"], " "))
                strip = strip or part.get("prepend_scheme") != "never"
            elif kind == "Replace" and "String" in part["pattern"]:
                replace.append((part["pattern"]["String"], part["content"]))
            elif kind == "ByteFallback":
                fallback = True
            elif kind == "Strip" and part["content"] == " " and part["stop"] == 0 and part["start"] <= 1:
                strip = strip or part["start"] == 1
            elif kind != "Fuse":
                return cls("words")
        return cls("sentencepiece", tuple(replace), fallback, strip) if parts else cls("words")

    def to_bytes(self, token: str, *, added: bool) -> bytes:
        """The bytes a token stands for. Added tokens are not spelled with the byte alphabet."""
        if self.kind == "byte_level":
            alphabet = byte_alphabet()
            if not added and all(char in alphabet for char in token):
                return bytes(alphabet[char] for char in token)
        elif self.kind == "sentencepiece":
            byte = _BYTE.fullmatch(token) if self.fallback else None
            if byte:
                return bytes([int(byte[1], 16)])
            for old, new in self.replace:
                token = token.replace(old, new)
        elif token.startswith("##"):
            token = token[2:]
        return token.encode()
