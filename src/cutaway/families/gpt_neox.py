"""GPT-NeoX and Pythia (Black et al. 2022; Biderman et al. 2023): branches side by side, each through its own norm."""

from __future__ import annotations

from typing import Any

from cutaway.families.common import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    first_norm,
    layer_rules,
    parts,
    read_sizes,
    write_sizes,
)
from cutaway.families.family import Family
from cutaway.families.rope import read_rotary, write_rotary
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import Drop, Fuse, Tie, WeightRule, rename
from cutaway.spec import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    EmbeddingSpec,
    HeadSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    RotarySpec,
    StackSpec,
)


def _rotary(c: ConfigReader, d_head: int, max_positions: int) -> RotarySpec:
    """The older spelling, ``rotary_emb_base`` and ``rotary_pct``, stands where the newer one says nothing."""
    base, share = c.number("rotary_emb_base", None, above=0), c.number("rotary_pct", None, above=0, high=1)
    rotary = read_rotary(c, d_head, max_positions, base=base or 10000.0, share=share or 0.25)
    if base is not None and base != rotary.base:
        raise c.error("rotary_emb_base", "differs from rope_parameters/rope_theta", expected=rotary.base, got=base)
    if share is not None and int(d_head * share) != rotary.d_rotary:
        expected = rotary.d_rotary / d_head
        raise c.error("rotary_pct", "differs from rope_parameters/partial_rotary_factor", expected=expected, got=share)
    return rotary


def read(c: ConfigReader) -> ModelSpec:
    """A ``GPTNeoXConfig`` as a spec."""
    n = read_sizes(c)
    for key, expected, got in (
        ("num_key_value_heads", n.n_heads, n.n_kv_heads),
        ("head_dim", n.d_model / n.n_heads, n.d_head),
    ):
        if got != expected:
            raise c.error(key, "q, k and v are each as wide as the stream", expected=expected, got=got)
    bias = c.flag("attention_bias", True)
    attention = AttentionSpec(
        n.n_heads,
        n.n_kv_heads,
        n.d_head,
        rotary=_rotary(c, n.d_head, n.max_positions),
        qkv_bias=bias,
        out_bias=bias,
        dropout=c.number("attention_dropout", 0.0, low=0, high=1),
    )
    mlp = MlpSpec(n.d_ff, c.choice("hidden_act", ACTIVATIONS, "gelu"), bias=True, out_bias=True)
    norm = NormSpec("layer", c.number("layer_norm_eps", 1e-5, above=0), bias=True)
    dropout = c.number("hidden_dropout", 0.0, low=0, high=1)
    branches = (
        BranchSpec("attn", attention, pre_norm=norm, dropout=dropout),
        BranchSpec("mlp", mlp, pre_norm=norm, dropout=dropout),
    )
    block = BlockSpec(branches, parallel=c.flag("use_parallel_residual", True))
    c.keep("classifier_dropout")
    for key in ("attention_probs_dropout_prob", "hidden_dropout_prob"):  # GPT-NeoX 20B states them; nobody reads them
        c.fixed(key, (0,), 0)
        c.keep(key)
    return ModelSpec(
        family="gpt_neox",
        vocab_size=n.vocab_size,
        d_model=n.d_model,
        max_positions=n.max_positions,
        embedding=EmbeddingSpec(dropout=dropout),
        decoder=StackSpec((block,) * n.n_layers, norm),
        head=HeadSpec(c.flag("tie_word_embeddings", False)),
        kept=c.finish(),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    block = spec.decoder.layers[0]
    attention, mlp = parts(block)
    assert attention.rotary is not None
    sizes = write_sizes(spec)
    return {
        **{key: value for key, value in sizes.items() if key not in ("num_key_value_heads", "head_dim")},
        "attention_bias": attention.qkv_bias,
        "hidden_act": ACTIVATION_NAMES[mlp.activation],
        "hidden_dropout": spec.embedding.dropout,
        "layer_norm_eps": first_norm(spec).eps,
        "rope_parameters": write_rotary(attention.rotary, attention.d_head),
        "use_parallel_residual": block.parallel,
    }


NAMES = {
    "attn.pre_norm": "input_layernorm",
    "attn.body.out": "attention.dense",
    "mlp.pre_norm": "post_attention_layernorm",
    "mlp.body.up": "mlp.dense_h_to_4h",
    "mlp.body.down": "mlp.dense_4h_to_h",
}


def rules(spec: ModelSpec) -> list[WeightRule]:
    """q, k and v of a head lie together, head after head."""
    out: list[WeightRule] = [rename("embed.tokens", "gpt_neox.embed_in.weight")]
    for i, layer in enumerate(spec.decoder.layers):
        at, n_heads = f"gpt_neox.layers.{i}", layer.attention.n_heads
        out += layer_rules(layer, i, at, NAMES)
        for kind in ("weight", "bias") if layer.attention.qkv_bias else ("weight",):
            qkv = tuple(f"decoder.layers.{i}.branches.attn.body.{x}.{kind}" for x in "qkv")
            stored = (f"{at}.attention.query_key_value.{kind}",)
            out.append(Fuse(qkv, stored, (spec.d_model,) * 3, groups=n_heads))
        # Older files carry the causal mask and the rotary speeds as tensors.
        out += [Drop((f"{at}.attention.{name}",)) for name in ("bias", "masked_bias", "rotary_emb.inv_freq")]
    out += [rename(f"decoder.norm.{kind}", f"gpt_neox.final_layer_norm.{kind}") for kind in ("weight", "bias")]
    if spec.lm.tied:
        return [*out, Tie(("embed_out.weight",), same_as="embed.tokens")]
    return [*out, rename("head.weight", "embed_out.weight")]


FAMILY = Family("gpt_neox", "GPTNeoXForCausalLM", read, write, rules, base_prefix="gpt_neox.")
