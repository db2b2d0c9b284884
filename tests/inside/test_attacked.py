"""What is no word, no place and no question is refused in one sentence, and nothing silent comes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway
from cutaway import edits, inspection
from cutaway.errors import RequestError
from cutaway.model import Model
from tests.cli.conftest import config, write_folder
from tests.reference import tiny

A, B = [3, 4, 5, 6], [3, 4, 7, 6]
Z = "decoder.layers.0.attn.z"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("attacked") / "m"
    write_folder(folder, config())
    return cutaway.load(folder)


NaN = {Z: lambda z: z * float("nan")}
ASKED: dict[str, tuple[Callable[[Any], object], str]] = {
    "a place that is no list": (lambda i: i.lens(A, positions=-1), "positions"),
    "no places": (lambda i: i.lens(A, positions=[]), "positions"),
    "a place that is None": (lambda i: i.lens(A, positions=[None]), "positions"),
    "no points": (lambda i: i.lens(A, at=[]), "at"),
    "to follow nothing": (lambda i: i.lens(A, follow=None), "follow"),
    "to follow no words": (lambda i: i.lens(A, follow=[]), "follow"),
    "no lens": (lambda i: i.lens(A, tuned=3), "tuned"),
    "half a head": (lambda i: i.attention(A, 0, heads=1.5), "attn"),
    "no heads": (lambda i: i.attention(A, 0, heads=[]), "heads"),
    "no edits": (lambda i: i.effect(A, None), "edits"),
    "empty edits": (lambda i: i.effect(A, {}), "edits"),
    "an edit that makes NaN": (lambda i: i.effect(A, NaN), "edits"),
    "an axis of one word": (lambda i: i.plane([3, 4, 5], pairs=[(3,)]), "pairs"),
    "an axis that is a number": (lambda i: i.plane([3, 4, 5], pairs=[3]), "pairs"),
    "a metric that is none": (lambda i: i.patch_sweep(A, B, metric=3), "metric"),
    "no positions to patch": (lambda i: i.patch_sweep(A, B, 3, 4, positions=[]), "positions"),
    "one text twice": (lambda i: i.patch_sweep(A, A, 3, 4), "metric"),
    "one word twice": (lambda i: i.patch_sweep(A, B, 3, 3), "metric"),
    "a word against none": (lambda i: i.patch_sweep(A, B, None, 4), "answer"),
    "the neighbours of None": (lambda i: i.neighbours(None), "of"),
    "the neighbours of True": (lambda i: i.neighbours(True), "of"),
    "the direction of zeros": (lambda i: i.neighbours(torch.zeros(i._model.spec.d_model)), "of"),
    "a complex vector": (lambda i: i.neighbours(torch.ones(i._model.spec.d_model, dtype=torch.complex64)), "of"),
    "no texts": (lambda i: i.head_scores([]), "text"),
    "texts of two lengths": (lambda i: i.head_scores([A, A[:2]]), "ids"),
    "a seed that is a word": (lambda i: i.repeated(seed="a"), "seed"),
    "a seed too large": (lambda i: i.repeated(seed=1 << 80), "seed"),
    "fewer than none of the heads": (lambda i: i.head_scores([A]).top("sink", -1), "n"),
    "a receiver that is none": (lambda i: i.path_sweep(A, B, 3, 4, [3]), "receivers/0"),
    "a head that is none": (lambda i: inspection.loss_without(i._model, [A], ["decoder.layers.0.attn"]), "heads"),
    "a branch that is none": (lambda i: i.attention(A, None), "branch"),
    "a text of one token": (lambda i: i.ablation_sweep("a"), "ids"),
    "a piece of a layer in a list": (lambda i: i.patch_sweep(A, B, 3, 4, at=["mlp.act"]), "at"),
    "nothing to draw from": (lambda i: inspection.repeated([]), "vocab"),
    "fewer than none of the parts": (lambda i: i.decompose(A, 3).top(-1), "n"),
}


@pytest.mark.parametrize("what", ASKED)
def test_refused(model: Model, what: str) -> None:
    ask, field = ASKED[what]
    with pytest.raises(RequestError) as caught:
        ask(model.inside)
    assert field in str(caught.value)
    assert "\n" not in caught.value.what


ALONE: dict[str, Callable[[Any, Any], object]] = {
    "sources": lambda i, one: i.decompose(A, 3, sources=one),
    "neurons": lambda i, one: i.decompose(A, 3, neurons=one),
    "receivers": lambda i, one: i.path_sweep(A, B, 3, 4, one),
    "at": lambda i, one: i.lens(A, one),
    "layers": lambda i, one: i.neurons(A, 3, layers=one),
    "pairs": lambda i, one: i.plane([3, 4, 5], pairs=one),
    "names": lambda i, one: i.compare(A, B, names=one),
    "heads": lambda i, one: inspection.loss_without(i._model, [A], one),
    "ids": lambda i, one: inspection.ablation_sweep(i._model, one),
    "clean": lambda i, one: inspection.patch_sweep(i._model, one, [B], inspection.log_probability(3)),
    "pieces": lambda i, one: inspection.lens(i._model, A, pieces=one),
    "also": lambda i, one: inspection.effect(i._model, A, {Z: edits.zero()}, also=one),
    "prompt": lambda i, one: inspection.trace(i._model, one, ("logits",)),
    "vocab": lambda i, one: inspection.repeated(one),
}


@pytest.mark.parametrize("field", ALONE)
def test_one_alone_where_a_list_is_wanted(model: Model, field: str) -> None:
    """A text is no list of letters, a whole name no list of names: in one sentence, by the argument's name."""
    for one in ("decoder.layers.0.attn", "abcd", *([] if field in ("vocab", "at") else [7, False])):
        with pytest.raises(RequestError, match="not a list") as caught:
            ALONE[field](model.inside, one)
        assert caught.value.field == field
        assert caught.value.hint == f"One alone goes into a list too: {field}=[…]."


def test_a_receiver_by_its_name(model: Model) -> None:
    """Words mean the same on both floors."""
    metric = inspection.logit_difference(3, 4)
    named, made = (
        inspection.path_sweep(model.transformer, [A], [B], metric, some).as_dict()
        for some in (["decoder.layers.1.attn.q"], [inspection.Receiver("decoder.layers.1.attn.q")])
    )
    assert named == made


def test_models_with_nothing_in_common() -> None:
    with pytest.raises(RequestError, match="in common"):
        inspection.compare(
            tiny.transformer("llama"), tiny.transformer("gpt2"), A, names=["decoder.layers.0.attn.q_rot"]
        )


def test_tokens_without_any_probability_count_for_nothing(model: Model) -> None:
    """A divergence where the answer gives some tokens none at all is a number, and still sees what was changed."""
    forbid = {"logits": lambda x: torch.where(torch.arange(x.shape[-1]) < 5, float("-inf"), x)}
    plain = model.inside.effect(A, {Z: edits.zero(heads=0)})
    assert plain.divergence > 0
    assert model.inside.effect(A, forbid).divergence == float("inf")


def test_neurons_are_read_some_at_a_time(model: Model) -> None:
    """All of them, though a row of scores for each of a real model's would be gigabytes."""
    every, few = model.inside.neurons(A, 3, k=10**9), model.inside.neurons(A, 3, k=2)
    assert len(every.as_dict()["neurons"]) == sum(layer.branches[1].body.d_ff for layer in model.spec.decoder.layers)
    assert every.as_dict()["neurons"][:2] == few.as_dict()["neurons"]
