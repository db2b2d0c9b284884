"""What an answer's slope says of each token: saliency, and integrated gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cutaway.generation.checks import whole
from cutaway.inspection.attribution import Attribution
from cutaway.inspection.probe import OTHER, OWN, Baseline, Measure, Probe
from cutaway.inspection.reading import named
from cutaway.inspection.steps import Progress, counted
from cutaway.inspection.target import Of
from cutaway.models import Transformer
from cutaway.spec import MoeSpec

TRUSTED = 0.1  # of the difference to the baseline: with more left over than that, values are not to be relied on
LOCAL = "A slope says what an answer would do for the smallest change, and not for one that a reader would notice."


def saliency(
    model: Transformer,
    ids: Sequence[int],
    of: Of | Measure,
    *,
    times_input: bool = False,
    position: int | None = None,
    source: Sequence[int] | None = None,
    types: Sequence[int] | None = None,
    pieces: Sequence[str] | None = None,
    source_pieces: Sequence[str] | None = None,
) -> Attribution:
    """The gradient with respect to each token's vector (Simonyan et al. 2014): its length, for each token.

    Args:
        model: in evaluation mode. Weights in the form that a file stores them in will do.
        ids: of one text; of an encoder–decoder, the decoder's.
        of: a token's logit, the difference of two, a log-probability (:func:`logprob`), a label's score; or a function
            of all that the model answers ([1, query, vocab], [1, label] …), giving one number. [1]
        times_input: the gradient times the vector, summed over channels, instead (Shrikumar et al. 2016).
        position: where the target is; None for the last token, or for what a classifier's pooler reads.
        source: of an encoder–decoder, what its encoder reads; its tokens get values too.
        types: each token's type, where the model has types.
        pieces, source_pieces: a text for each token, for labels.

    Raises:
        RequestError: a target that this model does not have, or a function without a gradient.
    """
    probe = Probe(model, ids, of, position, source, types)
    found, slopes = probe.gradient(probe.vectors)
    if times_input:
        channels = {name: (slope * probe.vectors[name])[0].float() for name, slope in slopes.items()}
        values = {name: each.sum(-1) for name, each in channels.items()}
    else:
        channels = {name: slope[0].float() for name, slope in slopes.items()}
        values = {name: each.norm(dim=-1) for name, each in channels.items()}
    method = "gradient × input" if times_input else "gradient"
    return result(probe, method, float(found), values, channels, (pieces, source_pieces), notes=(LOCAL,))


def integrated_gradients(
    model: Transformer,
    ids: Sequence[int],
    of: Of | Measure,
    *,
    baseline: Baseline = None,
    steps: int = 50,
    position: int | None = None,
    source: Sequence[int] | None = None,
    types: Sequence[int] | None = None,
    batch: int = 16,
    pieces: Sequence[str] | None = None,
    source_pieces: Sequence[str] | None = None,
    progress: Progress | bool | None = None,
) -> Attribution:
    """Gradients along the straight way from a baseline, times the way (Sundararajan et al. 2017).

    The values add up to the answer less that at the baseline, but for ``gap``: what so few steps do not see.

    Args:
        model, ids, of, position, source, types, pieces, source_pieces: as for :func:`saliency`.
        baseline: zeros, a token in every place (such as padding), or a vector. Of an encoder–decoder, of both texts.
            A norm makes long vectors of the shortest ones: near zeros, an answer may turn within the first step.
        steps: places along the way, by Gauss–Legendre.
        batch: how many of them are run at once.
        progress: called with how many steps are done and how many there are; True for a line.

    Raises:
        RequestError: as saliency, or a baseline of another shape.
    """
    whole("steps", steps, 1, 10_000)
    whole("batch", batch, 1)
    probe = Probe(model, ids, of, position, source, types)
    start = probe.baseline(baseline)
    way = {name: vectors - start[name] for name, vectors in probe.vectors.items()}
    points, shares = np.polynomial.legendre.leggauss(steps)
    total = {name: torch.zeros(each.shape, dtype=torch.float64) for name, each in way.items()}
    with counted(progress, steps, "steps") as report:
        for i in range(0, steps, batch):
            some = torch.from_numpy((points[i : i + batch] + 1) / 2)
            weights = torch.from_numpy(shares[i : i + batch] / 2)
            along = {name: start[name] + some.to(each)[:, None, None] * each for name, each in way.items()}
            _, slopes = probe.gradient(along)
            for name, slope in slopes.items():
                total[name] += (slope.cpu().double() * weights[:, None, None]).sum(0, keepdim=True)
            report(min(i + batch, steps), steps)
    with torch.no_grad():
        found, least = float(probe(probe.vectors)), float(probe(start))
    channels = {name: (each * way[name].cpu().double())[0].float() for name, each in total.items()}
    values = {name: each.double().sum(-1).float() for name, each in channels.items()}
    gap = sum(float(each.double().sum()) for each in values.values()) - (found - least)
    notes = [
        f"The values add up to the answer ({found:.4g}) less that at the baseline ({least:.4g}), but for {gap:.2g}: "
        f"{steps} steps. More steps make that smaller"
        + (", but not what is lost where a router changes its mind on the way." if _routed(model) else "."),
        "Another baseline gives other values: none of them is the model's own.",
    ]
    if abs(gap) > TRUSTED * abs(found - least):
        notes.insert(0, "What is left over is large: on the way the answer turns too often for so few steps.")
    names = (pieces, source_pieces)
    return result(probe, "integrated gradients", found, values, channels, names, least, gap, tuple(notes))


def result(
    probe: Probe,
    method: str,
    value: float,
    values: dict[str, Tensor],
    channels: dict[str, Tensor] | None,
    pieces: tuple[Sequence[str] | None, Sequence[str] | None],
    baseline: float | None = None,
    gap: float | None = None,
    notes: tuple[str, ...] = (),
) -> Attribution:
    """Values by the name of what was changed, as an attribution."""
    both = channels or {}
    return Attribution(
        method=method,
        what=probe.question.what,
        value=value,
        values=values[OWN].cpu(),
        pieces=named(pieces[0], probe.text.ids, "pieces"),
        channels=_cpu(both.get(OWN)),
        source_values=_cpu(values.get(OTHER)),
        source_pieces=named(pieces[1], probe.text.source or (), "source_pieces"),
        source_channels=_cpu(both.get(OTHER)),
        baseline=baseline,
        gap=gap,
        notes=notes,
    )


def _routed(model: Transformer) -> bool:
    layers = [layer for stack in model.spec.stacks.values() for layer in stack.layers]
    return any(isinstance(branch.body, MoeSpec) for layer in layers for branch in layer.branches)


def _cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()
