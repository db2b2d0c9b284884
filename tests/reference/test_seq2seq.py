"""Encoder–decoders against transformers, a row for each option of a config."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from cutaway.checkpoints.save import save_folder
from cutaway.families import family_of
from cutaway.formats.rules import saved
from cutaway.models import Transformer
from tests.reference import tiny_seq2seq as tiny
from tests.reference.conftest import open_folder
from tests.reference.test_gradients import gradients, relative

Folders = Callable[[str], Path]
Note = Callable[[str, str, float], float]
HOW = ("fused", "explicit", "blockwise")
KEY_BIAS = re.compile(r"k_proj\.bias$|\.body\.k\.bias$")


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A case's name to the folder that transformers wrote for it."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = tiny.write(tiny.config(name), tmp_path_factory.mktemp("tiny") / name)
        return made[name]

    return find


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference."""
    assert a.shape == b.shape
    return float((a - b).abs().max())


def texts() -> tuple[Tensor, Tensor]:
    """A source and a target for each of two rows."""
    return tiny.ids(2, 21), tiny.ids(2, 17, seed=2)


@pytest.mark.parametrize("name", tiny.CASES)
@torch.no_grad()
def test_numbers(name: str, pair_of: Folders, measured: Note) -> None:
    """Encoder, decoder and logits, by all three attentions."""
    source, target = texts()
    theirs = tiny.outputs(pair_of(name), source, target)
    model = open_folder(pair_of(name))
    assert theirs[2].std() > 0.2
    for how in HOW:
        model.attention = how  # type: ignore[assignment]
        hidden = model.hidden(target, source=model.read(source))
        ours = (model.encode(source), hidden, model.unembed(hidden))
        columns = ("encoder", "decoder", "logits") if how == "fused" else (how,) * 3
        for column, one, two in zip(columns, ours, theirs, strict=True):
            assert measured(name, column, apart(one, two)) <= 1e-4, how


def padded(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Rows of different lengths in one tensor with other tokens at the pads, and their positions."""
    width = max(row.shape[1] for row in rows) + 2
    ids, positions = tiny.ids(len(rows), width, seed=9), torch.full((len(rows), width), -1)
    for i, row in enumerate(rows):
        n = row.shape[1]
        where = torch.arange(n) + (width - n if side == "left" else 0)
        if side == "between":
            where = torch.linspace(0, width - 1, n).long() if n > 1 else torch.tensor([width // 2])
        ids[i, where], positions[i, where] = row[0], torch.arange(n)
    return ids, positions


@pytest.mark.parametrize("name", tiny.CASES)
@torch.no_grad()
def test_padded_batches(name: str, pair_of: Folders, measured: Note) -> None:
    """Pads left, right or in the middle, of source and target, change nothing, whatever ids stand there."""
    sources = [tiny.ids(1, n, seed=n) for n in (20, 1, 9)]
    targets = [tiny.ids(1, n, seed=50 + n) for n in (3, 14, 8)]
    alone = [tiny.outputs(pair_of(name), *pair)[2] for pair in zip(sources, targets, strict=True)]
    model = open_folder(pair_of(name))
    for sides in (("left", "right"), ("right", "left"), ("between", "between")):
        (source, s_places), (target, t_places) = padded(sources, sides[0]), padded(targets, sides[1])
        for how in HOW if name in tiny.FAMILIES else HOW[:1]:
            model.attention = how  # type: ignore[assignment]
            logits = model(target, t_places, source=model.read(source, s_places))
            assert logits.isfinite().all()
            for i, wanted in enumerate(alone):
                assert measured(name, "padded", apart(logits[i][t_places[i] >= 0][None], wanted)) <= 1e-4, how


@pytest.mark.parametrize("name", tiny.CASES)
@torch.no_grad()
def test_any_split(name: str, pair_of: Folders, measured: Note) -> None:
    """A target fed in parts, by random cuts and token by token; the source is read once."""
    source, target = texts()
    whole = tiny.outputs(pair_of(name), source, target)[2]
    model, chance = open_folder(pair_of(name)), random.Random(name)
    read = model.read(source)
    cuts = [0, *sorted(chance.sample(range(1, 17), 4)), 17]
    for sizes, paged in (([1] * 17, False), ([b - a for a, b in pairwise(cuts)], False), ([4, 1, 12], True)):
        cache = model.new_cache(2, capacity=4, source=read, paged=paged)
        parts = [model(part, cache=cache) for part in target.split(sizes, 1)]
        assert measured(name, "cached", apart(torch.cat(parts, 1), whole)) <= 1e-4, sizes
        assert cache.lengths == [17, 17]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", tiny.FAMILIES)
@torch.no_grad()
def test_ragged_steps_and_rows_picked_out(name: str, how: Any, pair_of: Folders, measured: Note) -> None:
    """Sources and prompts of different lengths go on together; then some rows, one of them twice."""
    sources = [tiny.ids(1, n, seed=n) for n in (20, 1, 9)]
    targets = [tiny.ids(1, n + 10, seed=50 + n) for n in (1, 6, 3)]
    alone = [tiny.outputs(pair_of(name), *pair)[2][0] for pair in zip(sources, targets, strict=True)]
    model = open_folder(pair_of(name))
    model.attention = how
    source, places = padded(sources, "right")
    cache = model.new_cache(3, capacity=4, source=model.read(source, places))
    prompt, positions = padded([t[:, :-10] for t in targets], "left")
    model(prompt, positions, cache=cache)
    at, rows = [1, 6, 3], [0, 1, 2]
    for step in range(10):
        if step == 4:
            rows = [2, 0, 2]
            cache.select(rows)
        now = torch.stack([targets[row][0, at[row] + step] for row in rows])[:, None]
        logits = model(now, cache=cache)
        for i, row in enumerate(rows):
            assert measured(name, "cached", apart(logits[i, 0], alone[row][at[row] + step])) <= 1e-4
    assert cache.lengths == [13, 11, 13]


@pytest.mark.parametrize("name", tiny.FAMILIES)
@torch.no_grad()
def test_packed_documents_do_not_meet(name: str, pair_of: Folders) -> None:
    """Case M04: a target reads the source of its own document only."""
    lengths = ((7, 4), (5, 9))
    pairs = [(tiny.ids(1, n, seed=n), tiny.ids(1, m, seed=40 + m)) for n, m in lengths]
    alone = [tiny.outputs(pair_of(name), *pair)[2] for pair in pairs]
    model = open_folder(pair_of(name))

    def packed(side: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = [pair[side] for pair in pairs]
        places = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
        segments = torch.cat([torch.full((row.shape[1],), i) for i, row in enumerate(rows)])[None]
        return torch.cat(rows, 1), places, segments

    for how in HOW:
        model.attention = how  # type: ignore[assignment]
        logits = model(*packed(1), source=model.read(*packed(0)))
        for part, wanted in zip(logits.split([4, 9], 1), alone, strict=True):
            assert apart(part, wanted) <= 1e-4


@pytest.mark.parametrize("name", tiny.CASES)
def test_gradients(name: str, pair_of: Folders, measured: Note) -> None:
    source, target = texts()
    model, reference = open_folder(pair_of(name)), tiny.reference(pair_of(name))
    theirs = gradients(reference, reference(input_ids=source, decoder_input_ids=target, use_cache=False).logits)
    if name.startswith("marian"):
        theirs = {key: grad for key, grad in theirs.items() if "embed_positions" not in key}
    rules = family_of(model.spec.family).rules(model.spec)
    for how in HOW if name in tiny.FAMILIES else HOW[:1]:
        model.attention = how  # type: ignore[assignment]
        ours = saved(rules, gradients(model, model(target, source=model.read(source))))
        assert measured(name, "gradient", relative(moving(ours), moving(theirs))) <= 1e-4


def moving(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what is nothing but rounding, and what one of the two keeps constant.

    A key's bias moves every score of a query alike, so that its gradient is zero. The shift of the logits is a constant
    in transformers.
    """
    usual = torch.stack([grad.norm() for grad in grads.values()]).median()
    assert all(grad.norm() < 1e-4 * usual for key, grad in grads.items() if KEY_BIAS.search(key))
    return {key: grad for key, grad in grads.items() if not KEY_BIAS.search(key) and key != "final_logits_bias"}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_three_attentions(name: str, training: bool, measured: Note) -> None:
    """They agree forwards and backwards, with pads on both sides."""
    model = tiny.transformer(name).train(training)
    source, s_places = padded([tiny.ids(1, n, seed=n) for n in (12, 5)], "left")
    target, t_places = padded([tiny.ids(1, n, seed=n) for n in (3, 11)], "right")
    results = []
    for how in HOW:
        model.attention = how  # type: ignore[assignment]
        logits = model(target, t_places, source=model.read(source, s_places))
        logits = torch.where(t_places[..., None] >= 0, logits, 0.0)
        results.append((logits.detach(), gradients(model, logits)))
    for logits, back in results[1:]:
        assert measured(name, "two attentions", apart(results[0][0], logits)) <= 1e-4
        assert relative(moving(back), moving(results[0][1])) <= 1e-4


RATES = {"dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.3}
DROPPING = {"t5": {"dropout_rate": 0.1}, "t5-v1.1": {"dropout_rate": 0.1}, "bart": RATES, "marian": RATES}


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_is_in_the_same_places(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training both drop the same shares of tensors of the same shapes, in the same order."""
    folder = tiny.write({**tiny.config(name), **DROPPING[name]}, tmp_path)
    seen: list[tuple[tuple[int, ...], float]] = []

    def note(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training and p:
            seen.append((tuple(x.shape), p))
        return x

    monkeypatch.setattr(F, "dropout", note)
    source, target = texts()
    reference, model = tiny.reference(folder).train(), open_folder(folder).train()
    model.attention = "explicit"
    theirs = reference(input_ids=source, decoder_input_ids=target, use_cache=False).logits
    wanted, seen = seen[:], []
    with torch.no_grad():
        assert apart(model(target, source=model.read(source)), theirs) <= 1e-4
    assert seen == wanted
    assert {p for _, p in seen} == set(DROPPING[name].values())


@pytest.mark.parametrize("name", tiny.CASES)
@torch.no_grad()
def test_saved_and_loaded(name: str, pair_of: Folders, tmp_path: Path, measured: Note) -> None:
    """What comes back is the same bits, for us and for transformers, in its format and in ours."""
    model, (source, target) = open_folder(pair_of(name)), texts()
    logits = model(target, source=model.read(source))
    for own in (False, True):
        save_folder(model, tmp_path / str(own), own=own)
        again = open_folder(tmp_path / str(own))
        assert again.spec == model.spec
        bits, back = model.state_dict(), again.state_dict()
        assert bits.keys() == back.keys()
        assert all(torch.equal(bits[key], back[key]) for key in bits)
        assert torch.equal(again(target, source=again.read(source)), logits)
    first, second = (load_file(folder / "model.safetensors") for folder in (pair_of(name), tmp_path / "False"))
    unused = {"model.shared.weight"} if model.spec.source_vocab_size else set()
    assert first.keys() - unused == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in second)
    assert measured(name, "saved", apart(tiny.outputs(tmp_path / "False", source, target)[2], logits)) <= 1e-4


@pytest.mark.parametrize("cls", tiny.BARE)
@torch.no_grad()
def test_without_a_head(cls: str, tmp_path: Path, measured: Note) -> None:
    """The body alone, and T5's encoder alone: what one asks for is the stream."""
    values = tiny.config(tiny.BARE[cls])
    tiny.write(values, tmp_path / "theirs", cls=cls)
    source, target = texts()
    model, reference = open_folder(tmp_path / "theirs"), tiny.reference(tmp_path / "theirs", cls)
    save_folder(model, tmp_path / "ours")
    again = tiny.reference(tmp_path / "ours", cls)
    assert again.config.architectures == [cls]
    options = {} if cls == "T5EncoderModel" else {"decoder_input_ids": target}
    wanted = reference(input_ids=source, **options).last_hidden_state
    ours = model(source) if not options else model(target, source=model.read(source))
    assert measured(f"{cls} ({tiny.BARE[cls]})", "decoder" if options else "encoder", apart(ours, wanted)) <= 1e-4
    assert torch.equal(again(input_ids=source, **options).last_hidden_state, wanted)
    assert open_folder(tmp_path / "ours").spec == model.spec


@torch.no_grad()
def test_waves_far_out(tmp_path: Path, measured: Note) -> None:
    """The thousandth of Marian's positions is as exact as the first."""
    folder = tiny.write({**tiny.config("marian"), "max_position_embeddings": 1024}, tmp_path)
    source, target = tiny.ids(1, 1000), tiny.ids(1, 900, seed=2)
    model = open_folder(folder)
    ours: Transformer = model
    wanted = tiny.outputs(folder, source, target)[2]
    assert measured("marian", "far", apart(ours(target, source=ours.read(source)), wanted)) <= 1e-4
