"""What an answer loses without each token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cutaway.generation.checks import whole
from cutaway.inspection.attribution import Attribution
from cutaway.inspection.gradients import result
from cutaway.inspection.probe import Baseline, Measure, Probe
from cutaway.inspection.steps import Progress, counted
from cutaway.inspection.target import Of
from cutaway.models import Transformer


@torch.no_grad()
def occlusion(
    model: Transformer,
    ids: Sequence[int],
    of: Of | Measure,
    *,
    baseline: Baseline = None,
    window: int = 1,
    position: int | None = None,
    source: Sequence[int] | None = None,
    types: Sequence[int] | None = None,
    batch: int = 32,
    pieces: Sequence[str] | None = None,
    source_pieces: Sequence[str] | None = None,
    progress: Progress | bool | None = None,
) -> Attribution:
    """The answer, less that with a token's vector replaced (Zeiler & Fergus 2014), for each token.

    Args:
        model, ids, of, position, source, types, pieces, source_pieces: as for :func:`saliency`; no gradient is needed.
        baseline: what is put in a token's place: zeros, another token, or a vector.
        window: neighbours that are replaced together; a token's value is the mean over the windows that it is in.
        batch: texts that are run at once.
        progress: called with how many texts are done and how many there are; True for a line.

    Raises:
        RequestError: a target that this model does not have, or a window wider than a text.
    """
    whole("batch", batch, 1)
    probe = Probe(model, ids, of, position, source, types)
    whole("window", window, 1, min(vectors.shape[1] for vectors in probe.vectors.values()))
    start = probe.baseline(baseline)
    value = float(probe(probe.vectors))
    jobs = [(name, i) for name, each in probe.vectors.items() for i in range(each.shape[1] - window + 1)]
    lost = {name: torch.zeros(each.shape[1], dtype=torch.float64) for name, each in probe.vectors.items()}
    times = {name: torch.zeros_like(each) for name, each in lost.items()}
    with counted(progress, len(jobs), "texts") as report:
        for i in range(0, len(jobs), batch):
            some = jobs[i : i + batch]
            rows = {name: each.repeat(len(some), 1, 1) for name, each in probe.vectors.items()}
            for row, (name, at) in enumerate(some):
                rows[name][row, at : at + window] = start[name][0, at : at + window]
            for (name, at), found in zip(some, probe(rows).tolist(), strict=True):
                lost[name][at : at + window] += value - found
                times[name][at : at + window] += 1
            report(min(i + batch, len(jobs)), len(jobs))
    values = {name: (each / times[name]).float() for name, each in lost.items()}
    notes = (
        "Each value is the model's own: what the answer loses when the token's vector is replaced, its position kept.",
        "What the model makes of such a text may be unlike anything that it was trained on.",
    )
    return result(probe, "occlusion", value, values, None, (pieces, source_pieces), notes=notes)
