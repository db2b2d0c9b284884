"""A vocabulary as llguidance wants it: the bytes of every token, and which of them end an answer."""

from __future__ import annotations

from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

from cutaway.tokenizers.tokenizer import Tokenizer

FORCED = 4096  # characters of what must follow that are cut into tokens at a time

_MADE: WeakKeyDictionary[Tokenizer, dict[tuple[int, frozenset[int]], Any]] = WeakKeyDictionary()


class _Words:
    """What llguidance asks of a tokenizer, under its names."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: frozenset[int]) -> None:
        known = min(vocab_size, tokenizer.vocab_size)
        hidden = {index for index in tokenizer.special.values() if index < known} | ends
        self.tokens = [tokenizer.token_bytes(index) for index in range(known)] + [b""] * (vocab_size - known)
        for index in hidden:  # a control token is no text, and needs some name
            self.tokens[index] = self.tokens[index] or f"<|{index}|>".encode()
        if not ends:  # llguidance must have one; it lies past the vocabulary, so nobody chooses it
            self.tokens.append(b"<|end|>")
            hidden.add(vocab_size)
        self.special_token_ids = sorted(hidden)
        self.eos_token_id = min(ends, default=vocab_size)
        self.bos_token_id = tokenizer.bos_id if tokenizer.bos_id in hidden else None
        self._tokenizer = ref(tokenizer)  # or what is made would keep alive what it was made for

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of what must follow, or of its beginning."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        tokenizer = self._tokenizer()
        return [] if tokenizer is None else tokenizer.encode(text[:FORCED], continuation=True)


def vocabulary(library: ModuleType, tokenizer: Tokenizer, vocab_size: int, ends: frozenset[int]) -> Any:
    """llguidance's object for a tokenizer, made once."""
    made = _MADE.setdefault(tokenizer, {})
    key = (vocab_size, ends)
    if key not in made:
        words = _Words(tokenizer, vocab_size, ends)
        if len(made) > 3:
            made.clear()  # calls with ever other stop ids
        wrapped = library.TokenizerWrapper(words)
        made[key] = library.LLTokenizer(wrapped, eos_token=sorted(ends) or [words.eos_token_id])
    return made[key]
