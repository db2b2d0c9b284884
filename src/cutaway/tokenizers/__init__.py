"""Text to ids and back, for every checkpoint and file format alike."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutaway.tokenizers.chat import ChatTemplate
    from cutaway.tokenizers.gguf import from_gguf
    from cutaway.tokenizers.load import from_folder
    from cutaway.tokenizers.stream import DecodeStream
    from cutaway.tokenizers.tokenizer import Piece, Tokenizer

# Imported when first asked for: a GGUF's vocabulary needs none of what reads folders.
_WHERE = {
    "ChatTemplate": "chat",
    "DecodeStream": "stream",
    "Piece": "tokenizer",
    "Tokenizer": "tokenizer",
    "from_folder": "load",
    "from_gguf": "gguf",
}
__all__ = ["ChatTemplate", "DecodeStream", "Piece", "Tokenizer", "from_folder", "from_gguf"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'cutaway.tokenizers' has no attribute {name!r}")
    return getattr(importlib.import_module(f"cutaway.tokenizers.{_WHERE[name]}"), name)
