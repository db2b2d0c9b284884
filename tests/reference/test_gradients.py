"""Gradients against transformers, the two attentions against each other, and dropout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cutaway.families import family_of
from cutaway.formats.rules import saved
from cutaway.models import Transformer
from tests.reference import oracle, tiny
from tests.reference.conftest import open_folder

pytestmark = pytest.mark.usefixtures("capped_oracle")
Folders = Callable[[str], Path]
Note = Callable[[str, str, float], float]


def weighing(*shape: int) -> Tensor:
    """What the logits are multiplied with, so that each matters."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)) / 10


def gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logits * weighing(*logits.shape)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of any gradient, in terms of that gradient's own size.

    GPT-2's key biases move every score of a query alike, so that theirs is nothing but rounding: whatever is
    that small counts by the size of the usual ones.
    """
    assert a.keys() == b.keys()
    usual = torch.stack([grad.norm() for grad in b.values()]).median()
    return max(float((a[name] - b[name]).norm() / torch.maximum(b[name].norm(), usual / 100)) for name in a)


@pytest.mark.parametrize("name", tiny.CASES)
def test_against_transformers(name: str, folder_of: Folders, measured: Note) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    ids = tiny.ids(2, 24)
    model, reference = open_folder(folder_of(name)), oracle.fresh(folder_of(name))
    theirs = gradients(reference, reference(input_ids=ids, use_cache=False).logits)
    theirs = revert_weight_conversion(reference, theirs)  # under the names that are stored: an expert at a time
    for explicit in (False, True):
        model.attention = "explicit" if explicit else "fused"
        ours = saved(family_of(model.spec.family).rules(model.spec), gradients(model, model(ids)))
        assert measured(name, "gradient", relative(ours, theirs)) <= 1e-4


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_two_attentions(name: str, training: bool, measured: Note) -> None:
    """Fused and explicit agree forwards and backwards, with pads and packed documents too."""
    model = tiny.transformer(name).train(training)
    ids = tiny.ids(3, 20)
    positions = torch.arange(20).expand(3, -1).clone()
    positions[1, :6], positions[1, 6:] = -1, torch.arange(14)
    positions[2] = torch.cat([torch.arange(8), torch.arange(12)])
    segments = torch.zeros(3, 20, dtype=torch.long)
    segments[2, 8:] = 1
    results = []
    for explicit in (False, True):
        model.attention = "explicit" if explicit else "fused"
        logits = torch.where(positions[..., None] >= 0, model(ids, positions, segments), 0.0)
        results.append((logits.detach(), gradients(model, logits)))
    (fused, fused_back), (plain, plain_back) = results
    assert measured(name, "two attentions", float((fused - plain).abs().max())) <= 1e-4
    assert relative(fused_back, plain_back) <= 1e-4


def _dropped(name: str) -> dict[str, Any]:
    keys = ("resid_pdrop", "embd_pdrop", "attn_pdrop") if name in ("gpt2", "gptj") else ("attention_dropout",)
    if name.startswith("falcon"):  # rotary and side by side, it drops nothing of attention's own
        keys = ("hidden_dropout",)
    if name == "mpt":
        return {**tiny.config(name), "attn_config": {**tiny.config(name)["attn_config"], "attn_pdrop": 0.4}}
    return {**tiny.config(name), **dict.fromkeys(keys, 0.4)}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_dropout(name: str, explicit: bool) -> None:
    """It acts in training only."""
    plain, model, ids = tiny.transformer(name), tiny.transformer(_dropped(name)), tiny.ids(2, 16)
    plain.attention = model.attention = "explicit" if explicit else "fused"
    assert torch.equal(model(ids), plain(ids))
    assert torch.equal(plain.train()(ids), plain.eval()(ids))
    model.train()
    first, second = model(ids), model(ids)
    assert first.isfinite().all()
    assert not torch.equal(first, second)
    assert all(grad.isfinite().all() for grad in gradients(model, first).values())
    assert torch.equal(model.eval()(ids), plain(ids))


@pytest.mark.parametrize("kind", ["attn_pdrop", "resid_pdrop", "embd_pdrop"])
def test_each_dropout_is_its_own(kind: str) -> None:
    """GPT-2 has three; each alone makes passes differ."""
    model, ids = tiny.transformer({**tiny.config("gpt2"), kind: 0.5}).train(), tiny.ids(1, 16)
    assert not torch.equal(model(ids), model(ids))


def test_dropout_keeps_the_mean() -> None:
    """Over many draws the logits of a one-layer model with dropped weights centre on the plain ones."""
    values = {**tiny.config("gpt2"), "n_layer": 1, "attn_pdrop": 0.3}
    ids = tiny.ids(1, 6)
    model: Transformer = tiny.transformer(values)
    model.decoder.layers[0].branches["mlp"].body.down.weight.data.zero_()
    model.decoder.layers[0].branches["attn"].body.out.weight.data.mul_(1e-3)  # nearly linear in the weights
    with torch.no_grad():
        wanted = model(ids)
        draws = model.train()(ids.expand(4000, -1))
    noise = draws.std(0) / 4000**0.5
    assert ((draws.mean(0)[None] - wanted).abs() <= 6 * noise + 1e-5).all()
