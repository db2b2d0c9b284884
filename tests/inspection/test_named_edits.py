"""Edits that know heads, positions, neurons and rows: each against the same done by hand in one plain pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cutaway.errors import NameNotFound, RequestError
from cutaway.inspection import Change, Edit, Recorder, Trace, add, freeze, mean, replace, scale, steer, trace, zero
from cutaway.models import Transformer
from cutaway.models.batch import pad
from tests.reference import tiny, tiny_seq2seq

LENGTHS, MORE = (11, 4, 7), 4
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
AT = "decoder.layers.1"


@pytest.fixture(scope="module")
def model() -> Transformer:
    """Four query heads, two key/value heads, a gated network."""
    return tiny.transformer("llama")


def prompts(seed: int = 7) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 60, (n,), generator=random).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def clean(model: Transformer) -> Trace:
    """Of other texts, as long as what the tests generate."""
    random = torch.Generator().manual_seed(9)
    ids = [torch.randint(3, 60, (n + MORE,), generator=random).tolist() for n in LENGTHS]
    return trace(model, ids, ("*",))


@torch.no_grad()
def by_hand(model: Transformer, tokens: list[list[int]], name: str, edit: Callable[[Tensor], Tensor]) -> Tensor:
    """Logits of whole texts in one pass, where a function has changed one quantity. Pads come last."""
    ids, positions = pad(tokens)
    return model(ids, positions, tap=Recorder([], {name: [edit]}))


def set_at(*index: Any, to: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def edit(value: Tensor) -> Tensor:
        value = value.clone()
        value[index] = to(value[index])
        return value

    return edit


def whole_mean(clean: Trace, name: str) -> Tensor:
    rows = [clean.row(i)[name][0] for i in range(len(LENGTHS))]
    return torch.cat(rows).mean(0)


ALL = slice(None)
V = torch.linspace(-1, 1, 32)
# name: (quantity, the edit, the same on whole texts)
CASES: dict[str, tuple[str, Callable[[Trace], Edit], Callable[[Trace], Callable[[Tensor], Tensor]]]] = {
    "zero a head": ("attn.z", lambda c: zero(heads=2), lambda c: set_at(ALL, ALL, 2, to=torch.zeros_like)),
    "zero kv heads": ("attn.v", lambda c: zero(heads=[1]), lambda c: set_at(ALL, ALL, 1, to=torch.zeros_like)),
    "zero a position": ("mlp.out", lambda c: zero(positions=3), lambda c: set_at(ALL, 3, to=torch.zeros_like)),
    "zero a later one": ("mlp.out", lambda c: zero(positions=[9]), lambda c: set_at(ALL, 9, to=torch.zeros_like)),
    "zero from there on": (
        "attn.out",
        lambda c: zero(positions=slice(5, None)),
        lambda c: set_at(ALL, slice(5, None), to=torch.zeros_like),
    ),
    "scale neurons": (
        "mlp.act",
        lambda c: scale(3.0, neurons=[1, 5], positions=range(2, 9)),
        lambda c: set_at(ALL, slice(2, 9), slice(1, 6, 4), to=lambda v: v * 3),
    ),
    "add to a row": (
        "resid_in",
        lambda c: add(V, rows=1),
        lambda c: set_at(1, to=lambda v: v + V),
    ),
    "add to channels": (
        "resid_in",
        lambda c: add(2.5, neurons=[0]),
        lambda c: set_at(ALL, ALL, 0, to=lambda v: v + 2.5),
    ),
    "each row's own": (
        "resid_in",
        lambda c: replace(V, positions=[[1, 2], [], [8]]),
        lambda c: lambda v: set_at(2, 8, to=lambda _: V)(set_at(0, slice(1, 3), to=lambda _: V)(v)),
    ),
    "patch from a trace": (
        "resid_in",
        lambda c: replace(c, positions=[2, 6]),
        lambda c: (
            lambda v: set_at(ALL, 6, to=lambda _: c[f"{AT}.resid_in"][:, 6])(
                set_at(ALL, 2, to=lambda _: c[f"{AT}.resid_in"][:, 2])(v)
            )
        ),
    ),
    "patch from elsewhere": (
        "attn.out",
        lambda c: replace(c, of="decoder.layers.2.mlp.out", positions=[3, 1], at=[5, 4]),
        lambda c: (
            lambda v: set_at(ALL, 1, to=lambda _: c["decoder.layers.2.mlp.out"][:, 4])(
                set_at(ALL, 3, to=lambda _: c["decoder.layers.2.mlp.out"][:, 5])(v)
            )
        ),
    ),
    "patch one row everywhere": (
        "attn.z",
        lambda c: replace(c.row(0), heads=1, positions=[0, 4]),
        lambda c: lambda v: set_at(ALL, slice(0, 5, 4), 1, to=lambda _: c[f"{AT}.attn.z"][:1, 0:5:4, 1])(v),
    ),
    "patch by a tensor": (
        "mlp.act",
        lambda c: replace(c[f"{AT}.mlp.act"][:, :5], positions=range(1, 4)),
        lambda c: set_at(ALL, slice(1, 4), to=lambda _: c[f"{AT}.mlp.act"][:, 1:4]),
    ),
    "mean of other texts": (
        "mlp.act",
        lambda c: mean(c, positions=slice(2, None)),
        lambda c: set_at(ALL, slice(2, None), to=lambda _: whole_mean(c, f"{AT}.mlp.act")),
    ),
    "a mean of one's own": ("mlp.out", lambda c: mean(V), lambda c: lambda v: V.expand_as(v)),
    "steer": ("mlp.resid", lambda c: steer(V, 4.0), lambda c: lambda v: v + 4 * V),
    "steer on a sphere": (
        "mlp.resid",
        lambda c: steer(V, -2.0, keep_length=True),
        lambda c: lambda v: (v - 2 * V) / (v - 2 * V).norm(dim=-1, keepdim=True) * v.norm(dim=-1, keepdim=True),
    ),
    "knock out a key": (
        "attn.scores",
        lambda c: replace(float("-inf"), keys=2, positions=slice(3, None), heads=[0, 3]),
        lambda c: set_at(ALL, slice(0, 4, 3), slice(3, None), 2, to=lambda v: torch.full_like(v, -torch.inf)),
    ),
    "an expert's share": ("", lambda c: zero(experts=1), lambda c: set_at(ALL, ALL, 1, to=torch.zeros_like)),
}


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0]])
def test_it_is_the_same_by_hand(model: Transformer, clean: Trace, case: str) -> None:
    """In a ragged batch, through a prompt and steps with a cache."""
    name, edit, same = CASES[case]
    name = f"{AT}.{name}"
    found = trace(model, prompts(), ("logits", name), {name: edit(clean)}, max_tokens=MORE)
    assert found.lengths == [n + MORE for n in LENGTHS]
    wanted = by_hand(model, found.tokens, name, same(clean))
    plain = by_hand(model, found.tokens, name, lambda value: value)
    changed = 0.0
    for i, n in enumerate(found.lengths):
        torch.testing.assert_close(found.row(i)["logits"][0], wanted[i, :n], **CLOSE)
        changed = max(changed, float((wanted - plain)[i, :n].abs().max()))
    assert changed > 1e-2


def test_what_is_not_picked_keeps_its_bits(model: Transformer) -> None:
    name = f"{AT}.attn.z"
    plain = trace(model, prompts(), (name,))[name]
    found = trace(model, prompts(), (name,), {name: scale(7.0, heads=1, positions=2, rows=[0, 2])})[name]
    assert torch.equal(found[0, 2, 1], plain[0, 2, 1] * 7)
    same = torch.where(plain.isnan(), 0.0, plain) == torch.where(found.isnan(), 0.0, found)
    assert [tuple(place) for place in (~same).nonzero()[:, :3].unique(dim=0).tolist()] == [(0, 2, 1), (2, 2, 1)]


def test_experts() -> None:
    model = tiny.transformer("mixtral-window")
    name = f"{AT}.{next(b.name for b in model.spec.decoder.layers[1].branches if b.name != 'attn')}.router_weights"
    found = trace(model, prompts(), ("logits", name), {name: zero(experts=1)}, max_tokens=2)
    wanted = by_hand(model, found.tokens, name, CASES["an expert's share"][2](found))
    for i, n in enumerate(found.lengths):
        torch.testing.assert_close(found.row(i)["logits"][0], wanted[i, :n], **CLOSE)
        assert bool((found.row(i)[name][..., 1] == 0).all())


def test_key_value_head_one_reaches_heads_two_and_three(model: Transformer, clean: Trace) -> None:
    """Case I06, by name, from a trace, in generation."""
    names = tuple(f"{AT}.attn.{part}" for part in ("z", "weights", "k", "v"))
    plain = trace(model, prompts(), names, max_tokens=MORE)
    read = trace(model, plain.tokens, names)
    for part in ("k", "v"):
        edits = {f"{AT}.attn.{part}": replace(clean, heads=1)}
        ids = [row[:n] for row, n in zip(plain.tokens, LENGTHS, strict=True)]
        patched = trace(model, plain.tokens, names, edits)  # the same tokens, so that only the patch differs
        steps = trace(model, ids, names, edits, max_tokens=MORE)
        for i in range(len(LENGTHS)):
            change = (patched.row(i)[names[0]] - read.row(i)[names[0]]).abs().amax((0, 1, 3))
            assert (change > 1e-3).tolist() == [False, False, True, True]
            assert float(change[:2].max()) <= 1e-5
            at = LENGTHS[i]  # what was read before any token was chosen
            torch.testing.assert_close(steps.row(i)[names[0]][:, :at], patched.row(i)[names[0]][:, :at], **CLOSE)
        assert plain[names[1]].shape == (3, 4, 15, 15)
        assert plain[names[2]].shape == (3, 15, 2, 8)


def test_frozen(model: Transformer) -> None:
    """Where who reads whom is held, what a head mixes is linear in the values; without it is not."""
    ids, name = prompts(), f"{AT}.attn.weights"
    first = trace(model, ids, (name, "logits"))
    other = {"embed.out": scale(1.3)}
    held = trace(model, ids, (name, "logits"), {**other, name: freeze(first)})
    free = trace(model, ids, (name, "logits"), other)
    for i in range(len(LENGTHS)):
        assert torch.equal(held.row(i)[name], first.row(i)[name])
        assert not torch.equal(free.row(i)[name], first.row(i)[name])
        assert not torch.equal(held.row(i)["logits"], free.row(i)["logits"])
    everything = trace(
        model, ids, ("logits",), {**other, f"{AT}.resid_in": freeze(trace(model, ids, (f"{AT}.resid_in",)))}
    )
    for i in range(len(LENGTHS)):
        torch.testing.assert_close(everything.row(i)["logits"], first.row(i)["logits"], rtol=0, atol=1e-5)
    with pytest.raises(RequestError, match="ends before"):
        trace(model, ids, (), {name: freeze(first)}, max_tokens=2)
    # In generation it holds the whole of what the trace has, keys that are there by then among it.
    long = trace(model, ids, (name,), max_tokens=MORE)
    again = trace(model, ids, (name,), {**other, name: freeze(long)}, max_tokens=MORE)
    for i in range(len(LENGTHS)):
        torch.testing.assert_close(again.row(i)[name], long.row(i)[name], rtol=0, atol=1e-6)


def test_no_gradient_goes_through_what_is_frozen(model: Transformer) -> None:
    ids, name = prompts()[:1], f"{AT}.resid_in"
    first = trace(model, ids, (name, "embed.out"), grad=True)
    for edit, goes in ((freeze(first), False), (replace(first), True)):
        found = trace(model, ids, ("embed.out", "logits"), {name: edit}, grad=True)
        ways = torch.autograd.grad(
            found["logits"][0, -1, 3], [found["embed.out"], first["embed.out"]], allow_unused=True, retain_graph=True
        )
        assert [way is not None and bool(way.any()) for way in ways] == [False, goes]


def test_the_mean_of_the_texts_own_tokens(model: Transformer) -> None:
    name = f"{AT}.mlp.act"
    plain = trace(model, prompts(), (name,))
    found = trace(model, prompts(), (name,), {name: mean()})
    for i in range(len(LENGTHS)):
        torch.testing.assert_close(
            found.row(i)[name], plain.row(i)[name].mean(1, keepdim=True).expand_as(plain.row(i)[name])
        )
    with pytest.raises(RequestError, match="part of the text"):
        trace(model, prompts(), (name,), {name: mean()}, max_tokens=1)


def test_of_a_source() -> None:
    """Positions of what an encoder computes, and of cross-attention's keys, are the source's."""
    model = tiny_seq2seq.transformer("t5")
    sources, ids = prompts(), [[2, 5], [2], [2, 7]]
    for name, word in (("encoder.layers.0.mlp.out", "source"), ("decoder.layers.1.cross.v", "source")):
        plain = trace(model, ids, (name,), sources=sources, max_tokens=2)
        found = trace(model, ids, (name,), {name: zero(positions=[3], rows=[0, 2])}, sources=sources, max_tokens=2)
        assert plain.axes[name][1] == word
        changed = (plain[name] != found[name]) & ~plain[name].isnan()
        assert changed.flatten(2).any(2).nonzero().tolist() == [[0, 3], [2, 3]]
    name = "decoder.layers.0.cross.weights"
    found = trace(model, ids, (name,), {name: zero(keys=2, positions=slice(1, None))}, sources=sources, max_tokens=2)
    for i in range(len(sources)):
        weights = found.row(i)[name]
        assert bool((weights[:, :, 1:, 2] == 0).all())
        assert bool((weights[:, :, 0, 2] > 0).all())


# ── edits that would change nothing ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "edit", "says"),
    [
        (f"{AT}.attn.z", zero(heads=4), "no such heads"),
        (f"{AT}.attn.v", zero(heads=[1, 2]), "no such heads"),  # there are two
        (f"{AT}.mlp.act", zero(heads=0), "no heads"),
        (f"{AT}.mlp.act", zero(neurons=4096), "no such neurons"),
        (f"{AT}.mlp.act", zero(neurons=slice(4096, None)), "no such neurons"),
        (f"{AT}.mlp.act", zero(experts=0), "no experts"),
        (f"{AT}.mlp.act", zero(keys=0), "no keys"),
        (f"{AT}.attn.out", zero(rows=3), "no such rows"),
        (f"{AT}.attn.out", zero(positions=15), "no text reached"),
        (f"{AT}.attn.out", zero(positions=[2, 99]), "no text reached"),
        (f"{AT}.attn.out", zero(positions=slice(15, None)), "no text reached"),
        (f"{AT}.attn.out", zero(positions=[[1], [8], [1]]), "no text reached"),  # the second has 4 + 4
        (f"{AT}.attn.out", zero(positions=12, rows=[1, 2]), "no text reached"),
        (f"{AT}.attn.out", zero(positions=[[1], [1]]), "for each row"),
        (f"{AT}.attn.weights", zero(keys=[3, 15]), "no text reached"),
        (f"{AT}.attn.out", add(torch.zeros(5)), "does not fit"),
        (f"{AT}.attn.out", add(torch.zeros(2, 15, 32)), "does not fit"),
        (f"{AT}.attn.out", steer(torch.zeros(31)), "does not fit"),
        (f"{AT}.attn.weights", mean(), "no mean"),
    ],
)
def test_an_edit_that_takes_hold_of_nothing(model: Transformer, name: str, edit: Change, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        trace(model, prompts(), ("logits",), {name: edit}, max_tokens=MORE)
    assert caught.value.field == f"edits/{name}"


def test_one_position_of_a_pattern_is_missed(model: Transformer) -> None:
    with pytest.raises(RequestError, match="no heads"):
        trace(model, prompts(), (), {"*.attn.*": zero(heads=1)})
    with pytest.raises(NameNotFound):
        trace(model, prompts(), (), {"*.attn.zz": zero(heads=1)})


def test_a_trace_without_what_is_picked(model: Transformer, clean: Trace) -> None:
    name = f"{AT}.attn.out"
    short = trace(model, [row[:4] for row in prompts()], (name,))
    with pytest.raises(RequestError, match="ends before"):
        trace(model, prompts(), (), {name: replace(short, positions=[5])})
    with pytest.raises(NameNotFound, match="not kept"):
        trace(model, prompts(), (), {f"{AT}.mlp.out": replace(short)})
    with pytest.raises(RequestError, match="does not fit"):
        trace(model, prompts()[:2], (), {name: replace(clean)})
    # Where nothing is said, what the trace has is put there, and the rest is as it was.
    plain, found = (trace(model, prompts(), (name,), e)[name] for e in ({}, {name: replace(short)}))
    assert torch.equal(found[:, :4], short[name][:, :4])
    assert torch.equal(found[0, 4:], plain[0, 4:])


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: zero(heads=-1), "heads"),
        (lambda: zero(heads=1.5), "heads"),
        (lambda: zero(heads=True), "heads"),
        (lambda: zero(heads=[]), "heads"),
        (lambda: zero(positions="3"), "positions"),
        (lambda: zero(positions=slice(0, 9, 2)), "positions"),
        (lambda: zero(positions=slice(-3, None)), "positions"),
        (lambda: zero(positions=[[1], 2]), "positions"),
        (lambda: scale("x"), "factor"),
        (lambda: scale(float("nan")), "factor"),
        (lambda: steer([1.0]), "direction"),
        (lambda: steer(torch.zeros(3), True), "strength"),
        (lambda: steer(torch.zeros(3), keep_length=1), "keep_length"),
        (lambda: freeze(torch.zeros(3)), "freeze"),
        (lambda: replace(0.0, positions=[1, 2], at=[3]), "at"),
        (lambda: replace(0.0, at=[3]), "at"),
        (lambda: replace(0.0, positions=[0, 0], at=[1, 2]), "positions"),  # which of the two?
    ],
)
def test_what_makes_no_sense(make: Callable[[], Change], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        make()
    assert caught.value.field == field


def test_numbers_that_are_none(model: Transformer) -> None:
    for given in ("x", None, float("nan"), True):
        with pytest.raises(RequestError) as caught:
            trace(model, prompts(), (), {f"{AT}.attn.out": replace(given)})
        assert caught.value.field == "given"


def test_edits_of_ones_own_may_know_their_place(model: Transformer) -> None:
    """Whatever has ``change`` is told the name, the axes and the positions, pass by pass."""
    seen: list[tuple[str, tuple[str, ...], list[list[int]]]] = []

    class Mine:
        def change(self, value: Tensor, place: Any) -> Tensor:
            seen.append((place.name, place.axes, place.positions.tolist()))
            return value

    trace(model, [[5, 6, 7], [8]], (), {f"{AT}.attn.z": Mine()}, max_tokens=2)
    axes = ("batch", "query", "head", "d_head")
    wanted = [[[0, 1, 2], [0, -1, -1]], [[3], [1]], [[4], [2]]]
    assert seen == [(f"{AT}.attn.z", axes, positions) for positions in wanted]
