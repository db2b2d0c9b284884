"""A head's matrices as tokens meet them: what it reads of an embedding, and by what it writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.errors import NameNotFound, RequestError
from cutaway.inspection.ablation import heads_of
from cutaway.inspection.points import branch_of
from cutaway.inspection.readout import held, main_stack, rows_of, spread, table_of
from cutaway.models import Transformer
from cutaway.modules.attention import Attention
from cutaway.modules.block import Branch
from cutaway.modules.norm import Norm
from cutaway.modules.stack import Stack

_EARLIER = "as in the first layer: what earlier layers add is left out."
ALONE = f"Each token stands for its embedding alone, without its position's, {_EARLIER}"


def head_of(model: Transformer, branch: str, head: int) -> tuple[Branch, Attention, Stack]:
    """A head's branch, its attention and its stack.

    Raises:
        NameNotFound: no such branch.
        RequestError: no such head, or one that reads what an encoder made.
    """
    known = {name: n for stack in model.spec.stacks for name, n in heads_of(model, stack).items()}
    if not isinstance(branch, str) or branch not in known:
        hint = f"A name is such as {next(iter(known), 'decoder.layers.0.attn')}."
        raise NameNotFound("no branch with heads has this name", field=branch, hint=hint)
    if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < known[branch]:
        raise RequestError("no such head", field=branch, expected=f"0…{known[branch] - 1}", got=head)
    at = branch_of(model, branch)
    assert isinstance(at.body, Attention)
    if at.body.spec.cross:
        raise RequestError("its keys are of what an encoder made, not of tokens", field="branch", got=branch)
    stack = model.decoder if branch.startswith("decoder.") else model.encoder
    return at, at.body, stack


def tokens_of(model: Transformer, branch: str) -> Tensor:
    """The table of the tokens that a stack reads."""
    own = model.source_embed is not None and model.source_embed.tokens is not None and branch.startswith("encoder.")
    return table_of(model, "source" if own else "input")


def embedded(model: Transformer, branch: str, ids: Sequence[int] | slice) -> Tensor:
    """Tokens as they enter a stack, without their positions. [token, d_model]"""
    embed = model.source_embed if model.source_embed is not None and branch.startswith("encoder.") else model.embed
    x = rows_of(tokens_of(model, branch), ids) * embed.spec.scale
    x = x.to(model.dtype)
    return x if embed.norm is None else embed.norm(x)


def evened(at: Branch, x: Tensor, weighted: bool = True) -> Tensor:
    """What a branch reads of the stream, its norm's scale that of each row and without its bias. [token, d_model]"""
    if not isinstance(at.pre_norm, Norm):
        return x.float()
    scale = spread(at.pre_norm.spec, x)
    if weighted:
        return held(at.pre_norm, x, scale)
    even = x.float() - x.float().mean(-1, keepdim=True) if at.pre_norm.spec.kind == "layer" else x.float()
    return even * scale


def value_rows(at: Branch, body: Attention, head: int) -> Tensor:
    """The rows of the value matrix that a head reads by. [d_head, d_model]"""
    kv = head // (body.spec.n_heads // body.spec.n_kv_heads)
    return rows_of(body.v.weight, slice(kv * body.spec.d_head, (kv + 1) * body.spec.d_head))


def output_columns(model: Transformer, at: Branch, body: Attention, head: int) -> Tensor:
    """The columns of the output matrix that a head writes by, through the norms that follow. [d_model, d_head]"""
    d_head = body.spec.d_head
    # Picked by a product: of a stored matrix only whole rows are read otherwise.
    pick = torch.zeros(d_head, body.out.weight.shape[1], device=model.device)
    pick[torch.arange(d_head), head * d_head + torch.arange(d_head)] = 1.0
    columns = F.linear(pick.to(model.dtype), body.out.weight).float()  # [d_head, d_model]
    one = torch.ones(1, 1, device=model.device)
    columns = held(at.out_norm, columns, one) * at.spec.scale
    return held(main_stack(model).norm, columns, one).t()
