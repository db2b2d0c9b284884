"""A tuned lens is nearer to the end than the logit lens, on texts it has not seen, and it is of one model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cutaway.errors import FormatError, RequestError, ResumeMismatch, ShapeMismatch
from cutaway.formats.safetensors import save_safetensors
from cutaway.inspection import TunedLens, lens, trace, train_lens
from cutaway.models import Transformer
from tests.reference import tiny, tiny_encoders, tiny_seq2seq

tuning = sys.modules["cutaway.inspection.tuning"]


def texts(n: int, seed: int = 5) -> list[list[int]]:
    """Of different lengths."""
    return [row[: 8 + i % 5].tolist() for i, row in enumerate(tiny.ids(n, 12, seed=seed))]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny.transformer("gemma2")


@pytest.fixture(scope="module")
def tuned(model: Transformer) -> TunedLens:
    return train_lens(model, texts(60), steps=15, rate=1e-3, seed=1)


def apart(model: Transformer, tuned: TunedLens | None, rows: list[list[int]]) -> Tensor:
    """Mean KL of each layer on texts, as the lens itself tells it. [layer]"""
    told = [lens(model, row, tuned=tuned).divergence for row in rows]
    return torch.cat(told, 1).mean(1)[:-1]


def test_it_is_nearer(model: Transformer, tuned: TunedLens) -> None:
    """On texts that it has never seen."""
    new = texts(20, seed=77)
    plain, better = apart(model, None, new), apart(model, tuned, new)
    assert (better < 0.75 * plain).all(), (plain, better)
    kinds = lens(model, new[0], tuned=tuned).kinds
    assert kinds == ("translated",) * 3 + ("stream",)
    # What it says of itself is of the same kind: mean KL on texts kept from training.
    assert (tuned.tuned <= tuned.plain).all()
    torch.testing.assert_close(tuned.plain, plain, rtol=0.2, atol=0.1)


def test_what_it_says(model: Transformer, tuned: TunedLens) -> None:
    """A point of it by hand: the map, the last norm, the head and its cap."""
    ids = texts(1, seed=9)[0]
    name = "decoder.layers.1.resid_in"
    x = trace(model, [ids], (name,))[name][0]
    y = x + x @ tuned.weight[1].t() + tuned.bias[1]
    expected = model.unembed(model.decoder.norm(y)[None])[0].softmax(-1)
    found = lens(model, ids, (name,), k=64, tuned=tuned)
    got = torch.zeros(expected.shape).scatter(1, found.tokens[0], found.values[0])
    torch.testing.assert_close(got, expected.detach(), rtol=1e-4, atol=1e-6)
    # Where it knows nothing, the point is read as it is.
    assert lens(model, ids, ("decoder.layers.1.attn.resid",), tuned=tuned).kinds == ("stream",)
    assert any("trained" in note for note in found.notes)


def test_the_regression_is_least_squares(model: Transformer) -> None:
    """Weighted by the last norm's scale: against torch's own solver, over all tokens at once."""
    rows = texts(40)
    reader = tuning._Reader(model, rows, None)
    maps = tuning.regression(reader, [[i, i + 1] for i in range(0, 40, 2)], 0.0, lambda _: None)
    streams, end = reader.streams(range(40))
    assert len(end) == sum(map(len, rows))  # no pads
    weight = torch.rsqrt(end.pow(2).mean(-1, keepdim=True))
    for layer, x in enumerate(streams):
        one = torch.cat([x, torch.ones(len(x), 1)], 1)
        solved = torch.linalg.lstsq((one * weight).double(), ((end - x) * weight).double()).solution.float()
        torch.testing.assert_close(maps.weight[layer].t(), solved[:-1], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(maps.bias[layer], solved[-1], rtol=1e-2, atol=2e-2)


def test_steps_go_down(model: Transformer) -> None:
    """From nothing at all, without the regression's help; the model's weights stay, and get no gradient."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = texts(30)
    reader = tuning._Reader(model, rows, None)
    d, n = model.spec.d_model, len(reader.names)
    nothing = tuning.Maps(torch.zeros(n, d, d), torch.zeros(n, d))
    how = tuning.Steps(40, 4, 16, 5e-3)
    maps = tuning._stepped(reader, range(24), nothing, how, torch.Generator().manual_seed(0), lambda _: None)
    held = range(24, 30)
    assert (reader.divergence(held, maps) < 0.8 * reader.divergence(held, nothing)).all()
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


def test_never_worse(model: Transformer) -> None:
    """Steps far too large, a regression held back to nothing: each layer keeps what was best."""
    wild = train_lens(model, texts(20), steps=3, rate=50.0, ridge=1e9)
    assert (wild.tuned <= wild.plain + 1e-6).all()


def test_the_same_seed(model: Transformer) -> None:
    one, two = (train_lens(model, texts(12), steps=2, seed=3) for _ in range(2))
    assert torch.equal(one.weight, two.weight)
    assert torch.equal(one.tuned, two.tuned)


def test_saved(model: Transformer, tuned: TunedLens, tmp_path: Path) -> None:
    path = tmp_path / "lens.safetensors"
    tuned.save(path)
    again = TunedLens.load(model, path)
    assert again.names == tuned.names
    for name in ("weight", "bias", "plain", "tuned"):
        assert torch.equal(getattr(again, name), getattr(tuned, name))
    with pytest.raises(ResumeMismatch, match="other weights"):
        TunedLens.load(tiny.transformer("gemma2", seed=1), path)
    with pytest.raises(ResumeMismatch, match="another model"):
        TunedLens.load(tiny.transformer("llama"), path)
    other = tmp_path / "other.safetensors"
    save_safetensors(other, {"weight": tuned.weight}, {"format": "something"})
    with pytest.raises(FormatError, match="no tuned lens"):
        TunedLens.load(model, other)
    save_safetensors(other, {"weight": tuned.weight}, {"format": "cutaway tuned lens", "version": "1", **tuned.model})
    with pytest.raises(ShapeMismatch):
        TunedLens.load(model, other)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(FormatError):
        TunedLens.load(model, path)


def test_other_kinds() -> None:
    """Masked language models, whose head bends what it reads, and the decoders of encoder–decoders."""
    bert = tiny.transformer(tiny_encoders.config("bert-mlm"))
    masked = train_lens(bert, texts(20), steps=1)
    assert (masked.tuned < masked.plain).all()
    for name in ("t5", "bart"):
        model, rows = tiny_seq2seq.transformer(name), texts(20)
        found = train_lens(model, rows, sources=rows[::-1], steps=1)
        assert (found.tuned < found.plain).all()
        assert lens(model, rows[0], source=rows[-1], tuned=found).kinds[0] == "translated"


def test_refusals(model: Transformer) -> None:
    told: list[tuple[int, int]] = []
    train_lens(model, texts(9), steps=2, progress=lambda done, of: told.append((done, of)))
    assert told[0] == (0, 7)
    assert told[-1] == (7, 7)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    with pytest.raises(RequestError, match="too few"):
        train_lens(model, texts(1))
    with pytest.raises(RequestError, match="no head"):
        train_lens(tiny.transformer(tiny_encoders.config("bert")), texts(9))
    with pytest.raises(RequestError, match="a source for each"):
        train_lens(tiny_seq2seq.transformer("t5"), texts(9), sources=texts(3))
