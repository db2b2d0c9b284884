"""On SmolLM2 itself: what the lens says, heads that repeat, where a word matters, and king − man + woman."""

from __future__ import annotations

import pydoc_data.topics
import random
from pathlib import Path
from statistics import median

import pytest

import cutaway
from cutaway.inspection import (
    TunedLens,
    analogy,
    head_scores,
    lens,
    logit_difference,
    loss_without,
    patch_sweep,
    path_sweep,
    repeated,
    train_lens,
)
from cutaway.model import Model

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Model:
    return cutaway.load(str(smollm2_path))


def test_the_eiffel_tower(model: Model) -> None:
    """Nothing of it in the middle layers, and the city at the end."""
    ids = model.tokenizer.encode("The Eiffel Tower is in")
    (paris,) = model.tokenizer.encode(" Paris")
    found = lens(model.transformer, ids, target=paris, positions=[-1])
    assert int(found.tokens[-1, 0, 0]) == paris
    ranks = found.rank[:, 0].tolist()
    assert ranks[-1] == 0
    assert min(ranks[:15]) > 1000
    assert ranks[-2] < 200
    divergence = found.divergence[:, 0].tolist()
    assert divergence[-1] == 0
    assert min(divergence[:20]) > 3 * divergence[-2]


def test_induction_heads(model: Model) -> None:
    """Found on random tokens that come twice; without them the second time is no easier, without others it is."""
    rows = repeated(range(100, 20_000), 40, 2, seed=0)
    first = len(rows[0]) - 40
    found = head_scores(model.transformer, rows)
    best = found.top("induction", 20)
    assert [round(value, 1) >= 0.5 for *_, value in best[:5]] == [True] * 5

    def loss(heads: list[tuple[str, int]]) -> float:
        return loss_without(model.transformer, rows, heads, first=first)

    whole, without = loss([]), loss([(at, head) for at, head, _ in best[:5]])
    others = [(at, head) for at in found.layers for head in range(9) if (at, head) not in {b[:2] for b in best}]
    draw = random.Random(0)
    drawn = [loss(draw.sample(others, 5)) for _ in range(3)]
    print(f"loss {whole:.2f}, without five induction heads {without:.2f}, without five others {sorted(drawn)}")
    assert without > 3 * whole
    assert median(drawn) < 1.25 * whole


def test_where_the_subject_matters(model: Model) -> None:
    """The country's token in the early layers, the last token in the late ones, and one head that carries it over."""
    clean, corrupt = (model.tokenizer.encode(f"The capital of {name} is") for name in ("France", "Italy"))
    metric = logit_difference(model.tokenizer.encode(" Paris")[0], model.tokenizer.encode(" Rome")[0])
    found = patch_sweep(model.transformer, [clean], [corrupt], metric)
    share = found.normalised
    assert found.clean > 3 > -3 > found.corrupt
    assert bool((share[:20, 3] > 0.9).all())
    assert bool((share[25:, 4] > 0.9).all())
    assert float(share[:, :3].abs().max()) < 1e-3
    heads = patch_sweep(model.transformer, [clean], [corrupt], metric, "head", positions=[-1])
    at, head, much = heads.top(1)[0]
    assert (at, head) == ("decoder.layers.23.attn.z", "4")
    assert much > 0.5


@pytest.mark.slow
def test_who_tells_the_end(model: Model) -> None:
    """The head that carries the country over writes the answer itself, more than any other part."""
    clean, corrupt = (model.tokenizer.encode(f"The capital of {name} is") for name in ("France", "Italy"))
    metric = logit_difference(model.tokenizer.encode(" Paris")[0], model.tokenizer.encode(" Rome")[0])
    at, head, much = path_sweep(model.transformer, [clean], [corrupt], metric).top(1)[0]
    assert (at, head) == ("decoder.layers.23.attn", 4)
    assert much > 0.2


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ((" king", " man", " woman"), " queen"),
        ((" walking", " walk", " swim"), " swimming"),
        ((" bigger", " big", " small"), " smaller"),
        ((" Berlin", " Germany", " Spain"), " Madrid"),
    ],
)
def test_analogies(model: Model, words: tuple[str, str, str], answer: str) -> None:
    a, b, c = (model.tokenizer.encode(word)[0] for word in words)
    found = analogy(model.transformer, a, b, c, spell=lambda token: model.tokenizer.decode([token]))
    assert found.words[0] == answer


@pytest.mark.slow
def test_a_tuned_lens(model: Model, tmp_path: Path) -> None:
    """A few minutes on Python's own documentation: far nearer to the end, on pages it has not seen, in every layer."""
    ids = model.tokenizer.encode(" ".join(" ".join(pydoc_data.topics.topics.values()).split()))
    rows = [ids[i : i + 64] for i in range(0, len(ids) - 64, 64)]
    random.Random(0).shuffle(rows)
    tuned = train_lens(model.transformer, rows[8:72], steps=24, rows=4)
    new = [lens(model.transformer, row, tuned=t).divergence[:-1].mean(1) for row in rows[:4] for t in (None, tuned)]
    plain, better = (sum(new[i::2]) / 4 for i in (0, 1))
    print(f"KL of the logit lens {float(plain.mean()):.2f}, of the tuned {float(better.mean()):.2f}")
    assert bool((better < 0.8 * plain).all())
    assert float(better.mean()) < 0.15 * float(plain.mean())
    tuned.save(tmp_path / "lens")
    TunedLens.load(model.transformer, tmp_path / "lens")
