"""Whatever may take minutes says how far it is: from none to all, more and more, with the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cutaway.errors import RequestError
from cutaway.inspection import (
    ablation_sweep,
    compare,
    copying_scores,
    integrated_gradients,
    lens,
    log_probability,
    occlusion,
    patch_sweep,
    path_sweep,
    readout,
    train_lens,
)
from cutaway.models import Transformer
from tests.reference import tiny

IDS, OTHER = [3, 4, 5, 6, 7], [3, 9, 5, 6, 7]
METRIC = log_probability(3)
# What is called, how many there are, and how often it is told at least.
LONG: dict[str, tuple[Callable[..., Any], int | None, int]] = {
    "lens": (lambda m, p: lens(m, IDS, progress=p), 5 * 4, 3 * 4),  # positions × points, in blocks of two positions
    "compare": (lambda m, p: compare(m, m, IDS, OTHER, names=["*.resid_in", "logits"], progress=p), 4, 4),
    "copying": (lambda m, p: copying_scores(m, progress=p), 12, 12),
    "integrated gradients": (lambda m, p: integrated_gradients(m, IDS, 5, steps=6, batch=2, progress=p), 6, 3),
    "occlusion": (lambda m, p: occlusion(m, IDS, 5, batch=2, progress=p), 5, 3),
    "patching": (lambda m, p: patch_sweep(m, [IDS], [OTHER], METRIC, batch=2, progress=p), None, 3),
    "paths": (lambda m, p: path_sweep(m, [IDS], [OTHER], METRIC, batch=4, progress=p), 15, 3),
    "ablation": (lambda m, p: ablation_sweep(m, [IDS], batch=4, progress=p), 13, 3),
    "training": (lambda m, p: train_lens(m, [IDS] * 9, steps=2, progress=p), None, 3),
}


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny.transformer("llama")


@pytest.mark.parametrize("what", LONG)
def test_told(
    model: Transformer, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readout, "LARGEST", 2 * model.spec.vocab_size)
    ask, of, least = LONG[what]
    told: list[tuple[int, int]] = []
    found = ask(model, lambda done, of: told.append((done, of)))
    done, every = zip(*told, strict=True)
    assert {*every} == {of or every[0]}
    assert done[0] == 0
    assert done[-1] == every[0]
    assert list(done) == sorted(done)
    assert len({*done}) > least
    for progress in (None, True, False):  # True: a line, where somebody looks
        again = ask(model, progress)
        assert repr(again) == repr(found)
    assert capsys.readouterr().err == ""
    with pytest.raises(RequestError, match="progress"):
        ask(model, 3)
