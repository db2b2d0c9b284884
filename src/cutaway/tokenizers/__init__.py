"""Text to ids and back, for every checkpoint and file format alike."""

from cutaway.tokenizers.chat import ChatTemplate
from cutaway.tokenizers.gguf import from_gguf
from cutaway.tokenizers.load import from_folder
from cutaway.tokenizers.stream import DecodeStream
from cutaway.tokenizers.tokenizer import Piece, Tokenizer

__all__ = ["ChatTemplate", "DecodeStream", "Piece", "Tokenizer", "from_folder", "from_gguf"]
