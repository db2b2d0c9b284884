"""What a checkpoint's own rule puts around one text, and around two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, TypeAlias

from cutaway.tokenizers.rust import rust_errors

__all__ = ["NOTHING", "Around", "Step", "around_of", "template"]

Step: TypeAlias = tuple[int | str, int]
"""A token's id, or which text stands here, ``"a"`` or ``"b"``; and its type, BERT's segment."""


@dataclass(frozen=True)
class Around:
    """Ids before and after one text, and how two are laid out; no steps where the checkpoint has no rule for two."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    pair: tuple[Step, ...] = ()

    @classmethod
    def marked(cls, bos: Sequence[int], eos: Sequence[int]) -> Around:
        """Each text with these around it, as the flags ``add_bos_token`` and ``add_eos_token`` say it."""
        ends = [[(index, kind) for index in ids] for kind in (0, 1) for ids in (bos, eos)]
        return cls(tuple(bos), tuple(eos), (*ends[0], ("a", 0), *ends[1], *ends[2], ("b", 1), *ends[3]))

    def lay_out(self, a: Sequence[int], b: Sequence[int]) -> tuple[list[int], list[int]]:
        """Ids and types of two texts."""
        ids: list[int] = []
        types: list[int] = []
        for what, kind in self.pair:
            row = [what] if isinstance(what, int) else a if what == "a" else b
            ids += row
            types += [kind] * len(row)
        return ids, types


NOTHING: Final = Around()


def around_of(backend: Any) -> Around:
    """Read the rule off what the library's post-processor does to a word, and to two."""
    with rust_errors("is not understood", field="/post_processor"):
        for word in ("a", "1", "あ", *sorted(backend.get_vocab(with_added_tokens=False))[:8]):
            if backend.encode(word, add_special_tokens=False).ids:
                one = _steps(backend.encode(word))
                two = _steps(backend.encode(word, word))
                break
        else:
            return NOTHING
    places = [what for what, _ in one]
    if places.count("a") != 1:
        return NOTHING
    at = places.index("a")
    before = tuple(index for index, _ in one[:at] if isinstance(index, int))
    after = tuple(index for index, _ in one[at + 1 :] if isinstance(index, int))
    return Around(before, after, two)


def _steps(encoding: Any) -> tuple[Step, ...]:
    """The layout of an encoding: each text as one step, each token around them as one."""
    rows = zip(encoding.ids, encoding.type_ids, encoding.sequence_ids, strict=True)
    steps: list[Step] = []
    for text, group in groupby(rows, lambda row: row[2]):
        tokens = list(group)
        if text is None:
            steps += [(index, kind) for index, kind, _ in tokens]
        else:
            steps.append(("b" if text else "a", tokens[0][1]))
    return tuple(steps)


def template(one: Sequence[int | str], two: Sequence[Step], names: dict[int, str]) -> dict[str, Any]:
    """The rule as tokenizer.json's TemplateProcessing.

    Args:
        one: ids around ``"a"``.
        two: the layout of two texts.
        names: the token of each id.
    """

    def said(steps: Sequence[Step]) -> list[dict[str, Any]]:
        return [
            {"Sequence": {"id": what.upper(), "type_id": kind}}
            if isinstance(what, str)
            else {"SpecialToken": {"id": names[what], "type_id": kind}}
            for what, kind in steps
        ]

    single: list[Step] = [(what, 0) for what in one]
    used = {what for what, _ in (*single, *two) if isinstance(what, int)}
    table = {names[index]: {"id": names[index], "ids": [index], "tokens": [names[index]]} for index in sorted(used)}
    return {"type": "TemplateProcessing", "single": said(single), "pair": said(two), "special_tokens": table}
