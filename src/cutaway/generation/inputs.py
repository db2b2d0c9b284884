"""What people give a model to read: ids in many wrappings, prompts, texts; each as plain lists, or a typed error."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.checks import check_ids, tokens


def plain(ids: Any) -> Any:
    """Lists for tensors and arrays."""
    return ids.tolist() if isinstance(ids, (Tensor, np.ndarray)) else ids


def is_list(prompt: Any) -> bool:
    """Whether this is a list of prompts rather than one."""
    items = plain(prompt)
    return isinstance(items, (list, tuple)) and bool(items) and isinstance(plain(items[0]), (str, list, tuple))


def rows_of(ids: Any, field: str, vocab_size: int) -> list[list[int]]:
    """Ids of one text or of several, as rows.

    Raises:
        RequestError: no ids, ids and lists of ids mixed, or one outside the vocabulary.
    """
    values = plain(ids)
    if not isinstance(values, (list, tuple)):
        hint = f"model.tokenizer.encode(text) makes {field} of a text." if isinstance(values, str) else None
        wanted = "a list of ints, or a list of such lists"
        raise RequestError("no ids", field=field, expected=wanted, got=values, hint=hint)
    rows = [plain(value) for value in values]
    nested = [isinstance(row, (list, tuple)) for row in rows]
    if not any(nested):
        return [check_ids(rows, vocab_size, field)]
    if not all(nested):
        raise RequestError("ids and lists of ids are mixed", field=field, expected="one or the other")
    return [check_ids(row, vocab_size, f"{field}/{i}") for i, row in enumerate(rows)]


def each_row(rows: Any, n: int, vocab_size: int) -> list[list[int]]:
    """Ids for each of so many rows, for some perhaps none.

    Raises:
        RequestError: not so many lists, or an id outside the vocabulary.
    """
    values = plain(rows)
    found = [plain(row) for row in values] if isinstance(values, (list, tuple)) else []
    if len(found) != n or not all(isinstance(row, (list, tuple)) for row in found):
        raise RequestError("not a text for each row", field="rows", expected=f"{n} lists of token ids", got=values)
    return [tokens(f"rows/{i}", [*row], vocab_size) for i, row in enumerate(found)]


def places_of(values: Any, name: str, ends: int | Sequence[int], what: str) -> list[int]:
    """Whole numbers, each from 0 to its end.

    Args:
        values: as many as there are ends.
        name: what an error calls them.
        ends: the largest that each may be; one number for any number of them.
        what: what one that is larger would be.

    Raises:
        RequestError: there is another number of them, or one is none.
    """
    found = plain(values)
    if not isinstance(found, (list, tuple, range)):
        raise RequestError("not a list", field=name, expected="whole numbers", got=found)
    each = [ends] * len(found) if isinstance(ends, int) else ends
    if len(found) != len(each):
        raise RequestError("not one for each row", field=name, expected=f"{len(each)} numbers", got=found)
    for value, end in zip(found, each, strict=True):
        if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= value <= end:  # type: ignore[operator]
            raise RequestError(what, field=name, expected=f"0…{end}", got=value)
    return [int(value) for value in found]


def shared(one: Sequence[int], two: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def texts_of(texts: Any) -> list[str]:
    """One text or several, as a list.

    Raises:
        RequestError: anything else.
    """
    found: Any = [texts] if isinstance(texts, str) else texts
    if not isinstance(found, (list, tuple)):
        raise RequestError("not texts", field="texts", expected="a text, or a list of texts", got=texts)
    for i, text in enumerate(found):
        if not isinstance(text, str):
            raise RequestError("not a text", field=f"texts/{i}", expected="a text", got=text)
    return list(found)


def texts_or_pairs_of(texts: Any) -> Sequence[str | tuple[str, str]]:
    """The same where a text may be a pair: a tuple of two.

    Raises:
        RequestError: anything else.
    """
    found: Any = [texts] if isinstance(texts, (str, tuple)) else texts
    if not isinstance(found, list):
        raise RequestError("not texts", field="texts", expected="a text, a pair, or a list of them", got=texts)
    for i, text in enumerate(found):
        if not (isinstance(text, str) or (isinstance(text, tuple) and [type(part) for part in text] == [str, str])):
            raise RequestError("not a text", field=f"texts/{i}", expected="a text, or a pair of texts", got=text)
    return found
