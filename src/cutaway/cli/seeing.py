"""What verbs that look inside share: the model and the text, and a result on its way out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol

import click

from cutaway.cli.common import Settings, load_model, text_argument
from cutaway.cli.options import F, shared
from cutaway.errors import RequestError

if TYPE_CHECKING:
    from cutaway.inspection.figure import Figure
    from cutaway.model import Model


class Result(Protocol):
    """What can be drawn, and written as JSON."""

    def figure(self) -> Figure:
        """As a picture."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """As plain lists and numbers."""
        ...


answer = click.option("--target", metavar="TEXT2", help="Of an encoder-decoder: what its decoder has written so far.")
_PLACE = re.compile(r"(?:(encoder|decoder)\.)?L([0-9]{1,4})(?:\.H([0-9]{1,4})|\.([a-z_.]+))?")


def at_token(function: F) -> F:
    """The option that says at which token."""
    says = "At which token; from 0, or from the end: -1. [the last, or the only blank]"
    return click.option("--token", "position", type=int, metavar="N", help=says)(function)


def looks(function: F) -> F:
    """What every verb takes that looks into a text's run, after its own: ``--target``, and options that all share."""
    return click.argument("prompt", required=False)(answer(shared("model", "load", "output")(function)))


def asks(function: F) -> F:
    """The same, of verbs that explain a score: ``--of`` and ``--contrast`` say which, and ``--token`` where."""
    contrast = click.option("--contrast", metavar="WORD2", help="The score's difference from this word's.")
    of = click.option("--of", "word", metavar="WORD", help="Whose score: a word, or a label. [what the model says]")
    return of(contrast(at_token(looks(function))))


def asked_of(word: str | None, contrast: str | None) -> Any:
    """What ``--of`` and ``--contrast`` mean to the library."""
    return word if contrast is None else (word, contrast)


def opened(settings: Settings, text: str | None, verb: str) -> tuple[Model, str]:
    """The model, and the text."""
    found = text_argument(text, missing=f'No prompt. Try: cutaway {verb} "The Eiffel Tower is in"')
    return load_model(settings), found


def emit_result(settings: Settings, result: Result, **facts: Any) -> None:
    """A result: as JSON, as a page where --out ends in .html, or drawn."""
    if settings.json or settings.jsonl:
        settings.emit_json({"model": settings.model, **facts, **result.as_dict()})
        return
    emit_figure(settings, result.figure())


def emit_figure(settings: Settings, figure: Figure) -> None:
    """A figure: drawn, or as a page where --out ends in .html."""
    if settings.to_file and str(settings.out).lower().endswith((".html", ".htm")):
        from cutaway.inspection.drawn.page import document

        settings.emit(document(figure))
        return
    from cutaway.inspection.drawn.terminal import text_of

    settings.emit(text_of(figure, settings.look))


def branch_of(model: Model, layer: int | None, branch: str | None) -> str:
    """The branch that --layer and --branch say.

    Raises:
        RequestError: neither says which.
    """
    main = model.spec.main
    if branch is not None and "." in branch:
        return branch
    if layer is None:
        hint = f"give --layer N, or --branch {main}.layers.0.attn"
        raise RequestError("which layer?", field="--layer", hint=hint)
    return f"{main}.layers.{layer}.{branch or 'attn'}"


def place_of(model: Model, text: str) -> tuple[str, int | None]:
    """The quantity that ``L3.H5``, ``L7.mlp``, ``L7`` or a whole name stands for, and which head.

    >>> place_of(None, "decoder.layers.3.mlp.out")
    ('decoder.layers.3.mlp.out', None)
    """
    found = _PLACE.fullmatch(text)
    if found is None:
        return text, None
    at = f"{found[1] or model.spec.main}.layers.{found[2]}"
    if found[3] is not None:
        return f"{at}.attn.z", int(found[3])
    inner = found[4] or "*"
    return f"{at}.{inner if '.' in inner else f'{inner}.out'}", None


def last_of(model: Model, text: str) -> int:
    """The token that is looked at where nobody says: the last, or the only blank."""
    tokenizer = model.tokenizer
    if model.spec.generates or tokenizer is None or tokenizer.mask_id is None:
        return -1
    ids = tokenizer.encode_masked(text)
    return ids.index(tokenizer.mask_id) if tokenizer.mask_id in ids else -1
