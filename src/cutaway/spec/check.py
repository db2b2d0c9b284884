"""What must hold of a spec before anything is built from it: ranges, and what fields say of one another."""

from __future__ import annotations

import math
import re
from dataclasses import fields, is_dataclass
from typing import Any

from cutaway.errors import ConfigError, LimitExceeded
from cutaway.spec.attention import AttentionSpec, MaskRule
from cutaway.spec.block import BlockSpec, BranchSpec
from cutaway.spec.head import ClassifierSpec
from cutaway.spec.mlp import MlpSpec, MoeSpec
from cutaway.spec.model import EmbeddingSpec, ModelSpec, StackSpec
from cutaway.spec.position import (
    BucketBias,
    DynamicScaling,
    FactorScaling,
    LearnedPositions,
    Llama3Scaling,
    LongScaling,
    RotarySpec,
    SinusoidalPositions,
    YarnScaling,
)

__all__ = ["MOST_LAYERS", "check"]

MOST_LAYERS = 4096
_SIZE, _ROWS, _LENGTH = 1 << 20, 1 << 24, 1 << 40
# Whole numbers are 1 … 2^20 but for these fields.
_WHOLE: dict[str, tuple[int, int]] = {
    "vocab_size": (1, _ROWS),
    "d_ff": (1, _ROWS),
    "n_rows": (1, _ROWS),
    "max_positions": (1, _LENGTH),
    "original_max_positions": (1, _LENGTH),
    "window": (1, _LENGTH),
    "chunk": (1, _LENGTH),
}
# Numbers are finite and above zero but for these; an offset of whole numbers is one of rows.
_REAL: dict[str, tuple[float, float]] = {
    "dropout": (0.0, 1.0),
    "jitter": (0.0, 1.0),
    "scale": (-math.inf, math.inf),
    "offset": (-math.inf, math.inf),
    "mscale": (0.0, math.inf),
    "mscale_all_dim": (0.0, math.inf),
}
_KINDS: dict[type, str] = {AttentionSpec: "attn", MlpSpec: "mlp", MoeSpec: "moe"}


def _fail(at: str, what: str, *, expected: object = None, got: object = None) -> ConfigError:
    return ConfigError(what, field=at, expected=expected, got=got)


def check(spec: ModelSpec) -> None:
    """Raise unless a model can be built from this and run.

    Raises:
        LimitExceeded: more layers or rows than any model has.
        ConfigError: with a pointer to the field, where each distinct block of the layers is counted once.
    """
    if spec.vocab_size > _ROWS:
        raise LimitExceeded("more than any model has", field="/vocab_size", expected=f"≤ {_ROWS}", got=spec.vocab_size)
    for name in ("encoder", "decoder"):
        n_layers = len(getattr(spec, name).layers)
        if not (1 if name == spec.main else 0) <= n_layers <= MOST_LAYERS:
            what, wanted = "a number of layers that no model has", f"1 to {MOST_LAYERS}"
            raise LimitExceeded(what, field=f"/{name}/layers", expected=wanted, got=n_layers)
    for name in ("vocab_size", "d_model", "max_positions"):
        _whole(getattr(spec, name), name, f"/{name}")
    both = len(spec.stacks) == 2
    if (spec.source is not None) != both:
        what = "is there where an encoder and a decoder are"
        raise _fail("/source", what, expected="an object" if both else None, got=spec.source)
    if spec.source_vocab_size is not None and not both:
        raise _fail("/source_vocab_size", "there is no source", expected=None, got=spec.source_vocab_size)
    if spec.source_vocab_size is not None:
        _whole(spec.source_vocab_size, "vocab_size", "/source_vocab_size")
    for at, embedding in (("/embedding", spec.embedding), ("/source", spec.source)):
        if embedding is not None:
            _embedding(embedding, spec.d_model, at)
    if spec.head is not None:
        _ranges(spec.head, "/head")
    if isinstance(spec.head, ClassifierSpec):
        if not spec.head.labels or len(spec.head.labels) > _ROWS:
            raise _fail("/head/labels", "a classifier has labels", expected="at least one", got=len(spec.head.labels))
        if spec.head.pooler is not None and spec.head.transform is not None:
            raise _fail("/head/transform", "a pooler has its own", expected=None, got=spec.head.transform)
    for name, stack in spec.stacks.items():
        _stack(stack, f"/{name}", may_cross=both and name == "decoder")


def _embedding(spec: EmbeddingSpec, d_model: int, at: str) -> None:
    _ranges(spec, at)
    table = spec.positions
    if isinstance(table, LearnedPositions) and table.limit < 1:
        raise _fail(f"{at}/positions/offset", "leaves no row", expected=f"< {table.n_rows}", got=table.offset)
    if isinstance(table, SinusoidalPositions) and table.layout == "halves" and d_model % 2:
        raise _fail("/d_model", "sines and cosines in halves need an even width", got=d_model)


def _stack(stack: StackSpec, where: str, may_cross: bool) -> None:
    if stack.norm is not None:
        _ranges(stack.norm, f"{where}/norm")
    _real(stack.dropout, "dropout", f"{where}/dropout")
    heads: dict[Any, int] = {}
    for i, block in enumerate(dict.fromkeys(stack.layers)):
        at = f"{where}/blocks/{i}"
        _block(block, at, may_cross)
        attention = block.attention
        if attention.bias is not None and heads.setdefault(attention.bias, attention.n_heads) != attention.n_heads:
            raise _fail(f"{at}: bias", "is shared by layers of different heads", got=sorted({*heads.values()}))


def _whole(value: int, name: str, at: str) -> None:
    low, high = _WHOLE.get(name, (0 if name in ("offset", "types") else 1, _SIZE))
    if not low <= value <= high:
        raise _fail(at, "not a whole number in range", expected=f"int {low}…{high}", got=value)


def _real(value: float, name: str, at: str) -> None:
    if not math.isfinite(value):
        raise _fail(at, "is not finite", got=value)
    if name in _REAL:
        low, high = _REAL[name]
        if not low <= value <= high:
            raise _fail(at, "out of range", expected=f"a number ≥ {low} and ≤ {high}", got=value)
    elif value <= 0:
        raise _fail(at, "out of range", expected="a number > 0", got=value)


def _ranges(spec: Any, at: str) -> None:
    """Every number of a spec and of those inside it."""
    for field in fields(spec):
        value, inner = getattr(spec, field.name), f"{at}/{field.name}"
        if is_dataclass(value):
            _ranges(value, inner)
        elif isinstance(value, tuple):
            for i, item in enumerate(value):
                if isinstance(item, float):
                    _real(item, field.name, f"{inner}/{i}")
        elif isinstance(value, float):
            _real(value, field.name, inner)
        elif isinstance(value, int) and not isinstance(value, bool):
            _whole(value, field.name, inner)


def _block(block: BlockSpec, at: str, may_cross: bool) -> None:
    names = [branch.name for branch in block.branches]
    for i, branch in enumerate(block.branches):
        where = f"{at}/branches/{i}"
        crosses = isinstance(branch.body, AttentionSpec) and branch.body.cross
        if crosses and not may_cross:
            raise _fail(f"{where}/body/cross", "there is no encoder's output to read", expected=False, got=True)
        kind = "cross" if crosses else _KINDS[type(branch.body)]
        if not re.fullmatch(rf"{kind}[0-9]*", branch.name) or names.count(branch.name) > 1:
            raise _fail(f"{where}/name", "is no name for this branch, or a second one", expected=kind, got=branch.name)
        _ranges(branch, where)
        _branch(branch, where)
    over = [branch.body.cross for branch in block.branches if isinstance(branch.body, AttentionSpec)]
    if over.count(False) != 1 or over.count(True) > 1:
        raise _fail(f"{at}/branches", "a block has one attention, and perhaps one cross", expected="attn", got=names)
    if block.shared_norm:
        others = [branch.pre_norm for branch in block.branches[1:]]
        if not block.parallel or block.branches[0].pre_norm is None or any(norm is not None for norm in others):
            raise _fail(f"{at}/shared_norm", "needs a parallel block whose first branch alone has a pre_norm")


def _branch(branch: BranchSpec, at: str) -> None:
    at += "/body"
    match branch.body:
        case AttentionSpec() as attention:
            _attention(attention, at)
        case MoeSpec() as moe:
            if moe.top_k > moe.n_experts:
                raise _fail(f"{at}/top_k", "more than there are", expected=f"≤ {moe.n_experts}", got=moe.top_k)
            if moe.expert.bias or moe.expert.out_bias:
                raise _fail(f"{at}/expert/bias", "experts have no biases here", expected=False, got=True)
        case MlpSpec():
            pass


def _attention(spec: AttentionSpec, at: str) -> None:
    if spec.n_heads % spec.n_kv_heads:
        wanted = f"a divisor of {spec.n_heads}"
        raise _fail(f"{at}/n_kv_heads", "must divide n_heads", expected=wanted, got=spec.n_kv_heads)
    if spec.qk_norm_after and spec.rotary is None:
        raise _fail(f"{at}/qk_norm_after", "there is no rotation to come after", expected=False, got=True)
    if isinstance(spec.bias, BucketBias):
        exact = spec.bias.n_buckets // (4 if spec.bias.both_ways else 2)
        if exact < 1 or spec.bias.max_distance <= exact:
            wanted = f"some, and max_distance > {max(exact, 1)}"
            raise _fail(f"{at}/bias/n_buckets", "too few buckets", expected=wanted, got=spec.bias.n_buckets)
    if spec.cross:
        plain: dict[str, object] = {"rotary": None, "bias": None, "relative": None, "mask": MaskRule(causal=False)}
        for name, value in plain.items():
            if getattr(spec, name) != value:
                what = "a source has no distance from the decoder's tokens"
                raise _fail(f"{at}/{name}", what, expected=value, got=getattr(spec, name))
    if spec.rotary is not None:
        _rotary(spec.rotary, spec.d_head, f"{at}/rotary")


def _rotary(spec: RotarySpec, d_head: int, at: str) -> None:
    if spec.d_rotary % 2 or not 2 <= spec.d_rotary <= d_head:
        wanted = f"an even number, 2 to {d_head}"
        raise _fail(f"{at}/d_rotary", "channels turn in pairs within a head", expected=wanted, got=spec.d_rotary)
    inner = f"{at}/scaling"
    match spec.scaling:
        case Llama3Scaling() as llama3 if llama3.high_freq_factor <= llama3.low_freq_factor:
            wanted = f"> {llama3.low_freq_factor}"
            raise _fail(f"{inner}/high_freq_factor", "out of range", expected=wanted, got=llama3.high_freq_factor)
        case YarnScaling() if spec.base <= 1:
            raise _fail(f"{at}/base", "this scaling divides by its logarithm", expected="> 1", got=spec.base)
        case DynamicScaling() if spec.d_rotary == 2:
            raise _fail(f"{at}/d_rotary", "this scaling needs more than one pair", expected="≥ 4", got=2)
        case LongScaling() as long if long.original_max_positions < 2:
            raise _fail(f"{inner}/original_max_positions", "this scaling divides by its logarithm", expected="≥ 2")
        case _:
            pass
    lists: dict[str, tuple[float, ...]] = {}
    if isinstance(spec.scaling, LongScaling):
        lists = {"short": spec.scaling.short, "long": spec.scaling.long}
    elif isinstance(spec.scaling, FactorScaling):
        lists = {"factors": spec.scaling.factors}
    for name, values in lists.items():
        if len(values) != spec.d_rotary // 2:
            what = "one factor for each rotary pair is needed"
            raise _fail(f"{inner}/{name}", what, expected=spec.d_rotary // 2, got=len(values))
