"""The four ways of reading a text, over one shared vocabulary.

The library keeps "are control strings parsed?" as a switch on the object, which two threads
would pull in two directions. So every way is an object of its own; only the model (vocabulary
and merges, nearly all of the memory) is shared between them.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias, final

import tokenizers
from cutaway.tokenizers.rust import component, components, rust_errors

__all__ = ["Fronts", "Lead"]

Lead: TypeAlias = Literal["own", "middle", "none"]
"""Who gets the added leading space: as the checkpoint says; as it says for text that is not
the first; nobody."""


@final
class Fronts:
    """Library objects by (control strings parsed?, leading space). Added tokens from id ``reach`` on are left out."""

    def __init__(self, backend: tokenizers.Tokenizer, reach: float) -> None:
        self.tree: Final = components(backend)
        self._own = backend
        added = backend.get_added_tokens_decoder()
        self._added = [added[index] for index in sorted(added) if index < reach]
        self._made: dict[tuple[bool, Lead], tokenizers.Tokenizer] = {
            (True, "own"): backend if len(self._added) == len(added) else self._build(True, "own"),
            (False, "own"): self._build(False, "own"),
        }
        for special in (True, False):
            for lead in ("middle", "none"):
                same = all(_led(self.tree[kind], lead) == self.tree[kind] for kind in ("normalizer", "pre_tokenizer"))
                self._made[special, lead] = self._made[special, "own"] if same else self._build(special, lead)

    def get(self, special: bool, lead: Lead) -> tokenizers.Tokenizer:
        return self._made[special, lead]

    def _build(self, special: bool, lead: Lead) -> tokenizers.Tokenizer:
        front = tokenizers.Tokenizer(self._own.model)
        with rust_errors("tokenizer cannot be repeated"):
            front.normalizer = component("normalizer", _led(self.tree["normalizer"], lead))
            front.pre_tokenizer = component("pre_tokenizer", _led(self.tree["pre_tokenizer"], lead))
            front.add_tokens(self._added)
            front.encode_special_tokens = not special
        return front


def _led(tree: Any, lead: Lead) -> Any:
    """A normalizer or pre-tokenizer, as JSON, with its leading space as ``lead`` says."""
    if lead == "own" or not isinstance(tree, dict):
        return tree
    kind = tree.get("type")
    if kind == "Sequence":
        (key,) = {"normalizers", "pretokenizers"} & tree.keys()
        parts = [_led(part, lead) for part in tree[key]]
        return {**tree, key: [part for part in parts if part is not None]}
    if kind == "Metaspace" and (lead == "none" or tree.get("prepend_scheme") == "first"):
        return {**tree, "prepend_scheme": "never"}
    if kind == "Prepend" and lead == "none":
        return None
    if kind == "ByteLevel" and lead == "none":
        return {**tree, "add_prefix_space": False}
    return tree
