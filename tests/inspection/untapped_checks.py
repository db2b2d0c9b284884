"""With nothing watched, the modules are what they would be if there were no taps in their source.

Run by ``test_untapped.py``, in a process of its own, for the shape checks of other tests are in the graphs.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from cutaway.models import Transformer
from cutaway.modules.attention import LayerInputs
from tests.inspection import bare
from tests.reference import tiny, tiny_seq2seq

CASES = (
    "gpt2",
    "llama",
    "gemma3-caps",
    "mistral-window",
    "olmo2",
    "bloom",
    "mpt",
    "gpt-neox",
    "phi-qk-norm",
    "stablelm-parallel",
)
FOLDER = tempfile.TemporaryDirectory()
bare.write(Path(FOLDER.name))
sys.path.insert(0, FOLDER.name)


def graph(block: torch.nn.Module, x: Tensor, inputs: Any) -> list[tuple[str, ...]]:
    """Every node that ``torch.compile`` makes of a block: what it is, and of which others."""
    found: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        found.append(module)
        return module.forward

    def run(block: torch.nn.Module, x: Tensor, inputs: Any) -> Tensor:
        return block(x, inputs)

    torch._dynamo.reset()
    torch.compile(run, backend=backend, fullgraph=True, dynamic=True)(block, x, inputs)
    (one,) = found
    return [(n.op, n.name, str(n.target), str(n.args), str(n.kwargs)) for n in one.graph.nodes]


def both(model: Transformer, index: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A layer, and the same without taps."""
    stack = model.decoder if model.spec.main == "decoder" else model.encoder
    tapped = stack.layers[index]
    plain = importlib.import_module("bare.block").Block(tapped.spec, model.spec.d_model).eval()
    plain.load_state_dict(tapped.state_dict())
    return tapped, plain


def given(model: Transformer, index: int) -> tuple[Tensor, LayerInputs]:
    """What a layer gets in a pass over a text."""
    stack = model.decoder
    caught: list[tuple[Tensor, LayerInputs]] = []
    handle = stack.layers[index].register_forward_pre_hook(lambda _, args: caught.append((args[0], args[1])))
    source = model.read(torch.tensor([[5, 6, 7, 8, 9]])) if model.spec.source is not None else None
    model(torch.tensor([[5, 9, 7, 11, 3, 8]]), source=source)
    handle.remove()
    return caught[0]


@pytest.mark.parametrize("case", [*CASES, "t5", "bart"])
@torch.no_grad()
def test_the_graph_is_the_same_node_for_node(case: str) -> None:
    model = tiny_seq2seq.transformer(case) if case in tiny_seq2seq.FAMILIES else tiny.transformer(case)
    tapped, plain = both(model, 1)
    x, inputs = given(model, 1)
    assert torch.equal(tapped(x, inputs), plain(x, inputs))
    one, two = graph(tapped, x, inputs), graph(plain, x, inputs)
    assert len(one) > 15
    assert one == two


class Calls(TorchDispatchMode):
    """Counts what reaches PyTorch's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def opcodes(run: Callable[[], Any]) -> int:
    """Python's own instructions in a call, all frames of it."""
    count = 0

    def trace(frame: types.FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_plain_pass_calls_the_same_kernels(case: str) -> None:
    """Operation by operation. What is left of taps in eager code is comparisons with None: they are counted too."""
    tapped, plain = both(model := tiny.transformer(case), 1)
    x, inputs = given(model, 1)
    counts = []
    for block in (tapped, plain):
        with Calls() as calls:
            block(x, inputs)
        counts.append(calls.count)
    assert counts[0] == counts[1]
    one, two = (opcodes(lambda block=block: block(x, inputs)) for block in (tapped, plain))
    print(f"{case}: {one} of Python's instructions, {two} without taps")
    assert (
        two < one <= 1.02 * two
    )  # measured: 53 to 69 of about 3,200; of all instructions 0.02 % (benchmarks/untapped.py)


def test_taps_were_really_taken_out() -> None:
    """The comparison would show a tap that adds anything: one operation more in the tapped block."""
    model = tiny.transformer("llama")
    tapped, plain = both(model, 1)
    x, inputs = given(model, 1)
    original = type(tapped.branches["mlp"].body).forward

    def louder(self: Any, x: Tensor, tap: Any = None) -> Tensor:
        return original(self, x, tap) * 1.0

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(type(tapped.branches["mlp"].body), "forward", louder)
        assert graph(tapped, x, inputs) != graph(plain, x, inputs)
    assert "tap" not in type(plain).forward.__code__.co_varnames
    assert "tap" in type(tapped).forward.__code__.co_varnames
