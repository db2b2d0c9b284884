"""Every piece of a sweep against transformers with a hook that does the same."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from cutaway.errors import NameNotFound, RequestError
from cutaway.inspection import (
    Sweep,
    Target,
    ablation_sweep,
    edits,
    log_probability,
    logit_difference,
    logprob,
    loss_without,
    patch_sweep,
    path_sweep,
    trace,
)
from tests.inspection.against import Pair, hooked, pair, places
from tests.reference import tiny, tiny_encoders, tiny_seq2seq

CASES = ("llama", "gemma2", "mixtral-window", "gpt2", "bert-mlm", "t5")
CLEAN, CORRUPT = [5, 9, 17, 7, 30, 11, 40], [5, 9, 33, 7, 30, 25, 40]
AT = 6
METRIC = logit_difference(21, 34)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair(request.param, tmp_path_factory.mktemp("patching") / request.param)


def kept(case: Pair, ids: list[int], module: Any, of: str) -> Tensor:
    found: list[Tensor] = []
    hooked(case, ids, module, of, lambda x: (found.append(x), x)[1])
    return found[0]


def sweep(case: Pair, over: Any, **options: Any) -> Sweep:
    if case.source is not None:
        options["clean_sources"] = [case.source]
    return patch_sweep(case.ours, [CLEAN], [CORRUPT], METRIC, over, answer_at=AT, **options)


def by_hook(case: Pair, of: str, where: str, index: int, part: Any, direction: str) -> float:
    base, other = (CORRUPT, CLEAN) if direction == "denoise" else (CLEAN, CORRUPT)
    module = getattr(places(case.theirs, index), where)
    given = kept(case, other, module, of)

    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[part] = given[part]
        return x

    scores = hooked(case, base, module, of, change)[AT]
    return float(scores[21] - scores[34])


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_layer_by_position(case: Pair, direction: Any) -> None:
    found = sweep(case, "position", direction=direction, batch=3)
    assert found.values.shape == (case.layers, len(CLEAN))
    for layer in range(case.layers):
        for place in range(len(CLEAN)):
            expected = by_hook(case, "input", "layer", layer, (0, place), direction)
            assert float(found.values[layer, place]) == pytest.approx(expected, abs=5e-4), (layer, place)
    assert found.clean != pytest.approx(found.corrupt, abs=0.03)
    if case.causal:  # nothing before the first token that differs
        start = {"denoise": 0.0, "noise": 1.0}[direction]
        alike = torch.full((case.layers, 2), start).double()
        torch.testing.assert_close(found.normalised[:, :2], alike, rtol=0, atol=1e-4)


def test_layer_by_head(case: Pair) -> None:
    found = sweep(case, "head", batch=5)
    n = case.ours.spec.stacks[case.ours.spec.main].layers[0].attention.n_heads
    assert found.values.shape == (case.layers, n)
    for layer in range(case.layers):
        for head in range(n):
            width = places(case.theirs, layer).heads.weight.numel() // case.ours.spec.d_model // n
            part = (0, slice(None), slice(head * width, (head + 1) * width))
            expected = by_hook(case, "input", "heads", layer, part, "denoise")
            assert float(found.values[layer, head]) == pytest.approx(expected, abs=5e-4), (layer, head)


def test_branch_by_position(case: Pair) -> None:
    found = sweep(case, "branch", positions=[2, 5, -1])
    assert found.columns == ("17", "11", "40") or found.columns == ("33", "25", "40")
    for row, name in enumerate(found.rows):
        layer, branch = int(name.split(".")[2]), name.split(".")[3]
        if branch == "cross":
            continue
        for column, place in enumerate((2, 5, 6)):
            where = "mlp" if branch == "moe" else branch
            expected = by_hook(case, "output", where, layer, (0, place), "denoise")
            assert float(found.values[row, column]) == pytest.approx(expected, abs=5e-4), name


@pytest.mark.parametrize("over", ["position", "head"])
@pytest.mark.parametrize("longer", ["clean", "corrupt"])
def test_aligned_from_the_end(case: Pair, longer: str, over: Any) -> None:
    """Of texts of two lengths: every place that is as far from the end in both, put over by a hook in transformers."""
    texts = {"clean": CLEAN, "corrupt": CORRUPT} | {longer: [3, 8, *(CLEAN if longer == "clean" else CORRUPT)]}
    options: dict[str, Any] = {} if case.source is None else {"clean_sources": [case.source]}
    found = patch_sweep(
        case.ours, [texts["clean"]], [texts["corrupt"]], METRIC, over, answer_at=-1, align="end", **options
    )
    n = len(CLEAN) - 1  # but for the first of the shorter, where heads rest
    assert "aligned from the end" in found.figure().notes[0]
    heads = case.ours.spec.stacks[case.ours.spec.main].layers[0].attention.n_heads
    for layer in range(case.layers):
        module = getattr(places(case.theirs, layer), "layer" if over == "position" else "heads")
        given = kept(case, texts["clean"], module, "input")
        wide = places(case.theirs, layer).heads.weight.numel() // case.ours.spec.d_model // heads
        for column in range(n if over == "position" else heads):
            part: Any = (0, column - n)
            if over == "head":
                part = (0, slice(-n, None), slice(column * wide, (column + 1) * wide))

            def change(x: Tensor, part: Any = part, given: Tensor = given) -> Tensor:
                x = x.clone()
                x[part] = given[part]
                return x

            scores = hooked(case, texts["corrupt"], module, "input", change)[-1]
            expected = float(scores[21] - scores[34])
            assert float(found.values[layer, column]) == pytest.approx(expected, abs=5e-4), (layer, column)
    if over == "position":
        assert found.columns == tuple(str(token) for token in texts["clean"][-n:])


def test_what_cannot_be_aligned() -> None:
    model = tiny.transformer("llama")
    long = [3, *CLEAN]

    def ask(one: list[int] = CLEAN, two: list[int] = long, **more: Any) -> Sweep:
        return patch_sweep(model, [one], [two], METRIC, **{"align": "end", **more})

    assert ask(positions=[0]).columns == ("5",)  # the first too, where it is asked for
    assert ask(one=long, two=CLEAN, positions=[-1]).columns == ("40",)
    whole = patch_sweep(model, [CLEAN], [CORRUPT], METRIC).as_dict()
    assert patch_sweep(model, [CLEAN], [CORRUPT], METRIC, align="end").as_dict() == whole
    for more, says in (
        ({"one": long, "two": CLEAN, "positions": [0]}, "no token there"),
        ({"one": long, "two": CLEAN, "answer_at": 0}, "no token there"),
        ({"at": "attn.weights", "over": "head"}, "each token that is read"),
        ({"align": "start"}, "way to align"),
        ({"one": [3]}, "too short"),
        ({"align": None}, "one length"),
    ):
        with pytest.raises(RequestError, match=says):
            ask(**more)


def test_what_is_explained_can_be_swept_for() -> None:
    """A target is a metric: the same numbers as those of the same name, and of a label."""
    model = tiny.transformer("llama")
    for target, metric in (
        (Target("difference", (21, 34)), METRIC),
        (logprob(21), log_probability(21)),
        (Target("logit", (21,)), lambda scores: scores[..., 21]),
    ):
        one, two = (patch_sweep(model, [CLEAN], [CORRUPT], asked) for asked in (target, metric))
        assert torch.equal(one.values, two.values)
        assert (one.clean, one.corrupt) == (two.clean, two.corrupt)
        paths = [path_sweep(model, [CLEAN], [CORRUPT], asked).values.nan_to_num() for asked in (target, metric)]
        assert torch.equal(*paths)
    assert patch_sweep(model, [CLEAN], [CORRUPT], logprob(21)).metric == "log-probability of 21"
    with pytest.raises(RequestError, match="not a token"):
        patch_sweep(model, [CLEAN], [CORRUPT], logprob(64))


def test_pairs_and_batches() -> None:
    """Several pairs, each with its own two tokens: the mean of what each gives alone, however many rows at a time."""
    model = tiny.transformer("llama")
    clean, corrupt = tiny.ids(3, 6).tolist(), tiny.ids(3, 6, seed=2).tolist()
    tokens, others = [4, 5, 6], [7, 8, 9]
    alone = [
        patch_sweep(model, [a], [b], logit_difference(t, o), "head").values
        for a, b, t, o in zip(clean, corrupt, tokens, others, strict=True)
    ]
    told: list[tuple[int, int]] = []
    for batch in (1, 7, 100):
        found = patch_sweep(
            model, clean, corrupt, logit_difference(tokens, others), "head", batch=batch,
            progress=lambda done, of: told.append((done, of)),
        )  # fmt: skip
        torch.testing.assert_close(found.values, torch.stack(alone).mean(0), rtol=1e-4, atol=1e-4)
    assert told[0] == (0, 12)
    assert told.count((12, 12)) == 3
    assert (2, 12) in told  # seven rows hold two of three pairs


def test_rows_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["cutaway.inspection.sites"]
    real, rows = module.trace, []
    monkeypatch.setattr(module, "trace", lambda *a, **k: rows.append(len(a[1])) or real(*a, **k))
    patch_sweep(tiny.transformer("llama"), [CLEAN], [CORRUPT], METRIC, batch=4)
    assert max(rows) == 4


def test_one_kv_head() -> None:
    """Case I06: patching key/value head 1 changes what query heads 2 and 3 read, and nothing else."""
    model = tiny.transformer("llama")
    found = patch_sweep(model, [CLEAN], [CORRUPT], METRIC, "head", at="attn.v")
    assert found.values.shape == (3, 2)
    name = "decoder.layers.0.attn.v"
    given = trace(model, [CLEAN], (name,))[name]

    def change(v: Tensor) -> Tensor:
        v = v.clone()
        v[:, :, 1] = given[:, :, 1]
        return v

    was = trace(model, [CORRUPT], ("decoder.layers.0.attn.z",))["decoder.layers.0.attn.z"]
    seen = trace(model, [CORRUPT], ("decoder.layers.0.attn.z", "logits"), {name: change})
    moved = (seen["decoder.layers.0.attn.z"] - was).abs().amax((0, 1, 3)) > 1e-6
    assert moved.tolist() == [False, False, True, True]
    scores = seen["logits"][0, -1]
    assert float(found.values[0, 1]) == pytest.approx(float(scores[21] - scores[34]), abs=1e-4)


def test_metrics() -> None:
    scores = torch.randn(2, 3, 10)
    expected = scores.log_softmax(-1)[:, torch.arange(3), torch.tensor([1, 2, 3])]
    torch.testing.assert_close(log_probability([1, 2, 3])(scores), expected)
    torch.testing.assert_close(logit_difference(4, 5)(scores), scores[..., 4] - scores[..., 5])
    assert logit_difference(4, 5).words(lambda t: f"w{t}") == "score of “w4” less that of “w5”"
    model = tiny.transformer("llama")
    found = patch_sweep(model, [CLEAN], [CORRUPT], lambda s: s[..., 21] - s[..., 34])
    torch.testing.assert_close(found.values, patch_sweep(model, [CLEAN], [CORRUPT], METRIC).values)


def test_where_the_source_is_another() -> None:
    """Encoder–decoders: the encoder's own stream, and what cross-attention reads."""
    model = tiny_seq2seq.transformer("t5")
    found = patch_sweep(
        model, [CLEAN], [CLEAN], METRIC, stack="encoder", clean_sources=[CLEAN[:5]], corrupt_sources=[CORRUPT[:5]]
    )
    assert found.values.shape == (3, 5)
    # The first stream at the only place that differs is the whole of the difference.
    torch.testing.assert_close(found.normalised[0].float(), torch.tensor([0, 0, 1.0, 0, 0]), rtol=0, atol=1e-4)
    with pytest.raises(RequestError, match="no pairs"):
        patch_sweep(model, [CLEAN], [CLEAN], METRIC, clean_sources=[CLEAN[:5]], corrupt_sources=[CORRUPT[:4]])
    cross = patch_sweep(
        model, [CLEAN], [CLEAN], METRIC, "head", at="cross.z", clean_sources=[CLEAN[:5]], corrupt_sources=[CORRUPT[:5]]
    )
    assert cross.values.shape == (2, 4)


def one_by_hand(model: Any, name: str, sources: list[list[int]], **at: Any) -> float:
    """The metric where part of what one source gave is put into the run of the other, by an edit of that name."""
    clean = trace(model, [TARGET], (name,), sources=sources[:1])
    seen = trace(model, [TARGET], ("logits",), {name: edits.replace(clean, **at)}, sources=sources[1:])
    return float(seen["logits"][0, -1, 21] - seen["logits"][0, -1, 34])


TARGET = [2, 9, 17, 30]


@pytest.mark.parametrize("family", ["bart", "t5", "marian"])
@pytest.mark.parametrize("length", [3, 4, 6])
def test_what_a_decoder_reads_of_a_source(family: str, length: int) -> None:
    """A source shorter than, as long as, and longer than what the decoder reads: each piece against one edit."""
    model = tiny_seq2seq.transformer(family)
    sources = [[7, 12, 40, 5, 9, 2][:length], [7, 31, 33, 5, 8, 2][:length]]
    heads = model.spec.stacks["decoder"].layers[0].branches[1].body.n_heads
    given: Any = {"clean_sources": sources[:1], "corrupt_sources": sources[1:]}

    def ask(over: Any, at: str, **more: Any) -> Sweep:
        return patch_sweep(model, [TARGET], [TARGET], METRIC, over, at=at, **given, **more)

    for at in ("cross.weights", "cross.scores", "cross.k", "cross.v", "cross.z", "attn.weights"):
        found = ask("head", at)
        assert found.values.shape == (model.spec.n_layers, heads)
        for row, name in enumerate(found.rows):
            for head in range(heads):
                expected = one_by_hand(model, name, sources, heads=head)
                assert float(found.values[row, head]) == pytest.approx(expected, abs=1e-5), (name, head)
        along = length if at in ("cross.k", "cross.v") else len(TARGET)
        found = ask("position", at)
        assert found.columns == tuple(map(str, sources[0] if at in ("cross.k", "cross.v") else TARGET))
        assert found.values.shape == (model.spec.n_layers, along)
        for place in range(along):
            expected = one_by_hand(model, found.rows[-1], sources, positions=place)
            assert float(found.values[-1, place]) == pytest.approx(expected, abs=1e-5), (at, place)
    pair = ask("head", "cross.weights", positions=[1, -1])
    expected = one_by_hand(model, pair.rows[0], sources, heads=1, positions=[1, 3])
    assert float(pair.values[0, 1]) == pytest.approx(expected, abs=1e-5)
    named = ask("position", "cross.v", pieces=[*"abcd"], source_pieces=[*"uvwxyz"[:length]])
    assert named.columns == tuple("uvwxyz"[:length])
    with pytest.raises(RequestError, match="of the source in one of these"):
        ask("position", "*.k")
    given["corrupt_sources"] = [[*sources[1], 3]]
    with pytest.raises(RequestError, match="each token that is read"):
        ask("head", "cross.weights", align="end")


def test_labels_may_answer() -> None:
    model = tiny.transformer(tiny_encoders.config("bert-labels"))
    found = patch_sweep(model, [CLEAN], [CORRUPT], logit_difference(0, 1))
    assert found.clean != found.corrupt
    assert found.values.shape == (3, 7)


def test_refusals() -> None:
    model = tiny.transformer("llama")
    with pytest.raises(RequestError, match="one length"):
        patch_sweep(model, [CLEAN, CLEAN[:3]], [CORRUPT, CORRUPT[:3]], METRIC)
    with pytest.raises(RequestError, match="no pairs"):
        patch_sweep(model, [CLEAN], [CORRUPT[:3]], METRIC)
    with pytest.raises(RequestError, match="no pairs"):
        patch_sweep(model, [CLEAN], [CORRUPT, CORRUPT], METRIC)
    with pytest.raises(RequestError, match="direction"):
        patch_sweep(model, [CLEAN], [CORRUPT], METRIC, direction="both")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="no such sweep"):
        patch_sweep(model, [CLEAN], [CORRUPT], METRIC, "layer")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="a number for each pair"):
        patch_sweep(model, [CLEAN], [CORRUPT], lambda s: s)
    with pytest.raises(RequestError, match="token of the vocabulary"):
        patch_sweep(model, [CLEAN], [CORRUPT], logit_difference(99, 1))
    with pytest.raises(NameNotFound, match="no heads"):
        patch_sweep(model, [CLEAN], [CORRUPT], METRIC, "head", at="mlp.act")
    with pytest.raises(NameNotFound):
        patch_sweep(model, [CLEAN], [CORRUPT], METRIC, at="attn.zz")
    with pytest.raises(RequestError, match="no such position"):
        patch_sweep(model, [CLEAN], [CORRUPT], METRIC, positions=[7])
    with pytest.raises(RequestError, match="which position"):
        patch_sweep(tiny.transformer(tiny_encoders.config("bert-mlm")), [CLEAN], [CORRUPT], METRIC)


def test_shown() -> None:
    model = tiny.transformer("llama")
    found = patch_sweep(model, [CLEAN], [CORRUPT], METRIC, pieces=list("abcdefg"), spell=lambda t: f"w{t}")
    grid = found.figure().parts[0]
    assert list(grid.columns) == list("abcdefg")
    assert found.metric == "score of “w21” less that of “w34”"
    assert found.as_dict()["normalised"][0][6] == found.normalised[0, 6]
    best = found.top(1)[0]
    assert best[2] == float(found.normalised.max())
    same = patch_sweep(model, [CLEAN], [CLEAN], METRIC)
    assert same.normalised.isnan().all()
    assert same.as_dict()["normalised"][0][0] is None


# ── taking heads away ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["zero", "mean"])
def test_ablation(case: Pair, how: Any) -> None:
    """The loss against transformers' with the head's slice replaced."""
    if not case.causal:
        with pytest.raises(RequestError, match="what comes next"):
            ablation_sweep(case.ours, [CLEAN])
        return
    sources = None if case.source is None else [case.source]
    found = ablation_sweep(case.ours, [CLEAN], how=how, first=3, sources=sources, batch=3)
    goal = torch.tensor(CLEAN[3:])
    n = case.ours.spec.decoder.layers[0].attention.n_heads
    for layer in range(case.layers):
        module = places(case.theirs, layer).heads
        width = module.weight.numel() // case.ours.spec.d_model // n
        at = found.layers.index(f"decoder.layers.{layer}.attn")
        for head in range(n):
            part = slice(head * width, (head + 1) * width)

            def change(x: Tensor, part: slice = part) -> Tensor:
                x = x.clone()
                x[..., part] = 0.0 if how == "zero" else x[..., part].mean((0, 1))
                return x

            scores = hooked(case, CLEAN, module, "input", change)
            expected = torch.nn.functional.cross_entropy(scores[2:-1], goal)
            assert float(found.losses[at, head]) == pytest.approx(float(expected), abs=1e-3)
    scores = hooked(case, CLEAN, places(case.theirs, 0).heads, "input", lambda x: x)
    assert found.base == pytest.approx(float(torch.nn.functional.cross_entropy(scores[2:-1], goal)), abs=1e-4)
    assert found.base == pytest.approx(loss_without(case.ours, [CLEAN], first=3, sources=sources), abs=1e-5)


def test_several_heads_at_once() -> None:
    model = tiny.transformer("llama")
    both = [("decoder.layers.0.attn", 1), ("decoder.layers.2.attn", 3)]
    rows = tiny.ids(3, 8).tolist()
    sweep_of = ablation_sweep(model, rows)
    one = loss_without(model, rows, both[:1])
    assert one == pytest.approx(float(sweep_of.losses[0, 1]), abs=1e-5)
    assert loss_without(model, rows, both) != pytest.approx(one, abs=1e-3)
    at, head, rise = sweep_of.top(1)[0]
    assert rise == pytest.approx(float((sweep_of.losses - sweep_of.base).max()))
    assert sweep_of.figure().parts[1].labels[0] == f"{at}[{head}]"
    assert sweep_of.as_dict()["base"] == sweep_of.base
    with pytest.raises(NameNotFound, match="branch with heads"):
        loss_without(model, rows, [("decoder.layers.0.mlp", 0)])
    with pytest.raises(RequestError, match="no such head"):
        loss_without(model, rows, [("decoder.layers.0.attn", 4)])
    with pytest.raises(RequestError, match="first"):
        loss_without(model, rows, first=8)
