"""A number read off the stream as a linear function of it, norms on the way with their scales held."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.errors import RequestError
from cutaway.inspection.target import Target
from cutaway.models import Transformer
from cutaway.models.head import Classifier, Head
from cutaway.modules.norm import Norm
from cutaway.spec import ClassifierSpec, HeadSpec

INSTEAD = "saliency, integrated_gradients, occlusion and attribution_patching explain any model's answer."


def through(norm: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, float | None]:
    """``norm(x) · g`` as a function of x, with the norm's scale held at what it is for this x.

    Centring is its own transpose, so it can be done to g instead of to each part of x.

    Args:
        norm: a norm, or nothing in its place.
        x: what it read. float64 [d_model]
        g: what reads its output. float64 [d_model]

    Returns:
        What x is multiplied with, and what the norm's bias comes to, if it has one.
    """
    if not isinstance(norm, Norm):
        return g, None
    spec = norm.spec
    centred = x - x.mean() if spec.kind == "layer" else x
    scale = torch.rsqrt(centred.square().mean() + spec.eps)
    inner = (norm.weight.cpu().double() + spec.offset) * g * scale
    shift = None if norm.bias is None else float(norm.bias.cpu().double() @ g)
    return (inner - inner.mean() if spec.kind == "layer" else inner), shift


def rows_of_head(model: Transformer, target: Target) -> tuple[Tensor, Tensor | None, float]:
    """The head's rows that a target is made of, as they are: their matrix, bias and the head's scale.

    Raises:
        RequestError: the target is no linear function of what the head reads.
    """
    head = model.head
    if target.kind == "logprob":
        what = "a log-probability is no sum of parts: it depends on every logit"
        raise RequestError(what, field="of", got=target.kind, hint="Take a logit or a difference of two. " + INSTEAD)
    spec = model.spec.head
    assert isinstance(spec, HeadSpec | ClassifierSpec)
    pooler = spec.pooler if isinstance(spec, ClassifierSpec) else None
    if (spec if pooler is None else pooler).transform is not None:
        what = "between the stream and the scores is a curve (head.transform), through which no sum passes"
        hint = "A direction (a tensor) may be explained up to there. " + INSTEAD
        raise RequestError(what, field="of", got=target.kind, hint=hint)
    if pooler is not None and pooler.pool == "mean":
        what = "the score is of the mean of all positions, and a decomposition is of one"
        raise RequestError(what, field="of", got="mean pooling", hint=INSTEAD)
    ids = torch.tensor(target.ids)
    weight: Tensor
    bias: Tensor | None
    if isinstance(head, Classifier):
        weight, bias, scale = head.out.weight, head.out.bias, 1.0
    else:
        assert isinstance(head, Head)
        weight = model.embed.table if head.weight is None else head.weight
        bias, scale = head.bias, head.spec.scale
    rows = F.embedding(ids.to(weight.device), weight)
    return rows.cpu(), None if bias is None else bias[ids.to(bias.device)].cpu(), scale


def signed(values: Tensor) -> Tensor:
    """The one, or the first less the second. [1 or 2, …] → [...]"""
    return values[0] if len(values) == 1 else values[0] - values[1]


def pre_cap(model: Transformer, target: Target, y: Tensor) -> float:
    """What the model itself makes of the norm's output, before any cap, in the model's own precision. [d_model]"""
    rows, bias, scale = rows_of_head(model, target)
    if isinstance(model.head, Head) and model.head.spec.soft_cap is None:
        scores = model.unembed(y[None, None])[0, 0, list(target.ids)]
    else:
        scores = F.linear(y.cpu(), rows, bias) * scale
    return float(signed(scores.double()))
