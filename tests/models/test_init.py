"""How weights start."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

import pytest
import torch
from tests.reference import tiny
from tests.spec.random_specs import random_spec

import cutaway
from cutaway.models import Transformer
from cutaway.models.init import TABLE, built, initialise
from cutaway.spec import ModelSpec
from cutaway.spec.recipe import expand

LARGE = {"d_model": 256, "n_heads": 4, "layers": 3, "vocab_size": 500}


def spread(model: Transformer, name: str) -> float:
    return float(model.get_parameter(name).detach().std())


def close(got: float, wanted: float) -> bool:
    return abs(got / wanted - 1) < 0.1


def test_gpt2_s_numbers() -> None:
    model = built(expand({**LARGE, "positions": "learned", "norm": "layer", "bias": True, "tied": False}))
    at = "decoder.layers.1.branches"
    for name in ("embed.tokens", "head.weight", f"{at}.attn.body.q.weight", f"{at}.mlp.body.up.weight"):
        assert close(spread(model, name), 0.02), name
    assert close(spread(model, "embed.positions"), 0.01)
    for name in (f"{at}.attn.body.out.weight", f"{at}.mlp.body.down.weight"):
        assert close(spread(model, name), 0.02 / math.sqrt(6)), name  # two branches in each of three layers
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.detach().any(), name
        if name.endswith("norm.weight"):
            assert bool((parameter.detach() == 1).all()), name


def test_the_other_tables() -> None:
    assert close(spread(built(expand({**LARGE, "positions": "t5"})), "decoder.biases.0.weight"), 1 / 16)
    near = built(expand({**LARGE, "positions": "shaw"})).get_parameter("decoder.layers.0.branches.attn.body.near_keys")
    assert float(near.detach().abs().max()) <= math.sqrt(6 / (33 + 64))
    assert close(spread(built(expand({**LARGE, "embed_scale": 16.0})), "embed.tokens"), 1 / 16)
    moe = built(expand({**LARGE, "experts": 4}))
    at = "decoder.layers.0.branches.moe.body"
    assert close(spread(moe, f"{at}.up"), 0.02)
    assert close(spread(moe, f"{at}.router.weight"), 0.02)
    assert close(spread(moe, f"{at}.down"), 0.02 / math.sqrt(6))


def test_a_norm_that_adds_one_starts_at_zero() -> None:
    model = built(tiny.spec_of(tiny.config("gemma3")))
    assert not model.get_parameter("decoder.norm.weight").detach().any()


@pytest.mark.parametrize("case", [*tiny.CASES, *range(60)])
def test_every_parameter_has_a_line(case: str | int) -> None:
    spec: ModelSpec = random_spec(case) if isinstance(case, int) else tiny.spec_of(tiny.config(case))
    with torch.device("meta"):
        names = [name for name, _ in Transformer(spec).named_parameters()]
    for name in names:
        assert any(fnmatchcase(name, pattern) for pattern, _, _ in TABLE), name


def test_every_line_has_a_source() -> None:
    assert all(source for _, _, source in TABLE)


def test_seeds() -> None:
    """The same again, in any dtype order; another seed, other numbers everywhere."""
    spec = expand(LARGE)
    one, two, other = built(spec, 1), built(spec, 1), built(spec, 2)
    torch.manual_seed(99)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, two.get_parameter(name))
        if parameter.dim() > 1:
            assert not torch.equal(parameter, other.get_parameter(name)), name


def test_a_weight_depends_on_its_name_alone() -> None:
    """Not on the modules made before it: one more part elsewhere changes nothing here."""
    plain, more = (built(expand({**LARGE, **words})) for words in ({}, {"embed_norm": True, "qk_norm": "head"}))
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, more.get_parameter(name)), name


def test_no_global_state() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    built(expand({**LARGE, "positions": "shaw"}))
    assert torch.equal(before, torch.get_rng_state())


def test_half_precision_is_rounded_full_precision() -> None:
    spec = expand(LARGE)
    full, half = built(spec), initialise(Transformer(spec).bfloat16())
    for name, parameter in full.named_parameters():
        assert torch.equal(parameter.bfloat16(), half.get_parameter(name))


def test_a_new_model_is_undecided() -> None:
    """Its loss is that of a guess: nothing explodes on the way through."""
    scaled = {"embed_scale": 16.0, "tied": False}
    for words in ({}, {"where": "post"}, {"where": "sandwich"}, scaled, {"positions": "alibi"}):
        model = cutaway.build({**LARGE, "layers": 8, **words})
        ids = torch.randint(0, 500, (64,), generator=torch.Generator().manual_seed(0)).tolist()
        losses = [-x for x in model.score(ids).logprobs if x is not None]
        assert abs(sum(losses) / len(losses) - math.log(500)) < 0.7, words
