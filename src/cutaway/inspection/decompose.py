"""Exact decomposition: a logit as the sum of what every part of the model adds to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.inspection.decomposition import Decomposition, PartKind, Share
from cutaway.inspection.linear import pre_cap, rows_of_head, signed, through
from cutaway.inspection.listed import names_listed
from cutaway.inspection.reading import Text, named, streamed, text_of, watching
from cutaway.inspection.route import Route, route_to
from cutaway.inspection.target import Of, Target, in_words, place_in, pooled_place, target_of
from cutaway.kernels import rounds
from cutaway.models import Transformer
from cutaway.models.head import Classifier, Head
from cutaway.modules.activation import ACTIVATIONS
from cutaway.modules.attention import Attention
from cutaway.modules.block import Branch
from cutaway.modules.embedding import Embedding
from cutaway.modules.mlp import Mlp
from cutaway.modules.moe import Moe
from cutaway.modules.norm import Norm
from cutaway.modules.score import near_rows
from cutaway.spec import ClassifierSpec
from cutaway.spec.names import match


@torch.no_grad()
def decompose(
    model: Transformer,
    ids: Sequence[int],
    of: Of | Tensor,
    *,
    position: int | None = None,
    at: str | None = None,
    source: Sequence[int] | None = None,
    types: Sequence[int] | None = None,
    neurons: Sequence[str] = (),
    sources: Sequence[str] = (),
    pieces: Sequence[str] | None = None,
    source_pieces: Sequence[str] | None = None,
) -> Decomposition:
    """A logit, a difference of two, a label's score, or a direction in the stream, as a sum over all parts.

    Parts are rows of the embedding, heads, feed-forward networks or experts, and biases. What lies between a part and
    the number is linear, but for the scale of a norm (after the branch, after the last layer), which is held (Elhage
    et al. 2021). A bias of the values is within its head's part.

    Args:
        model: in evaluation mode.
        ids: of one text; of an encoder–decoder, the decoder's.
        of: a token, two tokens, a label; or a direction, read off the stream as it is. [d_model]
        position: where; None for the last token, or for what a classifier's pooler reads.
        at: a point of the stream (``…resid_in``, ``….resid``); None for its end. A token's logit is there what the
            logit lens says.
        source: of an encoder–decoder, what its encoder reads.
        types: each token's type, where the model has types.
        neurons: feed-forward branches (``decoder.layers.3.mlp``, or patterns) to take apart by neuron.
        sources: attention branches to take apart by the position that was read.
        pieces, source_pieces: a text for each position, for labels.

    Raises:
        RequestError: the stream is no pure sum up to there (a post_norm), or the number is no linear function of it.
        NameNotFound: no such point or branch; the hint has the nearest.
    """
    text = text_of(model, ids, source, types)
    direction = of if isinstance(of, Tensor) else None
    target = None if isinstance(of, Tensor) else target_of(model.spec, of)
    route = route_to(model, at)
    main = route.stack == model.spec.main
    length = len(text.ids) if main else len(text.source or text.ids)
    where: int | None = place_in(length, position)
    if target is not None:
        rows_of_head(model, target)  # refuses before anything is run
        if not main:
            what = "logits are read off the decoder's stream"
            raise RequestError(what, field="at", got=at, hint="Give a direction, or a point of the decoder.")
        where = pooled_place(model.spec, length, position)
    assert where is not None
    wanted = (
        match(names_listed("neurons", neurons), route.feeds),
        match(names_listed("sources", sources), route.attentions),
    )
    seen = _run(model, text, route, where, *wanted)

    x = seen.get(route.end).double()
    held: list[str] = []
    constants: list[Share] = []
    if target is None:
        g = _direction(direction, model.spec.d_model)
        value, what = float(x @ g), f"a direction at {at or 'the end of the stream'}"
    else:
        rows, bias, scale = rows_of_head(model, target)
        norm = model.get_submodule(f"{route.stack}.norm")
        u = signed(rows.double()) * scale
        g, shift = through(norm, x, u)
        if isinstance(norm, Norm):
            held.append(f"{route.stack}.norm")
        if shift is not None:
            constants.append(Share(f"{route.stack}.norm.bias", "bias", None, shift))
        if bias is not None:
            name = "head.out.bias" if isinstance(model.head, Classifier) else "head.bias"
            constants.append(Share(name, "bias", None, float(signed(bias.double())) * scale))
        value = pre_cap(model, target, norm(seen.get(route.end)[None].to(model.device))[0])
        labels = model.spec.head.labels if isinstance(model.spec.head, ClassifierSpec) else ()
        what = in_words(target, labels) + ("" if at is None else f", read at {at}")

    shares = [*_embedded(model, route, seen, g, held)]
    for name, branch in route.branches:
        shares += _of_branch(name, branch, seen, g, held)
    return Decomposition(
        what=what,
        position=where,
        at=at or "end",
        shares=(*shares, *constants),
        value=value,
        capped=None if target is None or at is not None else _capped(model, target, seen.get(route.end)),
        held=tuple(held),
        neurons=seen.neurons,
        sources=seen.sources,
        pieces=named(pieces, text.ids if main or text.source is None else text.source, "pieces"),
        source_pieces=named(source_pieces, text.source or (), "source_pieces"),
        rounded=rounds(model),
    )


# ── what a pass shows ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Seen:
    """What a pass computed at one position, on the CPU; of values that heads read, at all of them."""

    kept: dict[str, Tensor] = field(default_factory=dict)
    wanted: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    neurons: dict[str, Tensor] = field(default_factory=dict)
    sources: dict[str, Tensor] = field(default_factory=dict)
    position: int = 0

    def get(self, name: str) -> Tensor:
        return self.kept[name]


def _run(
    model: Transformer, text: Text, route: Route, position: int, neurons: Sequence[str], sources: Sequence[str]
) -> _Seen:
    seen = _Seen(wanted=(frozenset(neurons), frozenset(sources)), position=position)
    embedding = _embedding(model, route)
    names = [f"{route.embed}.tokens", route.end]
    names += [f"{route.embed}.positions"] if embedding.spec.positions is not None else []
    names += [f"{route.embed}.types"] if embedding.spec.types else []
    for name, branch in route.branches:
        inner = ["body"]
        if isinstance(branch.body, Attention):
            inner += ["z", "weights", "v"] if name in sources else ["z"]
        else:
            inner += ["act"] if isinstance(branch.body, Mlp) else ["in", "router_weights"]
        names += [f"{name}.{word}" for word in inner]

    def see(name: str, value: Tensor) -> Tensor:
        if name.endswith(".v"):
            kept = value[0]
        else:
            kept = value[0, :, position] if name.endswith(".weights") else value[0, position]
        seen.kept[name] = kept.detach().clone().cpu()
        return value

    tap = watching(names, see)
    if route.embed == "source_embed":
        model.encode(torch.tensor([text.source]), tap=tap)
    else:
        streamed(model, text, tap)
    return seen


# ── what each adds ───────────────────────────────────────────────────────────────────────────────────────────


def _embedded(model: Transformer, route: Route, seen: _Seen, g: Tensor, held: list[str]) -> Iterator[Share]:
    """The rows of the embedding, through its norm where it has one."""
    rows = {word: seen.kept.get(f"{route.embed}.{word}") for word in ("tokens", "positions", "types")}
    there = {word: row.double() for word, row in rows.items() if row is not None}
    norm = _embedding(model, route).norm
    if norm is not None:
        held.append(f"{route.embed}.norm")
        g, shift = through(norm, torch.stack([*there.values()]).sum(0), g)
        if shift is not None:
            yield Share(f"{route.embed}.norm.bias", "bias", None, shift)
    for word, row in there.items():
        yield Share(f"{route.embed}.{word}", "embedding", None, float(row @ g))


def _of_branch(name: str, branch: Branch, seen: _Seen, g: Tensor, held: list[str]) -> Iterator[Share]:
    """What a branch adds, by head, expert and bias."""
    layer = int(name.split(".")[2])
    g, shift = through(branch.out_norm, seen.get(f"{name}.body").double(), g * branch.spec.scale)
    if isinstance(branch.out_norm, Norm):
        held.append(f"{name}.out_norm")
    body = branch.body
    kind: PartKind = "head"
    bias: Tensor | None = None
    if isinstance(body, Attention):
        n_heads, d_head = body.spec.n_heads, body.spec.d_head
        reads = (_dense(body.out.weight).t() @ g).view(n_heads, d_head)
        values = (seen.get(f"{name}.z").double() * reads).sum(-1)
        parts = {f"{name}.heads.{i}": float(value) for i, value in enumerate(values)}
        if name in seen.wanted[1]:
            seen.sources[name] = _by_source(name, body, seen, reads)
        bias = body.out.bias
    elif isinstance(body, Mlp):
        kind = "feed-forward"
        each = seen.get(f"{name}.act").double() * (_dense(body.down.weight).t() @ g)
        parts = {name: float(each.sum())}
        if name in seen.wanted[0]:
            seen.neurons[name] = each
        bias = body.down.bias
    else:
        assert isinstance(body, Moe)
        kind = "expert"
        each = _by_expert(name, body, seen, g)
        chosen = seen.get(f"{name}.router_weights").nonzero()[:, 0].tolist()
        parts = {f"{name}.experts.{i}": float(each[i].sum()) for i in chosen}
        if name in seen.wanted[0]:
            seen.neurons[name] = each
    for part, value in parts.items():
        yield Share(part, kind, layer, value)
    if bias is not None:
        yield Share(f"{name}.bias", "bias", layer, float(bias.cpu().double() @ g))
    if shift is not None:
        yield Share(f"{name}.out_norm.bias", "bias", layer, shift)


def _by_source(name: str, body: Attention, seen: _Seen, reads: Tensor) -> Tensor:
    """Weights × values × what reads them, before the sum over positions that were read. [head, key]"""
    weights = seen.get(f"{name}.weights").double()
    group = body.spec.n_heads // body.spec.n_kv_heads
    values = seen.get(f"{name}.v").double().repeat_interleave(group, dim=1)
    read = torch.einsum("khd,hd->hk", values, reads)
    if body.spec.relative is not None and body.near_values is not None:
        keys = torch.arange(weights.shape[1])[None]
        near = near_rows(body.spec.relative, torch.tensor([[seen.position]]), keys)[0, 0, 0]
        read = read + reads @ body.near_values.cpu().double()[near].t()
    return weights * read


def _by_expert(name: str, body: Moe, seen: _Seen, g: Tensor) -> Tensor:
    """What each neuron of each expert adds; 0 where the expert was not chosen. [expert, d_ff]"""
    x, shares = seen.get(f"{name}.in").double(), seen.get(f"{name}.router_weights").double()
    act = ACTIVATIONS[body.spec.expert.activation]
    each = torch.zeros(len(shares), body.spec.expert.d_ff, dtype=torch.float64)
    for i in shares.nonzero()[:, 0].tolist():
        up = _dense(body.up[i]) @ x
        opened = act(up) if body.gate is None else act(_dense(body.gate[i]) @ x) * up
        each[i] = shares[i] * opened * (_dense(body.down[i]).t() @ g)
    return each


def _embedding(model: Transformer, route: Route) -> Embedding:
    found = model.get_submodule(route.embed)
    assert isinstance(found, Embedding)
    return found


def _dense(weight: Tensor) -> Tensor:
    """The numbers that a weight stands for, wherever and however it is stored."""
    return weight.cpu().double()


def _direction(of: Tensor | None, width: int) -> Tensor:
    assert of is not None
    if of.shape != (width,) or not of.is_floating_point():
        raise RequestError("no direction in the stream", field="of", expected=f"floats [{width}]", got=list(of.shape))
    return of.detach().cpu().double()


def _capped(model: Transformer, target: Target, x: Tensor) -> float | None:
    """What is left of a logit, or of two and their difference, after the cap, if there is one."""
    if not isinstance(model.head, Head) or model.head.spec.soft_cap is None:
        return None
    y = model.get_submodule(f"{model.spec.main}.norm")(x[None, None].to(model.device))
    return float(signed(model.unembed(y)[0, 0, list(target.ids)].double()))
