"""What kind of model this is, and the verb for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutaway.cli.common import Settings, as_input
from cutaway.errors import RequestError

if TYPE_CHECKING:
    from cutaway.model import Model
    from cutaway.spec import ModelSpec

_WRITES = "a decoder, or an encoder-decoder"
# verb → what a model lacks that cannot do it, and what kind of model can
_LACKS = {
    "run": ("this model writes no text", _WRITES),
    "chat": ("this model writes no text", _WRITES),
    "next": ("this model does not say what comes next", _WRITES),
    "score": ("this model does not say what comes next", _WRITES),
    "classify": ("this model does not label texts", "a classifier of texts"),
    "tag": ("this model does not label the parts of texts", "a classifier of tokens"),
    "fill": ("this model does not fill blanks", "a masked language model"),
}


def check_able(settings: Settings, model: Model, verb: str) -> None:
    """Refuse a model that cannot do what a verb wants of it, and name the verb that it is for.

    Every model has vectors to ``embed`` with.

    Raises:
        RequestError: it is of another kind, or has no tokenizer.
    """
    kind, verbs = kind_of(model.spec)
    with as_input():
        if verb not in (*verbs, "embed"):
            what, expected = _LACKS[verb]
            hint = f"this is {kind}: use `cutaway {verbs[0]}`"
            raise RequestError(what, path=settings.model, expected=expected, hint=hint)
        if model.tokenizer is None:
            raise RequestError(
                "this model came without a tokenizer",
                path=settings.model,
                hint="put its tokenizer.json, or what it has instead, beside its weights",
            )


def kind_of(spec: ModelSpec) -> tuple[str, tuple[str, ...]]:
    """What a model is, in words, and the verbs that it can do, the most fitting first."""
    from cutaway.spec import ClassifierSpec, HeadSpec

    if spec.generates:
        is_one = "a decoder" if spec.source is None else "an encoder-decoder"
        return is_one, ("run", "next", "chat", "score")
    match spec.head:
        case HeadSpec():
            return "a masked language model", ("fill",)
        case ClassifierSpec(pooler=None):
            return "a classifier of tokens", ("tag",)
        case ClassifierSpec():
            return "a classifier", ("classify",)
        case _:
            return "a model without a head", ("embed",)
