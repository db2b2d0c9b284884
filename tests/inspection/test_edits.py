"""Edits reach everything that comes after, caches and later tokens among it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.session import Session
from cutaway.inspection import Edit, Recorder, trace
from cutaway.models import Transformer
from cutaway.spec.names import tap_names
from tests.generation.sweep import FEW, families
from tests.reference import tiny

PLACE, PROMPT, MORE = 9, 12, 4  # within the window of 8 from the last tokens of the prompt


@pytest.fixture(scope="module", params=families(*FEW, "qwen3"))
def model(request: pytest.FixtureRequest) -> Transformer:
    return tiny.transformer(request.param)


def at_place(change: Callable[[Tensor], Tensor]) -> Edit:
    """Changes one place of the prompt, and nothing in later passes."""

    def edit(value: Tensor) -> Tensor:
        if value.shape[1] <= PLACE:
            return value
        value = value.clone()
        value[:, PLACE] = change(value[:, PLACE])
        return value

    return edit


@torch.no_grad()
def run(model: Transformer, ids: list[list[int]], edits: dict[str, Edit]) -> tuple[Tensor, Recorder]:
    tap = Recorder(list(tap_names(model.spec)), {name: [edit] for name, edit in edits.items()})
    return model(torch.tensor(ids), tap=tap), tap


@pytest.mark.parametrize(
    "name",
    [
        "embed.out",
        "1.resid_in",
        "1.attn.in",
        "1.attn.k",
        "1.attn.v",
        "0.attn.z",
        "0.mlp.act",
        "1.mlp.out",
        "0.mlp.resid",
    ],
)
def test_an_edit_at_the_prompt_is_seen_by_later_steps(model: Transformer, name: str) -> None:
    """It equals the same edit in one pass over the whole text without a cache."""
    name = tiny.here(model, name if name == "embed.out" else f"decoder.layers.{name}")
    edits = {name: at_place(lambda value: value * 0.3 + 0.5)}
    ids = tiny.ids(1, PROMPT).tolist()
    stepped = trace(model, ids, ("logits", name), edits, max_tokens=MORE)
    whole, tap = run(model, stepped.tokens, edits)
    torch.testing.assert_close(stepped["logits"], whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stepped[name], tap.kept[name][0], rtol=1e-4, atol=1e-4)
    plain, _ = run(model, stepped.tokens, {})
    assert float((plain - whole)[:, PROMPT:].abs().max()) > 1e-3  # the later steps did see it
    assert float((plain - whole)[:, :PLACE].abs().max()) <= 5e-5  # and what came before did not


def test_an_edited_value_by_hand() -> None:
    """A value vector of 0 in every layer is the token not being there for anyone else."""
    model = tiny.transformer("gpt2")
    ids = tiny.ids(1, PROMPT).tolist()
    edits = {"decoder.layers.*.attn.v": at_place(torch.zeros_like)}
    found = trace(model, ids, ("*.weights", "*.v", "*.z"), edits, max_tokens=MORE)
    for i in range(model.spec.n_layers):
        at = f"decoder.layers.{i}.attn"
        weights, v = found[f"{at}.weights"].clone(), found[f"{at}.v"]
        assert (v[:, PLACE] == 0).all()
        assert (v[:, PROMPT:] != 0).any()
        weights[..., PLACE] = 0
        by_hand = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        torch.testing.assert_close(by_hand, found[f"{at}.z"], rtol=1e-5, atol=1e-5)


def test_an_edit_changes_what_is_said() -> None:
    """A logit edit at every step decides every token; a session takes the same tap."""
    model = tiny.transformer("llama")
    ids = tiny.ids(1, PROMPT).tolist()

    def only_5(value: Tensor) -> Tensor:
        value = value.clone()
        value[..., 5] = 1e3
        return value

    assert trace(model, ids, (), {"logits": only_5}, max_tokens=3).tokens == [[*ids[0], 5, 5, 5]]
    tap = Recorder([], {"logits": [only_5]})
    session = Session(model)
    assert session.feed(ids, tap).argmax(-1).tolist() == [5]
    assert session.feed([[5]], tap).argmax(-1).tolist() == [5]


def test_one_key_value_head() -> None:
    """Case I06: of four query heads and two key/value heads, patching the second reaches heads 2 and 3."""
    model = tiny.transformer("llama")
    ids, at = tiny.ids(2, PROMPT).tolist(), "decoder.layers.1.attn"

    def patch(value: Tensor) -> Tensor:
        value = value.clone()
        value[:, :, 1] = value[:, :, 1].flip(1)
        return value

    names = (f"{at}.weights", f"{at}.z", f"{at}.k", f"{at}.v", f"{at}.q")
    plain = trace(model, ids, names)
    assert plain[f"{at}.weights"].shape == (2, 4, PROMPT, PROMPT)
    assert plain[f"{at}.k"].shape == plain[f"{at}.v"].shape == (2, PROMPT, 2, 8)
    assert plain[f"{at}.q"].shape == (2, PROMPT, 4, 8)
    for name in ("k", "v"):
        patched = trace(model, ids, names, {f"{at}.{name}": patch})
        changed = (patched[f"{at}.z"] - plain[f"{at}.z"]).abs().amax((0, 1, 3)) > 1e-3
        assert changed.tolist() == [False, False, True, True]
        assert torch.equal(patched[f"{at}.z"][:, :, :2], plain[f"{at}.z"][:, :, :2])


def test_what_is_asked_for_does_not_matter(model: Transformer) -> None:
    """Case I06: scores, weights and head_out each change the path, and no logit."""
    ids = tiny.ids(2, 30).tolist()
    plain = trace(model, ids, ("logits",))["logits"]
    for pattern in ("*.scores", "*.weights", "*.head_out", "*.norm_scale", "*.q", "*"):
        found = trace(model, ids, ("logits", pattern))
        assert float((found["logits"] - plain).abs().max()) <= 5e-5, pattern


def test_edits_of_one_name_follow_one_another() -> None:
    model = tiny.transformer("gpt2")
    name = "decoder.layers.0.attn.v"
    ids = tiny.ids(1, 5).tolist()
    plain = trace(model, ids, (name,))[name]
    both = trace(model, ids, (name,), {name: lambda v: v + 1, "decoder.layers.*.attn.v": lambda v: v * 2})[name]
    assert torch.equal(both, (plain + 1) * 2)


@pytest.mark.parametrize("wrong", [lambda v: None, lambda v: v[:, :1], lambda v: 3.0, lambda v: v[..., None]])
def test_an_edit_gives_back_the_same_shape(wrong: Edit) -> None:
    model = tiny.transformer("gpt2")
    with pytest.raises(RequestError, match="shape") as caught:
        trace(model, tiny.ids(1, 5).tolist(), (), {"decoder.layers.0.attn.v": wrong})
    assert caught.value.field == "decoder.layers.0.attn.v"


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (lambda v: v.double(), "torch.float64 on cpu"),
        (lambda v: v.half(), "torch.float16 on cpu"),
        (lambda v: v > 0, "torch.bool on cpu"),
        (lambda v: v.to("meta"), "torch.float32 on meta"),
    ],
)
@pytest.mark.parametrize("name", ["embed.out", "decoder.layers.0.attn.v", "logits"])
def test_an_edit_gives_back_the_same_kind_of_numbers(wrong: Edit, got: str, name: str) -> None:
    model = tiny.transformer("gpt2")
    with pytest.raises(RequestError, match="numbers") as caught:
        trace(model, tiny.ids(1, 5).tolist(), (), {name: wrong})
    error = caught.value
    assert (error.field, error.expected, error.got) == (name, "torch.float32 on cpu", got)
    assert ".to(value)" in (error.hint or "")
    if "cpu" in got:  # what the hint says helps
        kept = trace(model, tiny.ids(1, 5).tolist(), (name,), {name: lambda v: wrong(v).to(v)})
        assert kept[name].dtype == torch.float32


def test_gradients_reach_an_edit() -> None:
    """A tap is no detour: what an edit adds can be learned."""
    model = tiny.transformer("llama")
    push = torch.zeros(32, requires_grad=True)
    tap = Recorder([], {"decoder.layers.1.resid_in": [lambda value: value + push]})
    model(tiny.ids(1, 6), tap=tap)[0, -1, 3].backward()
    assert push.grad is not None
    assert float(push.grad.abs().max()) > 0


def zeroed(value: Tensor) -> Tensor:
    """In place, as one writes it who means no harm."""
    value[:, 1] = 0
    return value


@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize("name", ["embed.out", "0.resid_in", "1.attn.out", "1.mlp.resid", "1.attn.z"])
def test_an_edit_may_write_on_what_it_is_given(name: str, more: int) -> None:
    """What was kept under earlier names, perhaps the same tensor, stays as it was computed."""
    model = tiny.transformer("llama")  # whose branches add what their body gives, and embeddings are not scaled
    name = name if name.startswith("embed") else f"decoder.layers.{name}"
    rows = [[5, 9, 17, 7], [11, 12]]

    def apart(value: Tensor) -> Tensor:
        return value if value.shape[1] < 2 else zeroed(value.clone())

    def within(value: Tensor) -> Tensor:
        return value if value.shape[1] < 2 else zeroed(value)

    wanted = trace(model, rows, ("*",), {name: apart}, more)
    found = trace(model, rows, ("*",), {name: within}, more)
    for every in wanted:
        torch.testing.assert_close(found[every], wanted[every], rtol=0, atol=0, equal_nan=True)
    before = trace(model, rows, ("*",), max_tokens=more)
    for earlier in list(before)[: list(before).index(name)]:
        if more == 0:
            torch.testing.assert_close(found[earlier], before[earlier], rtol=0, atol=0, equal_nan=True)


def test_what_an_edit_gave_back_is_not_written_on() -> None:
    """A tensor of somebody's own, given back by one edit, before another that writes in place."""
    model = tiny.transformer("llama")
    mine = torch.ones(1, 4, model.spec.d_model)
    trace(model, [[5, 9, 17, 7]], ("logits",), {"embed.out": lambda _: mine, "embed.o*": zeroed})
    assert bool((mine == 1).all())


def test_nobody_who_only_watches_pays_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model, copies = tiny.transformer("llama"), list[Tensor]()
    real = Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda self, **k: copies.append(self) or real(self, **k))
    with torch.no_grad():
        model(torch.tensor([[5, 9, 17, 7]]), tap=Recorder.of(model.spec, "*.resid", "*.z"))
        assert not copies
        model(torch.tensor([[5, 9, 17, 7]]), tap=Recorder.of(model.spec, edits={"embed.out": lambda x: x}))
    assert len(copies) == 1


def ends(value: Tensor) -> Tensor:
    return next(iter(list[Tensor]()))


class Placed:
    """A change of somebody's own, which forgets where it is."""

    def change(self, value: Tensor) -> Tensor:
        return value


@pytest.mark.parametrize("more", [0, 2])
@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (ends, "StopIteration"),
        (lambda x: x.to_sparse(), "layout"),
        (lambda: None, "other arguments"),
        (lambda x, y: x, "other arguments"),
        (lambda x, *, by: x * by, "other arguments"),
        (Placed(), "other arguments"),
    ],
)
def test_an_edit_that_is_none_is_named(edit: Any, says: str, more: int) -> None:
    model = tiny.transformer("llama")
    with pytest.raises(RequestError, match=says) as caught:
        trace(model, [[5, 9, 17, 7]], ("logits",), {"decoder.layers.0.mlp.out": edit}, more)
    assert "decoder.layers.0.mlp.out" in str(caught.value.field)


def test_an_edits_own_error_says_which_edit() -> None:
    model = tiny.transformer("llama")
    with pytest.raises(ZeroDivisionError) as caught:
        trace(model, [[5, 9, 17, 7]], ("logits",), {"*.mlp.out": lambda x: x * (1 // 0)}, 2)
    assert caught.value.__notes__ == ["In the edit of decoder.layers.0.mlp.out."]
    trace(model, [[5, 9]], ("logits",), {"embed.out": torch.relu})  # which does not say what it takes
