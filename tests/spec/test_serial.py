"""Specs as JSON: exactly back, and nothing else taken."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.reference import tiny
from tests.spec.random_specs import random_spec

from cutaway.errors import ConfigError, CutawayError, LimitExceeded
from cutaway.models import Transformer
from cutaway.spec import AlibiBias, LongScaling, ModelSpec
from cutaway.spec.check import check
from cutaway.spec.parameters import parameter_shapes
from cutaway.spec.serial import difference, spec_from_json, spec_to_json

RANDOM = range(150)


def there_and_back(spec: ModelSpec) -> ModelSpec:
    return spec_from_json(json.loads(json.dumps(spec_to_json(spec), allow_nan=False)))


@pytest.mark.parametrize("seed", RANDOM)
def test_random_specs(seed: int) -> None:
    spec = random_spec(seed)
    assert there_and_back(spec) == spec


@pytest.mark.parametrize("name", tiny.CASES)
def test_every_family(name: str) -> None:
    spec = replace(tiny.spec_of(tiny.config(name)), kept=())
    assert there_and_back(spec) == spec


@pytest.mark.parametrize("name", [*tiny.CASES, *RANDOM])
def test_parameters_are_the_model_s(name: str | int) -> None:
    spec = random_spec(name) if isinstance(name, int) else tiny.spec_of(tiny.config(name))
    with torch.device("meta"):
        model = Transformer(spec)
    assert parameter_shapes(spec) == {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


@pytest.mark.parametrize("seed", range(40))
@torch.no_grad()
def test_what_is_checked_runs(seed: int) -> None:
    """Whatever passes the check is built and gives finite numbers."""
    from cutaway.models.init import built

    model = built(random_spec(seed), seed)
    ids = torch.randint(0, model.spec.vocab_size, (2, 12), generator=torch.Generator().manual_seed(seed))
    assert model(ids).isfinite().all()


def test_equal_layers_are_written_once() -> None:
    values = spec_to_json(tiny.spec_of(tiny.config("gemma3")))
    assert len(values["decoder"]["blocks"]) == 2
    assert values["decoder"]["layers"] == [0, 1, 0]


# ---- hostile ------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], object]


def at(path: str, value: Any) -> Change:
    def change(tree: Any) -> None:
        *way, last = path.split("/")[1:]
        for key in way:
            tree = tree[int(key) if isinstance(tree, list) else key]
        tree[int(last) if isinstance(tree, list) else last] = value

    return change


def without(path: str) -> Change:
    def change(tree: Any) -> None:
        *way, last = path.split("/")[1:]
        for key in way:
            tree = tree[int(key) if isinstance(tree, list) else key]
        del tree[last]

    return change


ATTN, MLP = "/decoder/blocks/0/branches/0/body", "/decoder/blocks/0/branches/1/body"
BAD: dict[str, tuple[str, Change]] = {
    "unknown field": ("/colour", at("/colour", 3)),
    "kept": ("/kept", at("/kept", [["a", "1"]])),
    "missing": ("/d_model", without("/d_model")),
    "width of 0": ("/d_model", at("/d_model", 0)),
    "width negative": ("/d_model", at("/d_model", -1)),
    "width a float": ("/d_model", at("/d_model", 32.0)),
    "width text": ("/d_model", at("/d_model", "32")),
    "width true": ("/d_model", at("/d_model", True)),
    "width 2^70": ("/d_model", at("/d_model", 2**70)),
    "head is a list": ("/head", at("/head", [])),
    "tied is 1": ("/head/tied", at("/head/tied", 1)),
    "eps of 0": ("/decoder/norm/eps", at("/decoder/norm/eps", 0)),
    "eps as text": ("/decoder/norm/eps", at("/decoder/norm/eps", "1e-5")),
    "eps infinite": ("/decoder/norm/eps", at("/decoder/norm/eps", math.inf)),
    "eps of 10^400": ("/decoder/norm/eps", at("/decoder/norm/eps", 10**400)),
    "norm of another kind": ("/decoder/norm/kind", at("/decoder/norm/kind", "batch")),
    "norm kind a list": ("/decoder/norm/kind", at("/decoder/norm/kind", ["rms"])),
    "no such block": ("/decoder/layers/1", at("/decoder/layers/1", 1)),
    "negative block": ("/decoder/layers/1", at("/decoder/layers/1", -1)),
    "block by name": ("/decoder/layers/1", at("/decoder/layers/1", "0")),
    "no layers": ("/decoder/blocks", at("/decoder/layers", [])),
    "layers no list": ("/decoder/layers", at("/decoder/layers", 3)),
    "unused block": (
        "/decoder/blocks",
        lambda t: t["decoder"]["blocks"].append(copy.deepcopy(t["decoder"]["blocks"][0])),
    ),
    "stack field": ("/decoder/depth", at("/decoder/depth", 1)),
    "body of no type": (f"{ATTN}/type", without(f"{ATTN}/type")),
    "body of another type": (f"{ATTN}/type", at(f"{ATTN}/type", "conv")),
    "body type a dict": (f"{ATTN}/type", at(f"{ATTN}/type", {})),
    "heads do not divide": (f"{ATTN}/n_kv_heads", at(f"{ATTN}/n_kv_heads", 3)),
    "rotary odd": (f"{ATTN}/rotary/d_rotary", at(f"{ATTN}/rotary/d_rotary", 3)),
    "rotary too wide": (f"{ATTN}/rotary/d_rotary", at(f"{ATTN}/rotary/d_rotary", 10)),
    "rotary base 0": (f"{ATTN}/rotary/base", at(f"{ATTN}/rotary/base", 0.0)),
    "scaling of no type": (f"{ATTN}/rotary/scaling/type", at(f"{ATTN}/rotary/scaling", {"factor": 2.0})),
    "factors too few": (
        f"{ATTN}/rotary/scaling/factors",
        at(f"{ATTN}/rotary/scaling", {"type": "factor", "factors": [1.0]}),
    ),
    "factor of 0": (
        f"{ATTN}/rotary/scaling/factors/1",
        at(f"{ATTN}/rotary/scaling", {"type": "factor", "factors": [1.0, 0.0, 1.0, 1.0]}),
    ),
    "factors no list": (
        f"{ATTN}/rotary/scaling/factors",
        at(f"{ATTN}/rotary/scaling", {"type": "factor", "factors": 1.0}),
    ),
    "window 0": (f"{ATTN}/mask/window", at(f"{ATTN}/mask/window", 0)),
    "dropout 2": (f"{ATTN}/dropout", at(f"{ATTN}/dropout", 2.0)),
    "cap negative": (f"{ATTN}/soft_cap", at(f"{ATTN}/soft_cap", -1.0)),
    "buckets too few": (
        f"{ATTN}/bias/n_buckets",
        at(f"{ATTN}/bias", {"type": "bucket", "n_buckets": 1, "max_distance": 9}),
    ),
    "norm after nothing": (
        f"{ATTN}/qk_norm_after",
        lambda t: (at(f"{ATTN}/rotary", None)(t), at(f"{ATTN}/qk_norm_after", True)(t)),
    ),
    "activation unknown": (f"{MLP}/activation", at(f"{MLP}/activation", "swish")),
    "branch name a path": ("/decoder/blocks/0/branches/0/name", at("/decoder/blocks/0/branches/0/name", "../x")),
    "branch name of another": ("/decoder/blocks/0/branches/0/name", at("/decoder/blocks/0/branches/0/name", "mlp")),
    "no branches": ("/decoder/blocks/0/branches", at("/decoder/blocks/0/branches", [])),
    "shared norm, not parallel": ("/decoder/blocks/0/shared_norm", at("/decoder/blocks/0/shared_norm", True)),
    "too many experts a token": (
        f"{MLP}/top_k",
        lambda t: (
            at("/decoder/blocks/0/branches/1/name", "moe")(t),
            at(MLP, {"type": "moe", "n_experts": 2, "top_k": 3, "expert": {"d_ff": 4, "activation": "silu"}})(t),
        ),
    ),
    "table without rows": (
        "/embedding/positions/offset",
        at("/embedding/positions", {"type": "learned", "n_rows": 2, "offset": 2}),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_hostile(case: str) -> None:
    field, change = BAD[case]
    values = spec_to_json(tiny.spec_of(tiny.config("llama")))
    change(values)
    with pytest.raises(ConfigError) as caught:
        spec_from_json(values)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("/vocab_size", at("/vocab_size", 1 << 40)),
        ("/decoder/layers", at("/decoder/layers", [0] * 5000)),
    ],
)
def test_more_than_any_model_has(field: str, change: Change) -> None:
    values = spec_to_json(tiny.spec_of(tiny.config("llama")))
    change(values)
    with pytest.raises(LimitExceeded) as caught:
        spec_from_json(values)
    assert caught.value.field == field


@pytest.mark.parametrize("value", [None, 3, "x", [], True])
def test_no_object(value: object) -> None:
    with pytest.raises(ConfigError):
        spec_from_json(value)


@pytest.mark.parametrize("seed", range(300))
def test_one_value_changed(seed: int) -> None:
    """Any value replaced by any other: a spec or an error of ours."""
    from random import Random

    r = Random(seed)
    tree: Any = spec_to_json(random_spec(seed))
    node, steps = tree, r.randint(1, 8)
    for _ in range(steps):
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            break
        key = r.choice(keys)
        if not isinstance(node[key], dict | list) or not node[key] or _ == steps - 1:
            node[key] = r.choice(
                [None, -1, 0, 1, 3, 2.5, -0.0, 10**30, 1e308, "x", "rms", [], [1], {}, True, [[]], {"type": "mlp"}]
            )
            break
        node = node[key]
    try:
        spec = spec_from_json(tree)
    except CutawayError:
        return
    assert there_and_back(spec) == spec


def test_difference_points_at_the_first() -> None:
    one = random_spec(3)
    assert difference(one, one) is None
    assert difference(one, replace(one, head=replace(one.head, tied=not one.head.tied))) == (
        "/head/tied",
        one.head.tied,
        not one.head.tied,
    )
    assert difference(LongScaling((1.0,), (2.0,), 4), LongScaling((1.0,), (3.0,), 4)) == ("/long/0", 2.0, 3.0)
    assert difference(AlibiBias(), None) == ("/", AlibiBias(), None)


def test_layers_of_one_bias_have_equal_heads() -> None:
    spec = tiny.spec_of(tiny.config("llama"))
    first = spec.decoder.layers[0]
    attn, rest = first.branches[0], first.branches[1:]
    body = replace(attn.body, rotary=None, bias=AlibiBias())  # type: ignore[type-var]
    few = replace(body, n_heads=2)  # type: ignore[type-var]
    layers = tuple(replace(first, branches=(replace(attn, body=b), *rest)) for b in (body, few))
    with pytest.raises(ConfigError, match="shared by layers of different heads"):
        check(replace(spec, decoder=replace(spec.decoder, layers=layers)))
