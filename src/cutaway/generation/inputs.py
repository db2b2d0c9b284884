"""What people give a model to read: ids in many wrappings, prompts, texts; each as plain lists, or a typed error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.checks import check_ids


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
        raise RequestError("no ids", field=field, expected="a list of ints, or a list of such lists", got=values)
    rows = [plain(value) for value in values]
    nested = [isinstance(row, (list, tuple)) for row in rows]
    if not any(nested):
        return [check_ids(rows, vocab_size, field)]
    if not all(nested):
        raise RequestError("ids and lists of ids are mixed", field=field, expected="one or the other")
    return [check_ids(row, vocab_size, f"{field}/{i}") for i, row in enumerate(rows)]


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
