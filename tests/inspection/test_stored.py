"""Traces of weights as a file stores them, beside transformers with the numbers that they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cutaway
from cutaway import edits
from cutaway.errors import RequestError
from cutaway.inspection import attribution_patching, decompose, integrated_gradients, occlusion, saliency, trace
from cutaway.kernels import Stored, missing
from cutaway.models import Transformer
from tests.reference import oracle, tiny

if missing():
    pytest.skip("stored weights need the native library", allow_module_level=True)

IDS = tiny.ids(1, 9)[0].tolist()
OTHER = [7, *IDS[1:4], 40, *IDS[5:]]
CLOSE = {"rtol": 1e-4, "atol": 2e-4}
AT = "decoder.layers.{}.{}".format


@dataclass(frozen=True)
class Case:
    """A model whose matrices are stored, and as what; transformers' with their numbers; the folder of the plain one."""

    kind: str
    stored: Transformer
    theirs: Any
    folder: Path


@pytest.fixture(scope="module", params=["q8_0", "q5_1", "q4_0"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    tiny.write(tiny.config("llama-tied"), folder / "plain")
    stored = cutaway.load(folder / "plain", quantize=request.param)
    assert sum(isinstance(p, Stored) for p in stored.transformer.parameters()) == 3 * 7 + 1
    cutaway.save(stored, folder / "dense")
    return Case(request.param, stored.transformer, oracle.fresh(folder / "dense"), folder / "plain")


def test_a_plain_pass(case: Case) -> None:
    """The stream before each layer, the weights, the logits."""
    found = trace(case.stored, [IDS], ("*.resid_in", "*.weights", "logits"))
    with torch.no_grad():
        case.theirs.set_attn_implementation("eager")
        wanted = case.theirs(torch.tensor([IDS]), output_hidden_states=True, output_attentions=True)
    for i in range(3):
        torch.testing.assert_close(found[AT(i, "resid_in")], wanted.hidden_states[i], **CLOSE)
        torch.testing.assert_close(found[AT(i, "attn.weights")], wanted.attentions[i], **CLOSE)
    torch.testing.assert_close(found["logits"], wanted.logits, **CLOSE)


@pytest.mark.parametrize("rounded", [False, True])
def test_cached_ragged_steps_are_rows_of_one_pass(case: Case, rounded: bool) -> None:
    """Of the form that is stored, and of products of whole numbers."""
    model = cutaway.load(case.folder, quantize="int8").transformer if rounded else case.stored
    found = trace(model, [IDS, IDS[:4]], ("*",), max_tokens=4)
    for i, row in enumerate(found.tokens):
        whole, mine = trace(model, [row], ("*",)), found.row(i)
        for name in whole:
            torch.testing.assert_close(mine[name], whole[name], **CLOSE)


def test_an_edit(case: Case) -> None:
    """A head taken away: in transformers, what its output matrix reads."""
    place = AT(1, "attn.z")
    found = trace(case.stored, [IDS], ("logits",), {place: edits.zero(heads=2)})["logits"]
    reads, width = case.theirs.model.layers[1].self_attn.o_proj, case.theirs.config.head_dim

    def change(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        x = args[0].clone()
        x[..., 2 * width : 3 * width] = 0
        return (x,)

    handle = reads.register_forward_pre_hook(change)
    with torch.no_grad():
        wanted = case.theirs(torch.tensor([IDS])).logits
    handle.remove()
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients(case: Case, frozen: bool) -> None:
    """Of a logit by the vectors of the tokens, before any weight that learns, and by what all heads read."""
    model, theirs = case.stored, case.theirs
    if frozen:
        model = cutaway.load(case.folder, quantize=case.kind).transformer
        for weight in model.parameters():
            weight.requires_grad_(False)
    rows = theirs.get_input_embeddings()(torch.tensor([IDS])).detach().requires_grad_()
    heads: list[Tensor] = []
    handle = theirs.model.layers[2].self_attn.o_proj.register_forward_pre_hook(lambda _, args: heads.append(args[0]))
    logit = theirs(inputs_embeds=rows).logits[0, -1, 5]
    handle.remove()
    wanted = torch.autograd.grad(logit, [rows, heads[0]])
    found = trace(model, [IDS], ("embed.out", AT(2, "attn.z"), "logits"), grad=True)
    slopes = torch.autograd.grad(found["logits"][0, -1, 5], [found["embed.out"], found[AT(2, "attn.z")]])
    torch.testing.assert_close(slopes[0], wanted[0], **CLOSE)
    torch.testing.assert_close(slopes[1].flatten(2), wanted[1], **CLOSE)
    late = trace(model, [IDS], (AT(2, "attn.z"), "logits"), grad=True)  # what is before runs as ever
    (slope,) = torch.autograd.grad(late["logits"][0, -1, 5], [late[AT(2, "attn.z")]])
    torch.testing.assert_close(slope.flatten(2), wanted[1], **CLOSE)


def test_rounded_products_have_no_gradient(case: Case) -> None:
    """Refused, by whoever asks: what was differentiated would not be what the model says. What needs none goes on."""
    model = cutaway.load(case.folder, quantize="int8").transformer
    for field, ask in (
        ("grad", lambda: trace(model, [IDS], ("embed.out", "logits"), grad=True)),
        ("model", lambda: saliency(model, IDS, 5)),
        ("model", lambda: integrated_gradients(model, IDS, 5, steps=2)),
        ("model", lambda: attribution_patching(model, IDS, OTHER, 5, ["*.attn.z"])),
    ):
        with pytest.raises(RequestError, match="int8") as caught:
            ask()
        assert caught.value.field == field
        assert 'dtype="float32"' in str(caught.value.hint)
    own = trace(model, [IDS], ("logits",))["logits"][0, -1, 5]
    assert occlusion(model, IDS, 5).value == pytest.approx(float(own), abs=1e-4)
    saliency(cutaway.load(case.folder, dtype="float32").transformer, IDS, 5)


def test_a_decomposition_says_why_rounded_products_leave_a_gap(case: Case) -> None:
    """Its parts are sums of the numbers as they are; with weights in blocks alone there is no gap to speak of."""
    found = decompose(case.stored, IDS, 5)
    assert abs(found.gap) < 1e-4
    assert not found.rounded
    assert "rounding" not in " ".join(found.figure().notes)
    found = decompose(cutaway.load(case.folder, quantize="int8").transformer, IDS, 5)
    assert found.rounded
    assert abs(found.gap) > 1e-4
    assert f"The gap of {found.total - found.value:.2g} is rounding" in " ".join(found.figure().notes)
    assert found.as_dict()["notes"] == [*found.figure().notes]


@pytest.mark.parametrize("kind", ["plain", "stored", "frozen"])
def test_where_no_graph_can_be_kept(case: Case, kind: str) -> None:
    """In ``inference_mode``, and of weights that were made in it; ``no_grad`` outside is no hindrance."""
    dtype = "float32" if kind == "plain" else None
    model = cutaway.load(case.folder, dtype=dtype, quantize=None if kind == "plain" else case.kind).transformer
    if kind == "frozen":
        model.requires_grad_(False)
    asked = (
        lambda of: trace(of, [IDS], ("embed.tokens", "logits"), grad=True),
        lambda of: saliency(of, IDS, 5),
        lambda of: attribution_patching(of, IDS, OTHER, 5, ["*.attn.z"]),
    )
    with torch.inference_mode():
        late = cutaway.load(case.folder, dtype="float32").transformer
        plain = trace(model, [IDS], ("logits",))["logits"]
        for ask in asked:
            with pytest.raises(RequestError, match="inference_mode"):
                ask(model)
    for ask in asked:
        with pytest.raises(RequestError, match="weights were made"):
            ask(late)
        with torch.no_grad():
            ask(model)
    with torch.no_grad():
        found = trace(model, [IDS], ("embed.tokens", "logits"), grad=True)
    torch.testing.assert_close(found["logits"].detach(), plain.clone(), **CLOSE)
    (slope,) = torch.autograd.grad(found["logits"][0, -1, 5], [found["embed.tokens"]])
    assert bool((slope != 0).all(-1).any())
