"""How far heads hand on what they read: the eigenvalues of their OV circuits."""

from __future__ import annotations

import torch
from torch import Tensor

from cutaway.inspection.ablation import heads_of
from cutaway.inspection.circuit import ALONE, embedded, evened, head_of, output_columns, value_rows
from cutaway.inspection.heads import Heads
from cutaway.inspection.readout import blocks, check_whole_sum, rows_of, table_of
from cutaway.inspection.steps import Progress, counted
from cutaway.models import Transformer
from cutaway.modules.block import Branch
from cutaway.modules.norm import Norm


@torch.no_grad()
def copying_scores(model: Transformer, *, progress: Progress | bool | None = None) -> Heads:
    """How far each head writes the token that it reads: Σ λ / Σ |λ| over the eigenvalues of its OV circuit.

    1: it raises what it reads, and only that; −1: it lowers it (Elhage et al. 2021). The circuit is that of
    :func:`head_writes` from every token to every token, whose rank is no more than a head's width.

    Args:
        model: whose input and output tables are of one vocabulary.
        progress: called with how many heads are done and how many there are; True for a line.

    Raises:
        RequestError: a stream that is no sum, or a head of the model with a curve.
    """
    check_whole_sum(model)
    layers = {at: n for at, n in heads_of(model).items() if at.endswith(".attn")}
    out = torch.full((len(layers), max(layers.values(), default=0)), float("nan"))
    sums: dict[tuple[str, float] | None, Tensor] = {}
    every, done = sum(layers.values()), 0
    with counted(progress, every, "heads") as report:
        for i, (name, n) in enumerate(layers.items()):
            at, body, _ = head_of(model, name, 0)
            norm = at.pre_norm.spec if isinstance(at.pre_norm, Norm) else None
            key = None if norm is None else (norm.kind, norm.eps)
            if key not in sums:
                sums[key] = _matched(model, at)
            weight = at.pre_norm.weight.float() + at.pre_norm.spec.offset if isinstance(at.pre_norm, Norm) else 1.0
            for head in range(n):
                # Both ways round a product has the same eigenvalues but for zeros: this one is as small as a head.
                small = value_rows(at, body, head) @ ((sums[key] * weight).t() @ output_columns(model, at, body, head))
                values = torch.linalg.eigvals(small.double())
                out[i, head] = float(values.real.sum() / values.abs().sum().clamp(min=1e-30))
                done += 1
                report(done, every)
    notes = (ALONE, "Norms' weights are folded, their scales held; biases and a clip of values are left out.")
    return Heads(tuple(layers), {"copying": out}, notes)


def _matched(model: Transformer, at: Branch) -> Tensor:
    """Σ over tokens of what the head would score it by ⊗ what it becomes when read. [d_model, d_model]"""
    total = torch.zeros(model.spec.d_model, model.spec.d_model, device=model.device)
    scored_by, table = table_of(model, "output"), model.embed.table
    for block in blocks(table.shape[0], model.spec.d_model):
        x = embedded(model, f"{model.spec.main}.", block)
        total += rows_of(scored_by, block).t() @ evened(at, x, weighted=False)
    return total * (model.spec.lm.scale)
