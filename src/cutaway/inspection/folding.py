"""Folding: the weight and bias of a norm become part of the matrices that read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from cutaway.errors import RequestError
from cutaway.inspection.rewrite import Draft, Rewritten
from cutaway.models import Transformer
from cutaway.spec import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    ClassifierSpec,
    HeadSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    PoolerSpec,
    StackSpec,
    TransformSpec,
)


@torch.no_grad()
def fold_norms(model: Transformer, *, partly: bool = False) -> Rewritten:
    """Norms that only divide (and centre): their weights and biases go into the matrices that read them.

    ``W (w ∘ x̂ + b) + c = (W ∘ w) x̂ + (W b + c)``, for queries, keys, values, gates, ups, routers and experts, the keys
    and values that a decoder makes of its encoder's output, and the head, which is untied for it. Biases that were
    folded are gone from the spec, and those that it took to hold them are there. What the last norm gives (``hidden``,
    an encoder's vectors) is then the stream divided, and nothing more.

    Args:
        model: is only read.
        partly: leave alone what has no matrix after it (a post_norm, an out_norm), and fold the rest.

    Raises:
        RequestError: a norm that writes to the stream, a bias before experts, which have none; or nothing to fold.
    """
    draft = Draft(model)
    folds = [*_folds(draft, partly)]
    if not folds:
        raise RequestError("no norm of this model is read by a matrix", field="norm", hint="There is nothing to fold.")
    for fold in folds:
        if fold.norm.bias and any(reader.bias is None for reader in fold.readers):
            what = "the norm before the experts has a bias, and experts and routers have none to take it"
            raise RequestError(what, field=fold.name, expected="a norm without a bias")
        _fold(draft, fold)
    _respell(draft, {fold.name for fold in folds})
    return draft.finish("norms folded", "logits")


@dataclass(frozen=True, slots=True)
class _Reader:
    """A matrix that reads a norm's output, and the bias after it, where there can be one."""

    weight: str
    bias: str | None


@dataclass(frozen=True, slots=True)
class _Fold:
    """A norm and all that reads it."""

    name: str
    norm: NormSpec
    readers: Sequence[_Reader]


def _linear(*names: str) -> list[_Reader]:
    return [_Reader(f"{name}.weight", f"{name}.bias") for name in names]


def _folds(draft: Draft, partly: bool) -> Iterator[_Fold]:
    """Every norm that matrices read, with them; others are noted, or refused."""
    spec = draft.spec
    for at, embedding in (("embed", spec.embedding), ("source_embed", spec.source)):
        if embedding is not None and embedding.norm is not None:
            draft.kept[f"{at}.norm"] = "what it gives is the stream itself"
    for stack_name, stack in spec.stacks.items():
        for i, block in enumerate(stack.layers):
            yield from _of_block(draft, f"{stack_name}.layers.{i}.branches", block, partly)
        if stack.norm is None:
            continue
        name = f"{stack_name}.norm"
        readers = _of_head(draft) if stack_name == spec.main else _of_cross(spec.decoder)
        if readers:
            yield _Fold(name, stack.norm, readers)
        else:
            draft.kept[name] = "what it gives is the answer"
    yield from _in_head(draft)


def _of_block(draft: Draft, at: str, block: BlockSpec, partly: bool) -> Iterator[_Fold]:
    for j, branch in enumerate(block.branches):
        name = f"{at}.{branch.name}"
        for word in ("out_norm", "post_norm"):
            if getattr(branch, word) is not None:
                if not partly:
                    what = f"a norm writes to the stream ({word}), and no matrix follows that could take its weight"
                    hint = "partly=True folds the norms that matrices read, and leaves these."
                    raise RequestError(what, field=f"{name}.{word}", hint=hint)
                draft.kept[f"{name}.{word}"] = "what it gives is written to the stream"
        if isinstance(branch.body, AttentionSpec) and branch.body.qk_norm is not None:
            for word in ("q_norm", "k_norm"):
                draft.kept[f"{name}.body.{word}"] = "between it and the scores is no matrix"
        if branch.pre_norm is not None:
            served = block.branches if block.shared_norm and j == 0 else (branch,)
            readers = [reader for one in served for reader in _of_branch(f"{at}.{one.name}.body", one)]
            yield _Fold(f"{name}.pre_norm", branch.pre_norm, readers)


def _of_branch(at: str, branch: BranchSpec) -> list[_Reader]:
    match branch.body:
        case AttentionSpec(cross=True):  # keys and values are of the encoder's output
            return _linear(f"{at}.q")
        case AttentionSpec():
            return _linear(f"{at}.q", f"{at}.k", f"{at}.v")
        case MlpSpec(gated=gated):
            return _linear(*([f"{at}.gate"] if gated else []), f"{at}.up")
        case MoeSpec(expert=expert):
            inner = ["router.weight", *(["gate"] if expert.gated else []), "up"]
            return [_Reader(f"{at}.{name}", None) for name in inner]


def _of_cross(decoder: StackSpec) -> list[_Reader]:
    """What a decoder makes of its encoder's output."""
    found = []
    for i, block in enumerate(decoder.layers):
        for branch in block.branches:
            if isinstance(branch.body, AttentionSpec) and branch.body.cross:
                at = f"decoder.layers.{i}.branches.{branch.name}.body"
                found += _linear(f"{at}.k", f"{at}.v")
    return found


def _of_head(draft: Draft) -> list[_Reader]:
    """The first matrix of the head; pooling goes by, as it is a mean or a choice. A head that is tied gets its own."""
    match draft.spec.head:
        case HeadSpec(transform=None):
            draft.untie()
            return [_Reader("head.weight", "head.bias")]
        case ClassifierSpec(pooler=None, transform=None) | ClassifierSpec(pooler=PoolerSpec(transform=None)):
            return _linear("head.out")
        case ClassifierSpec(pooler=PoolerSpec()):
            return _linear("head.pooler.transform.dense")
        case HeadSpec() | ClassifierSpec() | PoolerSpec(transform=TransformSpec()):
            return _linear("head.transform.dense")
        case _:
            return []


def _in_head(draft: Draft) -> Iterator[_Fold]:
    """The norm after a head's curve, before its last matrix."""
    match draft.spec.head:
        case HeadSpec(transform=TransformSpec(norm=NormSpec() as norm)):
            draft.untie()
            yield _Fold("head.transform.norm", norm, [_Reader("head.weight", "head.bias")])
        case ClassifierSpec(transform=TransformSpec(norm=NormSpec() as norm)):
            yield _Fold("head.transform.norm", norm, _linear("head.out"))
        case ClassifierSpec(pooler=PoolerSpec(transform=TransformSpec(norm=NormSpec() as norm))):
            yield _Fold("head.pooler.transform.norm", norm, _linear("head.out"))
        case PoolerSpec(transform=TransformSpec(norm=NormSpec())):
            draft.kept["head.transform.norm"] = "what it gives is the answer"
        case _:
            pass


def _fold(draft: Draft, fold: _Fold) -> None:
    w = draft.numbers(f"{fold.name}.weight").cpu().double() + fold.norm.offset
    for reader in fold.readers:
        if fold.norm.bias and reader.bias is not None:
            shift = draft.product(reader.weight, draft.numbers(f"{fold.name}.bias").cpu().double())
            before = draft.numbers(reader.bias).cpu().double() if draft.has(reader.bias) else 0.0
            draft.set(reader.bias, before + shift)
        draft.change(reader.weight, lambda rows: rows * w)  # [..., d_model], experts too
    draft.set(f"{fold.name}.weight", torch.full_like(w, 1.0 - fold.norm.offset))


# ── the spec that goes with it ───────────────────────────────────────────────────────────────────────────────


def _respell(draft: Draft, folded: set[str]) -> None:
    """Norms without biases, and matrices with those that they took over; zeros where a flag brings more than that."""
    spec = draft.spec
    stacks = {name: _stack(draft, name, stack, folded) for name, stack in spec.stacks.items()}
    draft.spec = replace(spec, **stacks, head=_head(draft, spec.head, folded))  # type: ignore[arg-type]


def _plain(norm: NormSpec | None, name: str, folded: set[str]) -> NormSpec | None:
    return replace(norm, bias=False) if norm is not None and name in folded else norm


def _stack(draft: Draft, name: str, stack: StackSpec, folded: set[str]) -> StackSpec:
    layers = []
    for i, block in enumerate(stack.layers):
        at = f"{name}.layers.{i}.branches"
        branches = []
        for branch in block.branches:
            inner = f"{at}.{branch.name}"
            norm = _plain(branch.pre_norm, f"{inner}.pre_norm", folded)
            branches.append(replace(branch, pre_norm=norm, body=_body(draft, f"{inner}.body", branch)))
        layers.append(replace(block, branches=tuple(branches)))
    return replace(stack, layers=tuple(layers), norm=_plain(stack.norm, f"{name}.norm", folded))


def _body(draft: Draft, at: str, branch: BranchSpec) -> AttentionSpec | MlpSpec | MoeSpec:
    """The same with biases, if one of its matrices has got one; the others get zeros."""
    match branch.body:
        case AttentionSpec() as attention:
            names = [f"{at}.{word}" for word in "qkv"]
            return replace(attention, qkv_bias=_all_biased(draft, names))
        case MlpSpec() as mlp:
            names = [f"{at}.{word}" for word in (["gate", "up"] if mlp.gated else ["up"])]
            return replace(mlp, bias=_all_biased(draft, names))
        case MoeSpec() as moe:
            return moe


def _all_biased(draft: Draft, names: list[str]) -> bool:
    if not any(draft.has(f"{name}.bias") for name in names):
        return False
    for name in names:
        if not draft.has(f"{name}.bias"):
            draft.set(f"{name}.bias", torch.zeros(len(draft.numbers(f"{name}.weight"))))
    return True


def _head(
    draft: Draft, head: HeadSpec | PoolerSpec | ClassifierSpec | None, folded: set[str]
) -> HeadSpec | PoolerSpec | ClassifierSpec | None:
    match head:
        case HeadSpec():
            made = _transform(draft, head.transform, "head.transform", folded)
            return replace(head, bias=draft.has("head.bias"), transform=made)
        case PoolerSpec():
            return replace(head, transform=_transform(draft, head.transform, "head.transform", folded))
        case ClassifierSpec():
            pooler = head.pooler
            if pooler is not None:
                made = _transform(draft, pooler.transform, "head.pooler.transform", folded)
                pooler = replace(pooler, transform=made)
            made = _transform(draft, head.transform, "head.transform", folded)
            return replace(head, bias=draft.has("head.out.bias"), pooler=pooler, transform=made)
        case None:
            return None


def _transform(draft: Draft, spec: TransformSpec | None, at: str, folded: set[str]) -> TransformSpec | None:
    if spec is None:
        return None
    return replace(spec, bias=draft.has(f"{at}.dense.bias"), norm=_plain(spec.norm, f"{at}.norm", folded))
