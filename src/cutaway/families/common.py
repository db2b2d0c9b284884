"""What most families' configs and tensors have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import Drop, Tie, WeightRule, rename
from cutaway.spec import Activation, AttentionSpec, BlockSpec, BranchSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
ACTIVATION_NAMES: dict[Activation, str] = {
    "silu": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
}
MOST_LAYERS, MOST_ROWS, MOST_POSITIONS = 4096, 1 << 24, 1 << 40


@dataclass(frozen=True)
class Sizes:
    """The numbers that every Llama-like config states."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    max_positions: int


def read_sizes(
    c: ConfigReader, *, max_positions: int = 2048, d_head: int | None = None, n_kv_heads: int | None = None
) -> Sizes:
    """Read them, with the family's defaults where a config may leave one out."""
    c.raw("model_type", None)
    d_model = c.integer("hidden_size")
    n_heads = c.integer("num_attention_heads")
    n_kv = c.integer("num_key_value_heads", n_kv_heads or n_heads)
    if n_heads % n_kv:
        raise c.error(
            "num_key_value_heads", "must divide num_attention_heads", expected=f"a divisor of {n_heads}", got=n_kv
        )
    width = c.integer("head_dim", d_head)
    if width is None:
        if d_model % n_heads:
            raise c.error(
                "num_attention_heads",
                "must divide hidden_size where head_dim is not stated",
                expected=f"a divisor of {d_model}",
                got=n_heads,
            )
        width = d_model // n_heads
    return Sizes(
        vocab_size=c.size("vocab_size", high=MOST_ROWS),
        d_model=d_model,
        n_layers=c.size("num_hidden_layers", high=MOST_LAYERS),
        n_heads=n_heads,
        n_kv_heads=n_kv,
        d_head=width,
        d_ff=c.integer("intermediate_size", high=1 << 24),
        max_positions=c.integer("max_position_embeddings", max_positions, high=MOST_POSITIONS),
    )


def spelled(c: ConfigReader, *keys: str) -> str:
    """The one of a setting's names that this config uses.

    Raises:
        ConfigError: it uses two, and they differ.
    """
    used = [key for key in keys if c.raw(key, None) is not None] or [keys[0]]
    for key in used[1:]:
        c.fixed(key, (c.raw(used[0]),))
    return used[0]


def head_width(c: ConfigReader, key: str, d_model: int, n_heads: int) -> int:
    """The width of a head where the heads together, as many as ``key`` says, are as wide as the stream."""
    if d_model % n_heads:
        raise c.error(key, "must divide the width of the stream", expected=f"a divisor of {d_model}", got=n_heads)
    return d_model // n_heads


def write_sizes(spec: ModelSpec) -> dict[str, Any]:
    """The same numbers, from a spec."""
    attention, mlp = parts(spec.decoder.layers[0])
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.d_head,
        "intermediate_size": mlp.d_ff,
        "max_position_embeddings": spec.max_positions,
        "attention_dropout": attention.dropout,
        "tie_word_embeddings": spec.lm.tied,
    }


def pre_norm_block(
    attention: AttentionSpec, mlp: MlpSpec | MoeSpec, norm: NormSpec, scale: float = 1.0, dropout: float = 0.0
) -> BlockSpec:
    """Attention, then feed-forward, each reading the stream through a norm: most of today's decoders."""
    name = "moe" if isinstance(mlp, MoeSpec) else "mlp"
    return BlockSpec(
        (
            BranchSpec("attn", attention, pre_norm=norm, scale=scale, dropout=dropout),
            BranchSpec(name, mlp, pre_norm=norm, scale=scale, dropout=dropout),
        )
    )


def parts(block: BlockSpec) -> tuple[AttentionSpec, MlpSpec]:
    """A block's attention and feed-forward: of experts, what one of them is."""
    bodies = [branch.body.expert if isinstance(branch.body, MoeSpec) else branch.body for branch in block.branches]
    return block.attention, next(body for body in bodies if isinstance(body, MlpSpec))


def first_norm(spec: ModelSpec) -> NormSpec:
    """The norm before the first branch, which the others of such families repeat."""
    norm = spec.decoder.layers[0].branches[0].pre_norm
    assert norm is not None
    return norm


def read_windows(c: ConfigReader, n_layers: int, window: int | None, pattern: list[str]) -> list[int | None]:
    """Each layer's window: from ``layer_types`` where stated, else from the family's own pattern."""
    types = c.words("layer_types", n_layers, ("full_attention", "sliding_attention")) or pattern
    if window is None and "sliding_attention" in types:
        raise c.error("sliding_window", "missing, though a layer slides", expected="an int", got=None)
    return [window if kind == "sliding_attention" else None for kind in types]


def write_windows(spec: ModelSpec) -> dict[str, Any]:
    """``layer_types`` and, where a layer slides, ``sliding_window``."""
    windows = [layer.attention.mask.window for layer in spec.decoder.layers]
    stated = {"layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows]}
    widths = {window for window in windows if window is not None}
    return {**stated, **({"sliding_window": widths.pop()} if widths else {})}


NORM_NAMES = {
    "attn.pre_norm": "input_layernorm",
    "mlp.pre_norm": "post_attention_layernorm",
    "moe.pre_norm": "post_attention_layernorm",
}


def layer_rules(block: BlockSpec, i: int, at: str, names: dict[str, str], stack: str = "decoder") -> list[WeightRule]:
    """Parts of layer ``i`` under other names, each with its bias where the spec says that it has one.

    Args:
        block: the layer.
        i: its number.
        at: what its tensors' names start with.
        names: our part → its name there.
        stack: whose layer.
    """
    biased = with_bias(block)
    return [
        rename(f"{stack}.layers.{i}.branches.{ours}.{kind}", f"{at}.{theirs}.{kind}")
        for ours, theirs in names.items()
        for kind in (("weight", "bias") if ours in biased else ("weight",))
    ]


def with_bias(block: BlockSpec) -> set[str]:
    """The parts of a block that have biases."""
    found: set[str] = set()
    for branch in block.branches:
        body, at = branch.body, f"{branch.name}.body"
        if isinstance(body, AttentionSpec):
            found |= {f"{at}.{x}" for x in "qkv"} if body.qkv_bias else set()
            found |= {f"{at}.out"} if body.out_bias else set()
            found |= {f"{at}.q_norm", f"{at}.k_norm"} if body.qk_norm is not None and body.qk_norm.bias else set()
        elif isinstance(body, MlpSpec):
            found |= {f"{at}.gate", f"{at}.up"} if body.bias else set()
            found |= {f"{at}.down"} if body.out_bias else set()
        for slot in ("pre_norm", "out_norm", "post_norm"):
            norm: NormSpec | None = getattr(branch, slot)
            found |= {f"{branch.name}.{slot}"} if norm is not None and norm.bias else set()
    return found


def llama_rules(spec: ModelSpec, norms: dict[str, str] | None = None) -> list[WeightRule]:
    """Tensors under the names that Llama gave them.

    Args:
        spec: whose tensors.
        norms: our norm → its name in a layer.
    """
    rules: list[WeightRule] = [rename("embed.tokens", "model.embed_tokens.weight")]
    for i, layer in enumerate(spec.decoder.layers):
        attention, mlp = parts(layer)
        names = {f"attn.body.{x}": f"self_attn.{x}_proj" for x in "qkv"}
        names |= {"attn.body.out": "self_attn.o_proj", "mlp.body.up": "mlp.up_proj", "mlp.body.down": "mlp.down_proj"}
        if mlp.gated:
            names["mlp.body.gate"] = "mlp.gate_proj"
        if attention.qk_norm is not None:
            names |= {"attn.body.q_norm": "self_attn.q_norm", "attn.body.k_norm": "self_attn.k_norm"}
        names |= norms or NORM_NAMES
        here = {branch.name for branch in layer.branches}  # experts have names of their own: see families/experts.py
        names = {ours: theirs for ours, theirs in names.items() if ours.split(".")[0] in here}
        rules += layer_rules(layer, i, f"model.layers.{i}", names)
        rules.append(Drop((f"model.layers.{i}.self_attn.rotary_emb.inv_freq",)))
    rules.append(rename("decoder.norm.weight", "model.norm.weight"))
    if spec.decoder.norm is not None and spec.decoder.norm.bias:
        rules.append(rename("decoder.norm.bias", "model.norm.bias"))
    if spec.lm.tied:
        rules.append(Tie(("lm_head.weight",), same_as="embed.tokens"))
    else:
        rules.append(rename("head.weight", "lm_head.weight"))
    if spec.lm.bias:
        rules.append(rename("head.bias", "lm_head.bias"))
    return rules
