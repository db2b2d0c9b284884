"""Specs are data: frozen, compared by value, usable as keys, and made without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest
from tests.reference import tiny

from cutaway import spec as spec_module
from cutaway.spec import BlockSpec, LearnedPositions, MlpSpec, ModelSpec


@pytest.mark.parametrize("name", tiny.CASES)
def test_equal_by_value_and_hashable(name: str) -> None:
    one, two = tiny.spec_of(tiny.config(name)), tiny.spec_of(tiny.config(name))
    assert one is not two
    assert one == two
    assert len({one, two}) == 1
    assert replace(one, max_positions=one.max_positions + 1) != one


def test_frozen() -> None:
    spec = tiny.spec_of(tiny.config("llama"))
    with pytest.raises(FrozenInstanceError):
        spec.d_model = 5  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        spec.decoder.layers[0].attention.mask.window = 5  # type: ignore[misc]


def test_equal_layers_are_the_same_kind() -> None:
    """What compiled blocks share graphs by."""

    def kinds(name: str) -> int:
        return len(set(tiny.spec_of(tiny.config(name)).decoder.layers))

    assert (kinds("llama"), kinds("gemma3"), kinds("gpt2"), kinds("gpt2-inverse-layer")) == (1, 2, 1, 3)


def test_limits() -> None:
    assert LearnedPositions(18, offset=2).limit == 16
    spec: ModelSpec = tiny.spec_of(tiny.config("gpt2"))
    assert (spec.position_limit, spec.n_layers) == (64, 3)
    assert tiny.spec_of(tiny.config("llama")).position_limit is None


def test_a_block_without_attention_says_so() -> None:
    with pytest.raises(LookupError):
        _ = BlockSpec(()).attention


def test_public_names_are_sorted_and_there() -> None:
    assert spec_module.__all__ == sorted(spec_module.__all__)
    assert all(getattr(spec_module, name) for name in spec_module.__all__)
    assert MlpSpec(4, "silu").gated is False


def test_no_torch() -> None:
    program = "import sys, cutaway.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
