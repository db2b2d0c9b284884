"""Labels for texts, and for parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cutaway.errors import RequestError
from cutaway.models import Transformer
from cutaway.spec import ClassifierSpec
from cutaway.tasks.batch import Encoded, passes
from cutaway.tokenizers.tokenizer import Tokenizer

OUTSIDE = "O"


@dataclass(frozen=True, slots=True)
class Label:
    """A label and how far the model believes it.

    Attributes:
        label: its name.
        score: a probability; of a regression the number itself.
    """

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a text with a label.

    Attributes:
        label: its name, without a leading ``B-`` or ``I-``.
        score: the mean probability of its tokens' labels.
        start, end: characters of the text, ``text[start:end]``.
        text: those characters.
    """

    label: str
    score: float
    start: int
    end: int
    text: str


def classify(model: Transformer, tokenizer: Tokenizer, texts: Sequence[str | tuple[str, str]]) -> list[list[Label]]:
    """Every label of each text, the likeliest first. A pair of texts is read as the tokenizer joins pairs.

    Raises:
        RequestError: the model does not label whole texts.
    """
    spec = _spec(model, whole=True)
    rows = [
        Encoded(*tokenizer.encode_pair(*text)) if isinstance(text, tuple) else Encoded(tokenizer.encode(text))
        for text in texts
    ]
    out: list[list[Label]] = [[] for _ in rows]
    for some in passes(model, rows):
        scores = _probabilities(spec, model.answer(some.hidden, some.positions))
        for row, values in zip(some.rows, scores.tolist(), strict=True):
            found = [Label(label, value) for label, value in zip(spec.labels, values, strict=True)]
            out[row] = sorted(found, key=lambda label: -label.score)
    return out


def tag(model: Transformer, tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[Span]]:
    """The labelled parts of each text, in order. What is labelled ``O`` is left out.

    Neighbouring tokens of one label are one part, unless the second begins a new one (``B-``).

    Raises:
        RequestError: the model does not label tokens.
    """
    spec = _spec(model, whole=False)
    encoded = [tokenizer.encode_with_spans(text) for text in texts]
    out: list[list[Span]] = [[] for _ in texts]
    for some in passes(model, [Encoded(ids) for ids, _ in encoded]):
        scores = model.answer(some.hidden, some.positions).float().softmax(-1).cpu()  # a token has one label
        for row, table in zip(some.rows, scores, strict=True):
            spans = encoded[row][1]
            best = table[: len(spans)].max(-1)
            out[row] = _joined(texts[row], spans, [spec.labels[i] for i in best.indices], best.values.tolist())
    return out


def _spec(model: Transformer, whole: bool) -> ClassifierSpec:
    head = model.spec.head
    if not isinstance(head, ClassifierSpec) or (head.pooler is not None) is not whole:
        what = "this model does not label texts" if whole else "this model does not label tokens"
        got = (
            "no classifier"
            if not isinstance(head, ClassifierSpec)
            else "labels for " + ("tokens" if whole else "texts")
        )
        raise RequestError(what, field="head", got=got, hint="tag labels tokens, classify whole texts.")
    return head


def _probabilities(spec: ClassifierSpec, logits: Tensor) -> Tensor:
    if spec.kind == "regression":
        return logits.float()
    return logits.float().sigmoid() if spec.kind == "multi" else logits.float().softmax(-1)


def _joined(
    text: str, spans: Sequence[tuple[int, int] | None], labels: Sequence[str], scores: Sequence[float]
) -> list[Span]:
    found: list[tuple[str, list[float], int, int]] = []
    before: str | None = None  # the kind of the token just before, if it had one
    for span, label, score in zip(spans, labels, scores, strict=True):
        if span is None or label == OUTSIDE or span[0] == span[1]:
            before = before if span is not None and span[0] == span[1] else None
            continue
        begins, kind = label.startswith("B-"), label[2:] if label[:2] in ("B-", "I-") else label
        if before == kind and not begins:
            name, values, start, _ = found[-1]
            found[-1] = (name, [*values, score], start, span[1])
        else:
            found.append((kind, [score], *span))
        before = kind
    return [Span(kind, sum(values) / len(values), start, end, text[start:end]) for kind, values, start, end in found]
