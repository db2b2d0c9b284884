"""Small specs put together at random, every field away from its default now and then, all of them valid."""

from __future__ import annotations

from random import Random
from typing import Any

from cutaway.spec import (
    AlibiBias,
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    BucketBias,
    DynamicScaling,
    EmbeddingSpec,
    FactorScaling,
    HeadSpec,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    MaskRule,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RotarySpec,
    ShawRelative,
    SinusoidalPositions,
    StackSpec,
    YarnScaling,
)

D_MODEL = 16


def number(r: Random, low: float = 0.1, high: float = 4.0) -> float:
    return r.uniform(low, high)


def maybe(r: Random, value: Any, otherwise: Any = None) -> Any:
    return value if r.random() < 0.4 else otherwise


def norm(r: Random) -> NormSpec:
    return NormSpec(
        r.choice(["layer", "rms"]),  # type: ignore[arg-type]
        10 ** r.uniform(-7, -3),
        bias=r.random() < 0.5,
        offset=r.choice([0.0, 1.0]),
        cast=r.choice(["before", "after"]),  # type: ignore[arg-type]
    )


def rotary(r: Random, d_head: int) -> RotarySpec:
    width = r.choice([width for width in (2, 4, 6, 8) if width <= d_head])
    pairs = tuple(number(r, 1.0) for _ in range(width // 2))
    scalings = [
        None,
        LinearScaling(number(r)),
        Llama3Scaling(number(r), number(r, 0.5, 1.0), number(r, 2.0, 4.0), r.randint(4, 64)),
        YarnScaling(
            number(r), r.randint(4, 64), maybe(r, number(r)), number(r), number(r), maybe(r, 0.0), maybe(r, 1.5), False
        ),
        FactorScaling(pairs),
        LongScaling(pairs, pairs[::-1], r.randint(2, 64), number(r), maybe(r, number(r))),
        *([DynamicScaling(number(r, 1.0), r.randint(4, 64))] if width > 2 else []),
    ]
    return RotarySpec(10 ** r.uniform(1, 6), width, r.choice(scalings), interleaved=r.random() < 0.5)


def attention(r: Random, bias: Any) -> AttentionSpec:
    n_kv, group, d_head = r.choice([1, 2]), r.choice([1, 2]), r.choice([4, 6, 8])
    turned = maybe(r, rotary(r, d_head))
    return AttentionSpec(
        2 * group if bias is not None else n_kv * group,
        2 if bias is not None else n_kv,
        d_head,
        mask=MaskRule(r.random() < 0.8, maybe(r, r.randint(1, 9)), maybe(r, r.randint(1, 9)), r.random() < 0.3),
        rotary=turned,
        qk_norm=maybe(r, norm(r)),
        qk_norm_over=r.choice(["head", "width"]),  # type: ignore[arg-type]
        qk_norm_after=turned is not None and r.random() < 0.4,
        bias=bias,
        relative=maybe(r, ShawRelative(r.randint(1, 5), r.random() < 0.5)),
        clip=maybe(r, number(r)),
        scale=maybe(r, number(r)),
        soft_cap=maybe(r, number(r)),
        qkv_bias=r.random() < 0.5,
        out_bias=r.random() < 0.5,
        dropout=maybe(r, 0.25, 0.0),
    )


def mlp(r: Random, *, biases: bool = True) -> MlpSpec:
    return MlpSpec(
        r.randint(1, 24),
        r.choice(["relu", "relu2", "gelu", "gelu_tanh", "silu"]),  # type: ignore[arg-type]
        gated=r.random() < 0.5,
        bias=biases and r.random() < 0.5,
        out_bias=biases and r.random() < 0.5,
    )


def block(r: Random, bias: Any) -> BlockSpec:
    n = r.randint(1, 4)
    bodies: list[tuple[str, Any]] = [("attn", attention(r, bias))]
    if r.random() < 0.9:
        moe = MoeSpec(n, r.randint(1, n), mlp(r, biases=False), r.random() < 0.5, maybe(r, 0.1, 0.0))
        bodies.append(("moe", moe) if r.random() < 0.3 else ("mlp", mlp(r)))
    r.shuffle(bodies)
    parallel = r.random() < 0.3
    shared = parallel and r.random() < 0.5
    branches = []
    for i, (name, body) in enumerate(bodies):
        pre = norm(r) if shared and i == 0 else None if shared else maybe(r, norm(r))
        out, post, scale = maybe(r, norm(r)), maybe(r, norm(r)), maybe(r, number(r), 1.0)
        branches.append(BranchSpec(name, body, pre, out, post, scale, maybe(r, 0.1, 0.0)))
    return BlockSpec(tuple(branches), parallel, shared)


def random_spec(seed: int) -> ModelSpec:
    """A model of a few thousand parameters."""
    r = Random(seed)
    biases: list[Any] = [
        None,
        AlibiBias(r.choice(["append", "interleave"]), number(r, 1, 9), r.random() < 0.5, r.random() < 0.5),  # type: ignore[arg-type]
        BucketBias(r.choice([4, 8]), r.randint(5, 20), r.random() < 0.5),
    ]
    blocks = [block(r, maybe(r, r.choice(biases))) for _ in range(r.randint(1, 3))]
    # Layers of one bias share its table, and so have equally many heads.
    heads: dict[Any, int] = {}
    fitting = [b for b in blocks if heads.setdefault(b.attention.bias, b.attention.n_heads) == b.attention.n_heads]
    layers = tuple(r.choice(fitting) for _ in range(r.randint(1, 5)))
    positions = [
        None,
        LearnedPositions(r.randint(40, 50), r.randint(0, 3)),
        SinusoidalPositions(r.choice(["interleaved", "halves"])),  # type: ignore[arg-type]
    ]
    return ModelSpec(
        "cutaway",
        r.randint(8, 40),
        D_MODEL,
        r.randint(20, 99),
        EmbeddingSpec(maybe(r, number(r), 1.0), r.random() < 0.5, r.choice(positions), maybe(r, norm(r)), 0.0),
        StackSpec(layers, maybe(r, norm(r))),
        HeadSpec(r.random() < 0.5, r.random() < 0.3, maybe(r, number(r), 1.0), maybe(r, number(r))),
    )
