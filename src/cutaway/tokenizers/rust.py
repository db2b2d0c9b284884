"""The one border to the `tokenizers` library, where its panics and its errors become ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any, TypeAlias

import tokenizers
from cutaway.errors import CutawayError, TokenizerError

__all__ = ["Component", "component", "components", "rust_errors", "vocabulary_size"]

Component: TypeAlias = "dict[str, Any] | None"  # one JSON object of tokenizer.json, such as its normalizer


@contextmanager
def rust_errors(what: str, *, path: str | PathLike[str] | None = None, field: str | None = None) -> Iterator[None]:
    """Raise `TokenizerError` for whatever the library throws, its panics included.

    A panic is a BaseException of a class that cannot be imported, hence the look at its name.
    """
    try:
        yield
    except CutawayError:
        raise
    except Exception as error:
        raise TokenizerError(what, path=path, field=field, got=str(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(what, path=path, field=field, got=f"panic: {error}") from None


def components(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """The JSON of everything around the model: normalizer, pre_tokenizer, post_processor, decoder."""
    shell = tokenizers.Tokenizer(tokenizers.models.BPE())
    shell.normalizer = backend.normalizer
    shell.pre_tokenizer = backend.pre_tokenizer
    shell.post_processor = backend.post_processor
    shell.decoder = backend.decoder
    tree: dict[str, Any] = json.loads(shell.to_str())
    return tree


def component(kind: str, tree: Component) -> Any:
    """The library's object for the JSON ``tree`` of one ``kind``, such as ``"normalizer"``. Wants `rust_errors`."""
    model = {"type": "BPE", "vocab": {}, "merges": []}
    shell: dict[str, Any] = {"version": "1.0", "added_tokens": [], "model": model, kind: tree}
    return getattr(tokenizers.Tokenizer.from_str(json.dumps(shell)), kind)


def vocabulary_size(backend: tokenizers.Tokenizer, below: float) -> int:
    """One beyond the greatest id that is below a bound. All tokens are asked for, which takes a while."""
    known = (index for index in backend.get_vocab(with_added_tokens=True).values() if index < below)
    return max(known, default=-1) + 1
