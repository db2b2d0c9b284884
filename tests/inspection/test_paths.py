"""Direct effects against the stream worked out by hand: what stood there, and what the sender writes otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cutaway.errors import NameNotFound, RequestError
from cutaway.inspection import Receiver, logit_difference, path_sweep, trace
from cutaway.models import Transformer
from cutaway.spec import AttentionSpec
from tests.reference import tiny, tiny_seq2seq

CASES = ("llama", "gemma2", "granite-biases", "gpt-neox", "mixtral-window", "gpt2")
CLEAN, CORRUPT = [5, 9, 17, 7, 30, 11, 40], [5, 9, 33, 7, 30, 25, 40]
METRIC = logit_difference(21, 34)


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest) -> Transformer:
    return tiny.transformer(request.param)


@torch.no_grad()
def written(model: Transformer, base: Any, other: Any, at: str, head: int, position: int | None) -> Tensor:
    """By how much a sender's writing differs: through its output matrix, its branch's norm and factor."""
    _, _, layer, name = at.split(".")
    branch = model.decoder.layers[int(layer)].branches[name]
    part = slice(None) if position is None else position
    if isinstance(branch.spec.body, AttentionSpec):
        z = base[f"{at}.z"].clone()
        z[:, part, head] = other[f"{at}.z"][:, part, head]
        body = torch.nn.functional.linear(z.flatten(-2), branch.body.out.weight, branch.body.out.bias)
        return branch.out_norm(body) * branch.spec.scale - base[f"{at}.out"]
    out = base[f"{at}.out"].clone()
    out[:, part] = other[f"{at}.out"][:, part]
    return out - base[f"{at}.out"]


def seen(model: Transformer, ids: list[int], edits: Any = None) -> Any:
    return trace(model, [ids], ("*.z", "*.out", "*.resid_in", "*.resid", "*.q", "*.k", "*.v", "*.in", "logits"), edits)


def told(logits: Tensor) -> float:
    return float(logits[0, -1, 21] - logits[0, -1, 34])


@pytest.mark.parametrize("position", [None, 2])
@torch.no_grad()
def test_to_the_end(model: Transformer, position: int | None) -> None:
    base, other = seen(model, CLEAN), seen(model, CORRUPT)
    found = path_sweep(model, [CLEAN], [CORRUPT], METRIC, position=position, batch=5)
    branch = model.spec.decoder.layers[-1].branches[-1].name
    end = base[f"decoder.layers.{len(model.decoder.layers) - 1}.{branch}.resid"]
    assert found.clean == pytest.approx(told(base["logits"]), abs=1e-4)
    for row, at in enumerate(found.layers):
        for head in range(4 if at.endswith("attn") else 1):
            stream = end + written(model, base, other, at, head, position)
            expected = told(model.unembed(model.decoder.norm(stream)))
            assert float(found.values[row, head]) == pytest.approx(expected, abs=5e-4), (at, head)
    assert found.effect.isnan().sum() == found.values.isnan().sum()


@pytest.mark.parametrize("kind", ["q", "k", "v", "in"])
@torch.no_grad()
def test_to_a_reader(model: Transformer, kind: str) -> None:
    """What a head of the last layer, or its feed-forward network, makes of the stream as it would have been."""
    base, other = seen(model, CLEAN), seen(model, CORRUPT)
    layer = len(model.decoder.layers) - 1
    block = model.decoder.layers[layer]
    name = "attn" if kind != "in" else block.spec.branches[1].name
    branch, at = block.branches[name], f"decoder.layers.{layer}.{name}"
    head = None if kind == "in" else 1
    found = path_sweep(model, [CLEAN], [CORRUPT], METRIC, [Receiver(f"{at}.{kind}", head)], batch=5)
    before = f"decoder.layers.{layer}.resid_in"
    if name != "attn" and not block.spec.parallel:
        before = f"decoder.layers.{layer}.attn.resid"
    reads = block.branches["attn"] if block.spec.shared_norm else branch
    for row, sender in enumerate(found.layers):
        earlier = int(sender.split(".")[2]) < layer or (
            kind == "in" and not block.spec.parallel and sender.endswith("attn")
        )
        if not earlier:
            assert found.values[row].isnan().all()
            continue
        for one in range(4 if sender.endswith("attn") else 1):
            y = reads.pre_norm(base[before] + written(model, base, other, sender, one, None))
            into = y
            if kind != "in":
                x = getattr(branch.body, kind)(y).unflatten(-1, (-1, branch.body.spec.d_head))
                x = getattr(branch.body, f"{kind}_norm")(x) if kind in "qk" else x
                into = base[f"{at}.{kind}"].clone()
                into[:, :, head] = x[:, :, head]
            logits = seen(model, CLEAN, {f"{at}.{kind}": lambda _, into=into: into})["logits"]
            assert float(found.values[row, one]) == pytest.approx(told(logits), abs=5e-4), (sender, one)


def test_where_nothing_is_between() -> None:
    """What only the end reads has no other effect than the direct one: that of patching."""
    from cutaway.inspection import patch_sweep

    model = tiny.transformer("llama")
    last = path_sweep(model, [CLEAN], [CORRUPT], METRIC)
    assert last.layers[-2:] == ("decoder.layers.2.attn", "decoder.layers.2.mlp")
    # The last feed-forward network is read by nobody but the end.
    patched = patch_sweep(model, [CLEAN], [CORRUPT], METRIC, "branch", at="mlp.out", positions=[6], direction="noise")
    only = path_sweep(model, [CLEAN], [CORRUPT], METRIC, position=6)
    assert float(only.values[-1, 0]) == pytest.approx(float(patched.values[-1, 0]), abs=1e-4)


def test_both_ways_and_batches() -> None:
    model = tiny.transformer("llama")
    clean, corrupt = tiny.ids(2, 6).tolist(), tiny.ids(2, 6, seed=2).tolist()
    one = path_sweep(model, clean, corrupt, METRIC, direction="denoise", batch=1)
    two = path_sweep(model, corrupt, clean, METRIC, direction="noise", batch=50)
    torch.testing.assert_close(one.values, two.values, rtol=1e-4, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(one.effect, two.effect, rtol=1e-3, atol=1e-3, equal_nan=True)
    at, head, effect = one.top(1)[0]
    assert float(one.effect[one.layers.index(at), head]) == effect
    assert abs(effect) == pytest.approx(float(one.effect.nan_to_num().abs().max()))
    assert [part.title for part in one.figure().parts] == ["Heads", "Feed-forward networks"]
    assert one.as_dict()["effect"][1][1] is None


def test_a_decoder_with_a_source() -> None:
    model = tiny_seq2seq.transformer("t5")
    found = path_sweep(model, [CLEAN], [CORRUPT], METRIC, [Receiver("decoder.layers.1.cross.q")], sources=[CLEAN[:4]])
    assert not found.values[:4].isnan().all()
    assert found.layers[1] == "decoder.layers.0.cross"


def test_refusals() -> None:
    model = tiny.transformer("llama")
    for name in ("decoder.layers.1.attn.z", "decoder.layers.9.attn.q", "logits", "decoder.layers.1.mlp.act"):
        with pytest.raises(NameNotFound, match="reads the stream"):
            path_sweep(model, [CLEAN], [CORRUPT], METRIC, [Receiver(name)])
    with pytest.raises(RequestError, match="no such head"):
        path_sweep(model, [CLEAN], [CORRUPT], METRIC, [Receiver("decoder.layers.1.attn.k", 2)])
    with pytest.raises(RequestError, match="nobody"):
        path_sweep(model, [CLEAN], [CORRUPT], METRIC, [])
    with pytest.raises(RequestError, match="alone"):
        path_sweep(model, [CLEAN], [CORRUPT], METRIC, [Receiver("end"), Receiver("decoder.layers.1.attn.q")])
    with pytest.raises(RequestError, match="no such position"):
        path_sweep(model, [CLEAN], [CORRUPT], METRIC, position=9)
