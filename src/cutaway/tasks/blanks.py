"""Words for a text's blanks, from a model that was trained to find masked ones (Devlin et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from cutaway.errors import RequestError
from cutaway.generation.checks import whole
from cutaway.models import Transformer
from cutaway.spec import HeadSpec
from cutaway.tasks.batch import Encoded, passes
from cutaway.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token for a blank.

    Attributes:
        token: its id.
        text: what it looks like.
        score: its probability.
    """

    token: int
    text: str
    score: float


def fill(model: Transformer, tokenizer: Tokenizer, text: str, top: int = 5) -> list[list[Candidate]]:
    """The likeliest tokens for each blank of a text, the best first: a list for each blank, each seen with the others.

    Args:
        model: with a head that scores tokens, and reading both ways.
        tokenizer: its mask token, as a person types it, is the blank.
        text: with at least one blank.
        top: candidates for each.

    Raises:
        RequestError: the model is no such model, or there is no blank.
    """
    whole("top", top, 1)
    if model.spec.main != "encoder" or not isinstance(model.spec.head, HeadSpec):
        raise RequestError("this model does not fill blanks", field="head", hint="It takes a masked language model.")
    if tokenizer.mask_id is None:
        raise RequestError("the tokenizer has no mask token", field="text")
    ids = tokenizer.encode_masked(text)
    places = [i for i, token in enumerate(ids) if token == tokenizer.mask_id]
    if not places:
        raise RequestError(
            "there is no blank",
            field="text",
            expected=f"{tokenizer.names.get('mask_token', '[MASK]')} somewhere in it",
            got=text,
        )
    (only,) = passes(model, [Encoded(ids)])
    probabilities = model.unembed(only.hidden[:, places])[0].float().softmax(-1)
    best = probabilities.topk(min(top, probabilities.shape[-1]))
    return [
        [
            Candidate(token, tokenizer.decode([token], skip_special=False).strip(), score)
            for token, score in zip(tokens, scores, strict=True)
        ]
        for tokens, scores in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
