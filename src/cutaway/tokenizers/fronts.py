"""The four ways of reading a text, over one shared vocabulary.

The library keeps "are control strings parsed?" as a switch on the object, which two threads
would pull in two directions. So every way is an object of its own; only the model (vocabulary
and merges, nearly all of the memory) is shared between them.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias, final

import tokenizers
from cutaway.tokenizers.rust import Component, component, components, rust_errors

__all__ = ["TRIM", "Fronts", "Lead"]

Lead: TypeAlias = Literal["own", "middle", "none"]
"""Who gets the added leading space: as the checkpoint says; as it says for text that is not
the first; nobody."""

TRIM: Final = {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""}
"""SentencePiece's tidying of a text's two ends."""
_TRIM_END: Final = {"type": "Replace", "pattern": {"Regex": r" +\z"}, "content": ""}
"""What `TRIM` is for a text that goes on from another: its first space is real."""


@final
class Fronts:
    """Library objects by (control strings parsed?, leading space).

    Args:
        backend: the checkpoint's own.
        reach: added tokens from this id on are left out.
        plain: the model to use where control strings are not parsed, if not the same.
    """

    def __init__(self, backend: tokenizers.Tokenizer, reach: float, plain: Any = None) -> None:
        self.tree: Final = components(backend)
        self._own = backend
        self._known = frozenset(backend.get_vocab(with_added_tokens=False)) if plain is not None else frozenset[str]()
        self._models = {True: backend.model, False: backend.model if plain is None else plain}
        added = backend.get_added_tokens_decoder()
        self._added = [added[index] for index in sorted(added) if index < reach]
        self._made: dict[tuple[bool, Lead], tokenizers.Tokenizer] = {
            (True, "own"): backend if len(self._added) == len(added) else self._build(True, "own"),
            (False, "own"): self._build(False, "own"),
        }
        for special in (True, False):
            for lead in ("middle", "none"):
                same = _led(self.tree, lead) == (self.tree["normalizer"], self.tree["pre_tokenizer"])
                self._made[special, lead] = self._made[special, "own"] if same else self._build(special, lead)

    def get(self, special: bool, lead: Lead) -> tokenizers.Tokenizer:
        return self._made[special, lead]

    def _build(self, special: bool, lead: Lead) -> tokenizers.Tokenizer:
        front = tokenizers.Tokenizer(self._models[special])
        normalizer, pre_tokenizer = _led(self.tree, lead)
        with rust_errors("tokenizer cannot be repeated"):
            front.normalizer = component("normalizer", normalizer)
            front.pre_tokenizer = component("pre_tokenizer", pre_tokenizer)
            # The library numbers what its model lacks, in this order. A plain model lacks the control tokens too.
            known = self._known
            front.add_tokens(sorted(self._added, key=lambda token: token.content in known))
            front.encode_special_tokens = not special
        return front


def _led(tree: dict[str, Any], lead: Lead) -> tuple[Component, Component]:
    """Normalizer and pre-tokenizer, as JSON, with their leading space as ``lead`` says."""
    normalizer, pre_tokenizer = tree["normalizer"], tree["pre_tokenizer"]
    steps = _steps(pre_tokenizer)
    if lead == "none" and steps[:1] == [{"type": "WhitespaceSplit"}] and any(s["type"] == "Metaspace" for s in steps):
        # Every word gets its space from Metaspace, as the split has taken them all. Only the first must go without.
        normalizer = {"type": "Sequence", "normalizers": [*_steps(normalizer), *_ONE_SPACE]}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": steps[1:]}
    return _led_part(normalizer, lead), _led_part(pre_tokenizer, lead)


_ONE_SPACE = [
    {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
    _TRIM_END,
]


def _steps(tree: Any) -> list[Any]:
    if tree is None:
        return []
    return list(tree.get("normalizers") or tree.get("pretokenizers") or ()) if tree["type"] == "Sequence" else [tree]


def _led_part(tree: Any, lead: Lead) -> Any:
    if lead == "own" or not isinstance(tree, dict):
        return tree
    kind = tree.get("type")
    if kind == "Sequence":
        (key,) = {"normalizers", "pretokenizers"} & tree.keys()
        parts = [_led_part(part, lead) for part in tree[key]]
        return {**tree, key: [part for part in parts if part is not None]}
    if kind == "Metaspace" and (lead == "none" or tree.get("prepend_scheme") == "first"):
        return {**tree, "prepend_scheme": "never"}
    if kind == "Prepend" and lead == "none":
        return None
    if kind == "ByteLevel" and lead == "none":
        return {**tree, "add_prefix_space": False}
    if tree == TRIM and lead == "none":
        return _TRIM_END
    return tree
