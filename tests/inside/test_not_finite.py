"""Looking into a model whose numbers are broken: every result still draws, and is JSON that every reader takes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cutaway import edits, inspection
from cutaway.inside import Inside
from cutaway.inspection.shown import UNSAID
from cutaway.model import Model
from tests.reference import tiny

CLEAN, CORRUPT = [5, 9, 17, 7, 30], [5, 9, 33, 7, 30]
BROKEN = 21

ASKED: dict[str, Callable[[Inside], Any]] = {
    "lens": lambda see: see.lens(CLEAN, follow=BROKEN),
    "decompose": lambda see: see.decompose(CLEAN, BROKEN, neurons=["*"], sources=["*"]),
    "neurons": lambda see: see.neurons(CLEAN, BROKEN),
    "neurons by size": lambda see: see.neurons(CLEAN, by_size=True),
    "saliency": lambda see: see.saliency(CLEAN, BROKEN),
    "integrated gradients": lambda see: see.integrated_gradients(CLEAN, BROKEN, steps=2),
    "occlusion": lambda see: see.occlusion(CLEAN, BROKEN),
    "attribution patching": lambda see: see.attribution_patching(CLEAN, CORRUPT, ["*.attn.z"], BROKEN),
    "patch": lambda see: see.patch_sweep(
        CLEAN, CORRUPT, metric=lambda scores: scores[..., BROKEN] - scores[..., 3].log()
    ),
    "paths": lambda see: see.path_sweep(CLEAN, CORRUPT, metric=lambda scores: scores[..., BROKEN]),
    "ablation": lambda see: see.ablation_sweep([CLEAN]),
    "heads": lambda see: see.head_scores([CLEAN]),
    "copying": lambda see: see.copying_scores(),
    "attention": lambda see: see.attention(CLEAN, 1),
    "looks for": lambda see: see.head_looks_for(1, 0, [BROKEN, 5]),
    "writes": lambda see: see.head_writes(1, 0, [BROKEN, 5]),
    "neighbours": lambda see: see.neighbours(5, table="output"),
    "trace": lambda see: see.trace(CLEAN, "logits"),
    "effect": lambda see: see.effect(CLEAN, {"*.attn.z": edits.zero(heads=0)}),
    "compare": lambda see: inspection.compare(tiny.transformer("llama"), see._model, CLEAN),
}


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("what", ASKED)
def test_it_is_drawn_and_written(what: str, number: float) -> None:
    model = Model(tiny.transformer("llama"))
    with torch.no_grad():
        model.transformer.head.weight[BROKEN] = number  # type: ignore[union-attr]
    found = ASKED[what](model.inside)
    said = found.as_dict()
    assert json.loads(json.dumps(said, allow_nan=False)) == json.loads(json.dumps(said))
    assert str(found)
    assert found._repr_html_()
    if what in ("decompose", "neurons", "saliency", "occlusion", "paths"):
        assert said["notes"][-1] == UNSAID


def test_what_is_finite_has_no_such_note() -> None:
    see = Model(tiny.transformer("llama")).inside
    for what in ("lens", "decompose", "saliency", "patch", "attention"):
        if what != "patch":
            assert UNSAID not in ASKED[what](see).as_dict().get("notes", ())
