"""Beginning and ending at a layer, gradients, a training step, and what goes with generating."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cutaway
from cutaway.errors import NameNotFound, RequestError
from cutaway.inspection import Recorder, trace, zero
from cutaway.models import Transformer
from cutaway.models.batch import pad
from cutaway.modules.block import Block
from cutaway.spec.names import tap_names
from tests.reference import tiny, tiny_encoders, tiny_seq2seq

PROMPTS = [[5, 9, 7, 11, 23, 4], [8, 31, 3]]
AT = "decoder.layers.1"


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny.transformer("llama")


def same(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5, equal_nan=True)


# ── start and stop ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", ["llama", "gemma3", "gpt2", "bloom", "stablelm-parallel"])
def test_from_a_layer_on(case: str) -> None:
    """What comes after is what the whole pass has there; a changed stream goes on from where it was changed."""
    mine = tiny.transformer(case)
    whole = trace(mine, PROMPTS, ("*",))
    names = [
        name for name in tap_names(mine.spec) if name.startswith((AT, "decoder.layers.2", "decoder.norm", "logits"))
    ]
    found = trace(
        mine, PROMPTS, names, start=(f"{AT}.resid_in", whole[f"{AT}.resid_in"])
    )  # NaN past the end is no matter
    for name in names:
        same(found[name], whole[name])
    louder = whole[f"{AT}.resid_in"] * 2
    edited = trace(mine, PROMPTS, ("logits",), {f"{AT}.resid_in": lambda value: value * 2})
    same(trace(mine, PROMPTS, ("logits",), start=(f"{AT}.resid_in", louder))["logits"], edited["logits"])
    with pytest.raises(RequestError, match="not computed") as caught:
        trace(mine, PROMPTS, ("embed.out",), start=(f"{AT}.resid_in", louder))
    assert caught.value.field == "embed.out"
    with pytest.raises(RequestError, match="not computed"):
        trace(mine, PROMPTS, (), {"decoder.layers.0.attn.z": zero()}, start=(f"{AT}.resid_in", louder))


def test_from_a_layer_of_an_encoder() -> None:
    mine = tiny_seq2seq.transformer("t5")
    ids, name = [[2, 5], [2]], "encoder.layers.1.resid_in"
    whole = trace(mine, ids, ("*",), sources=PROMPTS)
    same(trace(mine, ids, ("logits",), sources=PROMPTS, start=(name, whole[name]))["logits"], whole["logits"])
    name = "decoder.layers.1.resid_in"
    same(trace(mine, ids, ("logits",), sources=PROMPTS, start=(name, whole[name]))["logits"], whole["logits"])


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (3, "place"),
        (("embed.out", torch.zeros(2, 6, 32)), "place"),
        (("decoder.layers.9.resid_in", torch.zeros(2, 6, 32)), "place"),
        ((f"{AT}.attn.resid", torch.zeros(2, 6, 32)), "place"),
        ((f"{AT}.resid_in", [[1.0]]), "place"),
        ((f"{AT}.resid_in", torch.zeros(2, 5, 32)), "stream"),
        ((f"{AT}.resid_in", torch.zeros(6, 32)), "stream"),
    ],
)
def test_starts_that_are_none(model: Transformer, start: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        trace(model, PROMPTS, ("logits",), start=start)
    assert caught.value.field == "start"


def ran(model: Transformer, monkeypatch: pytest.MonkeyPatch, *names: str, **options: Any) -> list[int]:
    """Which layers ran."""
    seen: list[int] = []
    plain = Block.forward
    layers = [*model.decoder.layers, *model.encoder.layers]

    def forward(self: Block, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(layers.index(self))
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Block, "forward", forward)
    trace(model, PROMPTS, names, **options)
    return seen


def test_up_to_a_layer(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trace(model, PROMPTS, ("*",))
    for names in (("embed.out",), (f"{AT}.attn.z",), ("*.0.attn.weights", f"{AT}.mlp.*"), ("logits",)):
        found = trace(model, PROMPTS, names, stop=True)
        for name in found:
            same(found[name], whole[name])
    assert ran(model, monkeypatch, f"{AT}.attn.z", stop=True) == [0, 1]
    assert ran(model, monkeypatch, "embed.out", stop=True) == []
    assert ran(model, monkeypatch, f"{AT}.attn.z") == [0, 1, 2]
    start = (f"{AT}.resid_in", whole[f"{AT}.resid_in"])
    assert ran(model, monkeypatch, f"{AT}.mlp.resid", start=start, stop=True) == [1]
    with pytest.raises(RequestError, match="not computed") as caught:
        trace(model, PROMPTS, (f"{AT}.attn.z",), {f"{AT}.mlp.out": zero()}, stop=True)
    assert caught.value.field == f"edits/{AT}.mlp.out"
    assert "after the stop" in (caught.value.hint or "")
    with pytest.raises(RequestError) as caught:
        trace(model, PROMPTS, (), stop=True)
    assert caught.value.field == "names"


def test_up_to_a_layer_of_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tiny_seq2seq.transformer("t5")
    sources, ids = PROMPTS, [[2, 5], [2]]
    whole = trace(mine, ids, ("*",), sources=sources)
    for names in (
        ("encoder.layers.0.attn.weights",),
        ("encoder.norm.out", "decoder.layers.0.cross.v"),
        ("decoder.layers.1.cross.z",),
    ):
        found = trace(mine, ids, names, sources=sources, stop=True)
        for name in found:
            same(found[name], whole[name])


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", ["gpt2", "bloom", "gptj", "stablelm-parallel"])  # LayerNorm: an RMSNorm is in fp32
def test_gradients_of_what_is_kept(case: str) -> None:
    """Those of a logit in a few directions, against finite differences of an edit."""
    mine = tiny.transformer(case).double()
    names = [f"{AT}.resid_in", f"{AT}.attn.z", f"{AT}.attn.weights", f"{AT}.attn.v"]
    for name in names:  # one by one, for a softmax is in fp32 where its weights are watched
        found = trace(mine, PROMPTS[:1], (name, "logits"), grad=True)
        (grad,) = torch.autograd.grad(found["logits"][0, -1, 3], [found[name]])
        push = torch.randn(grad.shape, generator=torch.Generator().manual_seed(1), dtype=grad.dtype)
        if name.endswith("weights"):
            push = torch.where(found[name] > 0, push, 0.0)
        ends = []
        for step in (1e-5, -1e-5):
            edits = {name: lambda value, step=step, push=push: value + step * push}
            ends.append(trace(mine, PROMPTS[:1], ("logits",), edits)["logits"][0, -1, 3])
        torch.testing.assert_close((grad * push).sum(), (ends[0] - ends[1]) / 2e-5, rtol=1e-4, atol=1e-6)


def test_gradients_of_ragged_rows(model: Transformer) -> None:
    """A row's gradient is that of the row alone; past its end nothing is hidden, and nothing comes through."""
    found = trace(model, PROMPTS, ("embed.out", "logits"), grad=True)
    assert found["logits"].shape == (2, 6, 64)
    assert bool(found["logits"].isfinite().all())
    (grad,) = torch.autograd.grad(found["logits"][1, 2, 3], [found["embed.out"]])
    alone = trace(model, PROMPTS[1:], ("embed.out", "logits"), grad=True)
    (mine,) = torch.autograd.grad(alone["logits"][0, 2, 3], [alone["embed.out"]])
    same(grad[1, :3], mine[0])
    assert not bool(grad[0].any() | grad[1, 3:].any())


def test_backward_fills_what_is_asked_to_retain(model: Transformer) -> None:
    found = trace(model, PROMPTS[:1], ("embed.out", "logits"), grad=True)
    (wanted,) = torch.autograd.grad(found["logits"].sum(), [found["embed.out"]], retain_graph=True)
    found["embed.out"].retain_grad()
    found["logits"].sum().backward()
    assert torch.equal(found["embed.out"].grad, wanted)
    model.zero_grad()


def test_without_grad_there_is_no_graph(model: Transformer) -> None:
    found = trace(model, PROMPTS, ("*",))
    assert not any(tensor.requires_grad for tensor in found.values())


@pytest.mark.parametrize("case", ["llama", "gpt2", "t5", "bert-labels"])
def test_in_a_training_step(case: str, tmp_path: Path) -> None:
    """With dropout: the recorder changes no number of the step, and what it keeps has the graph's own gradients."""
    if case == "t5":
        mine = tiny_seq2seq.transformer({**tiny_seq2seq.config(case), "dropout_rate": 0.2})
    elif case == "bert-labels":
        values = {**tiny_encoders.config(case), "hidden_dropout_prob": 0.2}
        mine = cutaway.load(tiny_encoders.write(values, tmp_path)).transformer
    else:
        dropout = {"attention_dropout": 0.2} if case == "llama" else {"resid_pdrop": 0.2, "attn_pdrop": 0.1}
        mine = tiny.transformer({**tiny.config(case), **dropout})
    mine.train()
    ids, positions = pad(PROMPTS)

    def step(tap: Recorder | None) -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(3)
        mine.zero_grad()
        source = None if mine.spec.source is None else mine.read(ids, positions, tap=tap)
        out = mine(ids, positions, source=source, tap=tap)
        loss = out.log_softmax(-1)[..., 0].mean()
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in mine.named_parameters() if p.grad is not None}

    main = mine.spec.main
    names = [f"{main}.layers.1.attn.z", f"{main}.layers.1.resid_in", f"{main}.layers.0.mlp.act"]
    recorder = Recorder.of(mine.spec, *names, grads=True)
    loss, grads = step(recorder)
    plain_loss, plain = step(None)
    assert torch.equal(loss, plain_loss)
    assert grads.keys() == plain.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, plain[name]), name
    for name in names:
        (kept,) = recorder.kept[name]
        assert kept.grad is not None
        assert kept.grad.shape == kept.shape
    # What came through z and the output matrix, by the chain rule, is the matrix's own gradient.
    layer = getattr(mine, main).layers[1].branches["attn"]
    body = Recorder.of(mine.spec, f"{main}.layers.1.attn.z", f"{main}.layers.1.attn.body", grads=True)
    step(body)
    z, out = (body.kept[f"{main}.layers.1.attn.{part}"][0] for part in ("z", "body"))
    by_hand = torch.einsum("bqm,bqd->md", out.grad, z.flatten(-2))
    torch.testing.assert_close(by_hand, layer.body.out.weight.grad, rtol=1e-4, atol=1e-6)

    gone = weakref.ref(recorder.kept[names[0]][0])
    recorder.clear()
    gc.collect()
    assert gone() is None


def test_an_edit_in_a_training_step(model: Transformer) -> None:
    """An edit by position holds in a plain call of the model too, and what it adds is learned."""
    push = torch.zeros(32, requires_grad=True)
    edits = {f"{AT}.resid_in": cutaway.inspection.add(push, positions=[2], rows=1)}
    recorder = Recorder.of(model.spec, f"{AT}.resid_in", edits=edits)
    ids, positions = pad(PROMPTS)
    model(ids, positions, tap=recorder)[1, 2, 3].backward()
    recorder.check()
    assert push.grad is not None
    assert bool(push.grad.any())
    model(ids[:1], positions[:1])[0, -1, 3].backward()
    model.zero_grad()
    late = Recorder.of(model.spec, edits={f"{AT}.resid_in": zero(positions=7)})
    model(ids, positions, tap=late)
    with pytest.raises(RequestError, match="no text reached"):
        late.check()


# ── what goes with generating ────────────────────────────────────────────────────────────────────────────────


def test_the_facade_takes_options(model: Transformer) -> None:
    whole = cutaway.Model(model)
    drawn = whole.trace(PROMPTS, "logits", max_tokens=4, temperature=1.5, seed=3)
    answers = whole.generate(PROMPTS, max_tokens=4, temperature=1.5, seed=3)
    assert [row[len(p) :] for row, p in zip(drawn.tokens, PROMPTS, strict=True)] == [a.tokens for a in answers]
    biased = whole.trace(PROMPTS, max_tokens=2, logit_bias={7: 1e3})
    assert [row[-2:] for row in biased.tokens] == [[7, 7]] * 2
    small = whole.trace(PROMPTS, f"{AT}.attn.z", "logits", max_tokens=2, kv_dtype="int8")
    plain = whole.trace(small.tokens, f"{AT}.attn.z")
    assert 0 < float((small[f"{AT}.attn.z"] - plain[f"{AT}.attn.z"]).nan_to_num().abs().max()) < 0.2
    for name, value in (("num_beams", 2), ("n", 2), ("draft", "prompt"), ("logprobs", 1), ("deterministic", True)):
        with pytest.raises(RequestError, match="no option of a trace") as caught:
            whole.trace(PROMPTS, max_tokens=2, **{name: value})
        assert caught.value.field == name
    with pytest.raises(RequestError, match="unknown argument"):
        whole.trace(PROMPTS, max_tokens=2, temprature=1)


@pytest.mark.parametrize(
    ("name", "value"), [("stop", True), ("grad", True), ("start", (f"{AT}.resid_in", torch.zeros(2, 6, 32)))]
)
def test_what_is_read_once(model: Transformer, name: str, value: Any) -> None:
    with pytest.raises(RequestError, match="read once") as caught:
        trace(model, PROMPTS, ("logits",), max_tokens=1, **{name: value})
    assert caught.value.field == name


def test_flags_and_sources_that_are_none(model: Transformer) -> None:
    for name in ("stop", "grad"):
        with pytest.raises(RequestError) as caught:
            trace(model, PROMPTS, ("logits",), **{name: 1})
        assert caught.value.field == name
    with pytest.raises(RequestError, match="one text"):
        trace(model, PROMPTS, ("logits",), sources=PROMPTS)
    both = tiny_seq2seq.transformer("t5")
    with pytest.raises(RequestError, match="each row"):
        trace(both, [[2]], ("logits",), sources=PROMPTS)
    with pytest.raises(RequestError, match="source"):
        trace(both, [[2]], ("logits",))


def test_a_row_that_has_ended_is_not_read_further(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    free = trace(model, PROMPTS, (), max_tokens=6)
    end = free.tokens[1][4]
    shapes: list[list[list[int]]] = []
    plain = Transformer.hidden

    def hidden(self: Transformer, ids: Tensor, positions: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shapes.append(positions.tolist())
        return plain(self, ids, positions, *args, **kwargs)

    monkeypatch.setattr(Transformer, "hidden", hidden)
    found = trace(model, PROMPTS, ("logits",), max_tokens=6, stop_ids={end})
    n = found.lengths[1]
    assert n < 9
    read = [[place for step in shapes for place in step[row] if place >= 0] for row in range(2)]
    assert read == [[*range(length)] for length in found.lengths]
    assert shapes[-1][1] == [-1]


def test_the_case_of_an_encoder_decoder() -> None:
    """Case I08: encoder, decoder and cross attention, each of its own shape, at once and in steps."""
    mine = tiny_seq2seq.transformer("t5")
    heads = mine.spec.decoder.layers[0].attention.n_heads
    source, target = tiny.ids(2, 7).tolist(), tiny.ids(2, 5, seed=2).tolist()
    for ids, more in ((target, 0), ([row[:2] for row in target], 3)):
        found = trace(
            mine, ids, ("*.weights",), {"*.layers.0.*.z": lambda value: value.clone()}, max_tokens=more, sources=source
        )
        for i in range(len(mine.spec.decoder.layers)):
            shapes = {
                f"encoder.layers.{i}.attn.weights": (2, heads, 7, 7),
                f"decoder.layers.{i}.attn.weights": (2, heads, 5, 5),
                f"decoder.layers.{i}.cross.weights": (2, heads, 5, 7),
            }
            for name, shape in shapes.items():
                assert found[name].shape == shape
                torch.testing.assert_close(found[name].sum(-1), torch.ones(shape[:3]), rtol=0, atol=1e-5)


def test_names_still_raise(model: Transformer) -> None:
    with pytest.raises(NameNotFound):
        Recorder.of(model.spec, "*.nothing")
