"""Whether this machine keeps the promise of ``deterministic=True``: the same bits, however a request is computed.

A processor's libraries choose the order of a sum by the number of rows that are computed together. On those we know,
the choice is the same for all multiples of four; this asks the machine itself, with the model's own weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from cutaway.cache.mask import plan_mask
from cutaway.errors import RequestError
from cutaway.models import Transformer
from cutaway.models.fused import FusedStack
from cutaway.models.head import Head
from cutaway.modules.activation import ACTIVATIONS
from cutaway.modules.block import Block
from cutaway.modules.linear import Linear, Product
from cutaway.modules.score import Attending
from cutaway.modules.steady import ROWS, filled, steady
from cutaway.modules.tap import Tap
from cutaway.spec import AttentionSpec, BlockSpec, MaskRule, MlpSpec, MoeSpec

SOME = (4, 8, 12, 20, 64, 260)  # rows that are computed alone in the trial
MOST = 512  # and together: as many as a piece of a prompt has
HEAD_MOST = 64  # rows that the head, the largest matrix, gets at once, in the trial and after it


def promise(model: Transformer) -> None:
    """Return if the same request will give the same bits.

    Raises:
        RequestError: it would not, and why: on this machine, or with this model.
    """
    threads = torch.get_num_threads()
    if model.probed is None or model.probed[0] != threads:
        model.probed = (threads, _tried(model))
    if model.probed[1]:
        hint = "Leave deterministic out: tokens then are the same but for near-ties."
        raise RequestError(model.probed[1], field="deterministic", expected=False, got=True, hint=hint)


@torch.no_grad()
def _tried(model: Transformer) -> str:
    """What goes wrong, in words; empty if nothing does."""
    for body in _bodies(layer for stack in model.spec.stacks.values() for layer in stack.layers):
        if isinstance(body, MoeSpec):
            return "experts take whichever tokens come together, so that their sums depend on the company"
    random = torch.Generator().manual_seed(0)
    for name, product, weight, bias, most in _products(model):
        x = torch.randn(most, weight.shape[1], generator=random).to(weight)
        whole = product(x, weight, bias)
        if any(not torch.equal(product(x[:n], weight, bias), whole[:n]) for n in SOME if n < most):
            return (
                f"this machine adds up {name} ({weight.shape[0]} × {weight.shape[1]}) in an order that depends on rows"
            )
    for body in _bodies(block.spec for block in _readable(model)):
        if isinstance(body, MlpSpec) and not _curve_is_steady(body, random, model):
            return f"this machine computes {body.activation} of {body.d_ff} numbers in a way that depends on rows"
        if isinstance(body, AttentionSpec) and not _attention_is_steady(body, random, model):
            return f"this machine adds up heads of {body.d_head} in an order that depends on what is beside them"
    return ""


def _readable(model: Transformer) -> Iterator[Block]:
    """The blocks that run as they are written: the native library's sums know no company."""
    for stack in (model.encoder, model.decoder):
        known = stack.whole.known if isinstance(stack.whole, FusedStack) else [None] * len(stack.layers)
        for block, laid_out in zip(stack.layers, known, strict=True):
            if isinstance(block, Block) and laid_out is None:
                yield block


def _bodies(layers: Iterable[BlockSpec]) -> Iterator[object]:
    """Each distinct branch's body."""
    yield from dict.fromkeys(branch.body for layer in dict.fromkeys(layers) for branch in layer.branches)


def unembedded(model: Transformer, rows: Tensor, tap: Tap | None = None) -> Tensor:
    """Logits of some vectors, by as many rows at once as were tried. [rows, d_model] → [rows, vocab]"""
    if len(rows) <= HEAD_MOST:
        return model.unembed(filled(rows)[:, None], tap)[: len(rows), 0]
    return torch.cat([unembedded(model, piece, tap) for piece in rows.split(HEAD_MOST)])


def _products(model: Transformer) -> Iterator[tuple[str, Product, Tensor, Tensor | None, int]]:
    """One matrix of each shape, how it is multiplied by, its bias, and how many rows to try."""
    seen: set[tuple[torch.Size, bool]] = set()
    for block in _readable(model):
        for name, module in block.named_modules():
            if isinstance(module, Linear) and (module.weight.shape, module.bias is None) not in seen:
                seen.add((module.weight.shape, module.bias is None))
                yield name, module.product, module.weight, module.bias, MOST
    if isinstance(model.head, Head):
        weight = model.embed.table if model.head.weight is None else model.head.weight
        yield "the head", model.head.product, weight, model.head.bias, HEAD_MOST


def _curve_is_steady(spec: MlpSpec, random: torch.Generator, model: Transformer) -> bool:
    x = torch.randn(MOST, spec.d_ff, generator=random).to(device=model.device, dtype=model.dtype)
    act = ACTIVATIONS[spec.activation]
    whole = act(x)
    return all(torch.equal(act(x[:n].contiguous()), whole[:n]) for n in SOME)


def _attention_is_steady(spec: AttentionSpec, random: torch.Generator, model: Transformer) -> bool:
    """A later piece of a text alone against the whole text in a batch of three."""
    spec = AttentionSpec(spec.n_heads, spec.n_kv_heads, spec.d_head, scale=spec.scale)
    n, tail = 72, 8

    def made(heads: int) -> Tensor:
        return torch.randn(3, heads, n, spec.d_head, generator=random).to(device=model.device, dtype=model.dtype)

    q, k, v = made(spec.n_heads), made(spec.n_kv_heads), made(spec.n_kv_heads)
    places = torch.arange(n).expand(3, -1)

    def run(rows: slice, queries: slice) -> Tensor:
        plan = plan_mask(MaskRule(), places[rows, queries], places[rows], None, None, model.device)
        return steady(
            q[rows, :, queries].contiguous(), k[rows].contiguous(), v[rows].contiguous(), Attending(spec, plan)
        )

    whole = run(slice(None), slice(None))
    last = run(slice(1, 2), slice(n - tail, n))
    four = run(slice(1, 2), slice(n - ROWS, n))
    return torch.equal(last[0], whole[1, :, n - tail :]) and torch.equal(four[0], whole[1, :, n - ROWS :])
