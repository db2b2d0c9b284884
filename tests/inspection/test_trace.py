"""The mapping people hold, and that nothing else is held."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cutaway.errors import ContextExceeded, NameNotFound, RequestError
from cutaway.inspection import Recorder, trace
from cutaway.model import Model
from cutaway.models import Transformer
from tests.inspection.memory import bytes_alive
from tests.reference import tiny


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny.transformer("llama")


def ids(rows: int = 1, n: int = 6) -> list[list[int]]:
    return tiny.ids(rows, n).tolist()


def test_a_mapping(model: Transformer) -> None:
    found = trace(model, ids(2), ("decoder.layers.*.attn.weights", "logits"), max_tokens=2)
    assert isinstance(found, Mapping)
    weights = [f"decoder.layers.{i}.attn.weights" for i in range(3)]
    assert list(found) == list(found.keys()) == [*weights, "logits"]  # in the order of the computation
    assert len(found) == 4
    assert len(list(found.values())) == 4
    assert found.axes["logits"] == ("batch", "query", "vocab")
    assert found.axes[weights[0]] == ("batch", "head", "query", "key")
    assert [len(row) for row in found.tokens] == [8, 8]
    assert found["*.1.attn.weights"] is found[weights[1]]
    assert found["log*"] is found["logits"]
    assert "logits" in found
    assert "embed.out" not in found
    assert "log*" not in found
    assert 3 not in found
    assert found.get("logits") is found["logits"]
    assert found.get("embed.out") is None
    assert found.get("x", 1) == 1


def test_a_pattern_that_means_several(model: Transformer) -> None:
    found = trace(model, ids(), ("*.attn.q", "*.attn.k"))
    with pytest.raises(NameNotFound, match="several") as caught:
        found["*.attn.q"]
    assert caught.value.field == "*.attn.q"
    assert "decoder.layers.2.attn.q" in (caught.value.hint or "")
    with pytest.raises(NameNotFound) as caught:
        found["logits"]  # a real name, that was not asked for
    everything = trace(model, ids(), ("*",))
    with pytest.raises(NameNotFound, match="several") as caught:
        everything["*"]
    assert "more" in (caught.value.hint or "")
    assert len(caught.value.hint or "") < 300


def test_repr_is_a_table(model: Transformer) -> None:
    found = trace(model, ids(2), ("decoder.layers.0.attn.weights", "logits"))
    lines = repr(found).splitlines()
    assert lines[0] == "Trace of 2 × 6 tokens: 2 quantities"
    assert lines[1] == "  decoder.layers.0.attn.weights  batch 2 × head 4 × query 6 × key 6"
    assert lines[2].split() == ["logits", "batch", "2", "×", "query", "6", "×", "vocab", "64"]
    assert repr(trace(model, ids(), ())) == "Trace of 1 × 6 tokens: 0 quantities"
    assert repr(trace(model, ids(1, 1), ("logits",))).startswith("Trace of 1 × 1 token: 1 quantity\n")


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("decoder.layers.0.attn.weight", "decoder.layers.0.attn.weights"),
        ("decoder.layers.9.attn.q", "attn.q"),
        ("blocks.*.hook_q", None),
        ("*.mlp.router_logits", None),
    ],
)
def test_names_that_match_nothing(model: Transformer, pattern: str, near: str | None) -> None:
    for arguments in ((("logits", pattern), None), ((), {pattern: lambda value: value})):
        with pytest.raises(NameNotFound) as caught:
            trace(model, ids(), *arguments)
        assert caught.value.field == pattern
        assert (near or "") in (caught.value.hint or "")
        assert caught.value.hint


def test_requests_that_make_no_sense(model: Transformer) -> None:
    for bad in ([], [[]], [[64]], [[True]], [[3], []]):
        with pytest.raises(RequestError):
            trace(model, bad, ("logits",))
    for value in (-1, True, 1.5, None):
        with pytest.raises(RequestError) as caught:
            trace(model, ids(), ("logits",), max_tokens=value)  # type: ignore[arg-type]
        assert caught.value.field == "max_tokens"
    with pytest.raises(ContextExceeded):
        trace(tiny.transformer("gpt2"), ids(1, 60), ("logits",), max_tokens=5)


@pytest.mark.parametrize(
    ("names", "edits", "field"),
    [
        (5, None, "names"),
        (None, None, "names"),
        ("logits", None, "names"),  # a text is a list of letters
        ((5,), None, "names/0"),
        (("logits", None), None, "names/1"),
        ((["logits"],), None, "names/0"),
        ((b"logits",), None, "names/0"),
        ((), 5, "edits"),
        ((), [("logits", lambda value: value)], "edits"),
        ((), lambda value: value, "edits"),
        ((), {5: lambda value: value}, "edits"),
        ((), {"logits": None}, "edits/logits"),
        ((), {"logits": torch.zeros(1)}, "edits/logits"),
    ],
)
def test_names_and_edits_that_are_none(model: Transformer, names: Any, edits: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        trace(model, ids(), names, edits)
    assert caught.value.field == field
    assert caught.value.expected is not None


def test_no_edits_is_an_empty_mapping_too(model: Transformer) -> None:
    assert list(trace(model, ids(), ["logits"], {})) == ["logits"]


def test_the_facade(model: Transformer) -> None:
    whole = Model(model)
    one, both = whole.trace(ids()[0], "*.q"), whole.trace(ids(2), "*.q")
    assert one["*.0.attn.q"].shape == (1, 6, 4, 8)
    assert both["*.0.attn.q"].shape == (2, 6, 4, 8)
    # What is generated on the way is what generating says.
    tokens = whole.trace(ids()[0], max_tokens=5).tokens[0]
    assert tokens[6:] == whole.generate(ids()[0], max_tokens=5, temperature=0).tokens
    ragged = whole.trace([[3, 4], [5]], "logits")
    assert ragged.lengths == [2, 1]
    assert bool(ragged["logits"][1, 1].isnan().all())


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["decoder.layers.1.attn.weights", "decoder.layers.0.attn.z"])
def test_only_what_is_named_is_kept(model: Transformer, name: str) -> None:
    """Case I05: fifty captures are fifty tensors."""
    one = trace(model, ids(2, 20), (name,), max_tokens=1)[name]
    size = one.nbytes
    assert one.untyped_storage().nbytes() == size  # not a view of something larger
    del one
    before = bytes_alive()
    held = [trace(model, ids(2, 20), (name,), max_tokens=1) for _ in range(50)]
    assert bytes_alive() - before == 50 * size
    del held
    assert bytes_alive() == before


@pytest.mark.parametrize("case", ["gpt2", "gemma3-caps", "mixtral-window"])
@pytest.mark.parametrize("more", [0, 2])
def test_nothing_that_is_kept_is_part_of_something_larger(case: str, more: int) -> None:
    """An edit may give back a part of something: of that the part alone is kept."""
    mine = tiny.transformer(case)

    def part(value: Tensor) -> Tensor:
        return torch.cat([value, value])[: len(value)]

    found = trace(mine, ids(2), ("*",), {"decoder.layers.1.attn.z": part}, max_tokens=more)
    for name, tensor in found.items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


def test_a_failed_edit_leaves_nothing(model: Transformer) -> None:
    seen: list[Any] = []
    wanted = trace(model, ids(), ("logits",))["logits"]

    def fail(value: Tensor) -> Tensor:
        seen.append(weakref.ref(value))
        raise ValueError("mine")

    before = bytes_alive()
    for _ in range(3):
        with pytest.raises(ValueError, match="mine"):
            trace(model, ids(), ("*.attn.*",), {"decoder.layers.2.attn.z": fail}, max_tokens=3)
    gc.collect()
    assert len(seen) == 3
    assert all(ref() is None for ref in seen)
    assert bytes_alive() == before
    assert torch.equal(trace(model, ids(), ("logits",))["logits"], wanted)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_is_let_go() -> None:
    mine = tiny.transformer("gpt2")
    found = trace(mine, ids(), ("*.q",))
    gone = weakref.ref(mine)
    del mine
    gc.collect()
    assert gone() is None
    assert len(found) == 3


def test_nothing_is_computed_for_nobody(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of every place are by far the largest tensor of a real model: only who asks for them pays."""
    shapes = []
    plain = Transformer.unembed

    def watched(self: Transformer, x: Tensor, tap: Any = None) -> Tensor:
        shapes.append(x.shape[1])
        return plain(self, x, tap)

    monkeypatch.setattr(Transformer, "unembed", watched)
    trace(model, ids(), ("*.q",))
    assert shapes == []
    trace(model, ids(), ("*.q",), max_tokens=2)
    assert shapes == [1, 1]
    trace(model, ids(), ("logits",), max_tokens=1)
    assert shapes[2:] == [6, 1]


def test_a_recorder_hands_on_scopes_that_are_wanted() -> None:
    tap = Recorder(["a.b.c"], {"d.e": [lambda value: value + 1]})
    inner = tap.at("a")
    assert inner is not None
    assert inner.at("x") is None
    assert tap.at("x") is None
    deep = inner.at("b")
    assert deep is not None
    assert deep.wants("c")
    assert not deep.wants("d")
    other = tap.at("d")
    assert other is not None
    assert other.wants("e")
    one = torch.ones(1)
    assert deep("c", one) is one
    assert deep("d", one) is one
    assert other("e", one).tolist() == [2]
    assert tap.kept == {"a.b.c": [one]}


def test_how_large_what_is_kept_is(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is finite, over all pieces; nothing as large as the quantity is made for it."""
    monkeypatch.setattr(import_module("cutaway.inspection.trace"), "PIECE", 7)  # the room's own name is the function
    found = trace(model, [[5, 9, 17, 7], [11, 12]], ("*.0.attn.scores", "logits"))  # −inf, and NaN past the end
    sizes, real = list[int](), Tensor.double
    monkeypatch.setattr(Tensor, "double", lambda self: sizes.append(self.numel()) or real(self))
    said = {one["name"]: one["rms"] for one in found.as_dict()["kept"]}
    assert max(sizes) <= 7
    for name, rms in said.items():
        numbers = found[name].numpy().astype("float64")
        assert rms == pytest.approx((numbers[np.isfinite(numbers)] ** 2).mean() ** 0.5), name
