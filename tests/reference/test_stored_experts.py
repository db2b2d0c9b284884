"""Mixtures whose experts are held in blocks, beside transformers and llama.cpp with the numbers of these blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway
from cutaway.inspection import trace
from cutaway.kernels import Stored, missing
from cutaway.model import Model
from tests.checkpoints import gguf_models
from tests.reference import oracle, tiny
from tests.reference.test_llama_cpp import ask, prompts

if missing():
    pytest.skip("stored weights need the native library", allow_module_level=True)

Note = Callable[[str, str, float], float]
FAMILIES = ("mixtral", "qwen3-moe-normalised")
AT = "decoder.layers.{}.moe.{}".format


def values(name: str, wide: int) -> dict[str, Any]:
    """Of a mixture whose rows are whole blocks."""
    sizes = {"hidden_size": wide, "intermediate_size": 2 * wide}
    own = {"moe_intermediate_size": wide, "attention_bias": False} if name.startswith("qwen3") else {}
    return {**tiny.config(name), **sizes, **own}


@dataclass(frozen=True)
class Case:
    """A mixture in blocks, and transformers' with their numbers."""

    name: str
    stored: Model
    theirs: Any


@pytest.fixture(scope="module", params=[(name, kind) for name in FAMILIES for kind in ("q8_0", "q5_1", "q4_0", "q4_k")])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, kind = request.param
    folder = tmp_path_factory.mktemp(f"{name}-{kind}")
    wide = 256 if kind.endswith("k") else 32
    model = Model(tiny.transformer(values(name, wide)))
    with torch.no_grad():
        for weight in model.transformer.parameters():
            if weight.dim() > 1:  # as large as what narrow ones make of a token
                weight.mul_((32 / wide) ** 0.5)
    cutaway.save(model, folder / "m.gguf", format="gguf", quantize=kind)
    stored = cutaway.load(folder / "m.gguf")
    experts = [weight for weight in stored.transformer.parameters() if weight.dim() == 3]
    assert len(experts) == 9
    assert all(isinstance(weight, Stored) for weight in experts)
    cutaway.save(stored, folder / "dense")
    return Case(name, stored, oracle.fresh(folder / "dense"))


@torch.no_grad()
def test_prompts_batches_and_steps(case: Case, measured: Note) -> None:
    """Many tokens at once, rows of different lengths, and one token after another."""
    rows = [tiny.ids(1, n)[0].tolist() for n in (40, 1, 17)]
    wanted = [case.theirs(torch.tensor([row])).logits[0] for row in rows]
    logits = case.stored.logits(rows)
    for mine, its in zip(logits, wanted, strict=True):
        assert measured(case.name, "in blocks", float((mine - its).abs().max())) <= 2e-4
    cache = case.stored.transformer.new_cache()
    for i, token in enumerate(rows[0]):
        step = case.stored.transformer(torch.tensor([[token]]), cache=cache)[0, 0]
        assert measured(case.name, "in blocks", float((step - wanted[0][i]).abs().max())) <= 2e-4


@torch.no_grad()
def test_watched(case: Case) -> None:
    """The router's logits are transformers'; shares and experts add up to what the branch adds, steps are as a pass."""
    row = tiny.ids(1, 12)[0].tolist()
    found = trace(case.stored.transformer, [row], ("*.moe.*", "logits"), max_tokens=3)
    (tokens,) = found.tokens
    theirs = case.theirs(torch.tensor([tokens]), output_router_logits=True)
    for i, wanted in enumerate(theirs.router_logits):
        torch.testing.assert_close(found[AT(i, "router_logits")][0], wanted, rtol=1e-4, atol=2e-4)
        shares, experts = found[AT(i, "router_weights")], found[AT(i, "experts")]
        torch.testing.assert_close(shares.sum(-1), torch.ones(shares.shape[:2]))
        assert torch.equal((experts != 0).any(-1), shares > 0)
        torch.testing.assert_close(experts.sum(2), found[AT(i, "body")], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["logits"], theirs.logits, rtol=1e-4, atol=2e-4)


def test_gradients(case: Case) -> None:
    """Of what the experts read: through them, and through the router."""
    ids, grads = tiny.ids(1, 9), []
    for model in (case.stored.transformer, case.theirs):
        model.zero_grad()
        logits = model(ids) if model is case.stored.transformer else model(ids).logits
        logits.log_softmax(-1)[0, -1, 5].backward()
        before = "moe.pre_norm.weight", "post_attention_layernorm.weight"
        grads.append([p.grad for name, p in model.named_parameters() if name.endswith(before)])
    assert len(grads[0]) == len(grads[1]) == 3
    for mine, its in zip(*grads, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-4)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["q8_0", "q5_1", "q4_0"])
def test_llama_cpp_reads_them(kind: str, tmp_path: Path, measured: Note, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly the same logits from the same file: what it multiplies by blocks it takes in 8 bits.

    All experts are chosen here, since with such rounding a narrow choice falls otherwise; which are chosen, and with
    which shares, is compared without rounding in test_llama_cpp.
    """
    jobs, made = [], {}
    for name, n in (("mixtral", 5), ("qwen3-moe", 6)):
        config, vocabulary = gguf_models.CASES[name]
        monkeypatch.setitem(gguf_models.CASES, name, ({**config, "num_experts_per_tok": n}, vocabulary))
        model = gguf_models.model(name)
        path = tmp_path / f"{name}.gguf"
        cutaway.save(model, path, format="gguf", quantize=kind)
        made[name] = cutaway.load(path)
        jobs.append({"path": str(path), "prompts": prompts(model), "texts": [], "n": 1})
    for (name, model), job, answer in zip(made.items(), jobs, ask(jobs), strict=True):
        for prompt, logits in zip(job["prompts"], answer["logits"], strict=True):  # type: ignore[call-overload]
            ours = model.logits(prompt)[0, -1]  # type: ignore[index]
            apart = float((ours - torch.tensor(logits)).norm() / ours.norm())
            assert measured(name, "llama.cpp, in blocks (rel.)", apart) < 0.1
