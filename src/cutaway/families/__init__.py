"""One file a family: its config read and written, its tensors named, in both formats."""

from cutaway.families.family import Family, GgufForm
from cutaway.families.registry import family_of, gguf_family, known_families

__all__ = ["Family", "GgufForm", "family_of", "gguf_family", "known_families"]
