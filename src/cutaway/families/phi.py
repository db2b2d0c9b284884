"""Phi-1, 1.5 and 2 (Gunasekar et al. 2023): one norm for two branches, biases everywhere, a partial rotation."""

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
from cutaway.formats.rules import Drop, Tie, WeightRule, rename
from cutaway.spec import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    EmbeddingSpec,
    HeadSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    StackSpec,
)


def read(c: ConfigReader) -> ModelSpec:
    """A ``PhiConfig`` as a spec."""
    n = read_sizes(c)
    norm = NormSpec("layer", c.number("layer_norm_eps", 1e-5, above=0), bias=True)
    normed = c.flag("qk_layernorm", False)
    if normed and n.n_heads * n.d_head != n.d_model:
        expected = f"{n.d_model} / {n.n_heads}"
        raise c.error("head_dim", "with qk_layernorm, heads are together as wide as the stream", expected=expected)
    attention = AttentionSpec(
        n.n_heads,
        n.n_kv_heads,
        n.d_head,
        rotary=read_rotary(c, n.d_head, n.max_positions, share=0.5),
        qk_norm=norm if normed else None,
        qkv_bias=True,
        out_bias=True,
        dropout=c.number("attention_dropout", 0.0, low=0, high=1),
    )
    mlp = MlpSpec(n.d_ff, c.choice("hidden_act", ACTIVATIONS, "gelu_new"), bias=True, out_bias=True)
    dropout = c.number("resid_pdrop", 0.0, low=0, high=1)
    branches = (BranchSpec("attn", attention, pre_norm=norm, dropout=dropout), BranchSpec("mlp", mlp, dropout=dropout))
    block = BlockSpec(branches, parallel=True, shared_norm=True)
    return ModelSpec(
        family="phi",
        vocab_size=n.vocab_size,
        d_model=n.d_model,
        max_positions=n.max_positions,
        embedding=EmbeddingSpec(dropout=c.number("embd_pdrop", 0.0, low=0, high=1)),
        decoder=StackSpec((block,) * n.n_layers, norm),
        head=HeadSpec(c.flag("tie_word_embeddings", False), bias=True),
        kept=c.finish(),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    block = spec.decoder.layers[0]
    attention, mlp = parts(block)
    assert attention.rotary is not None
    return {
        **write_sizes(spec),
        "embd_pdrop": spec.embedding.dropout,
        "hidden_act": "gelu_new" if mlp.activation == "gelu_tanh" else ACTIVATION_NAMES[mlp.activation],
        "layer_norm_eps": first_norm(spec).eps,
        "qk_layernorm": attention.qk_norm is not None,
        "resid_pdrop": block.branches[0].dropout,
        "rope_parameters": write_rotary(attention.rotary, attention.d_head),
    }


NAMES = {f"attn.body.{x}": f"self_attn.{x}_proj" for x in "qkv"} | {
    "attn.pre_norm": "input_layernorm",
    "attn.body.out": "self_attn.dense",
    "mlp.body.up": "mlp.fc1",
    "mlp.body.down": "mlp.fc2",
}
NORMS = {f"attn.body.{x}_norm": f"self_attn.{x}_layernorm" for x in "qk"}


def rules(spec: ModelSpec) -> list[WeightRule]:
    """Llama's places under Phi's names; the head has a bias, tied or not."""
    out: list[WeightRule] = [rename("embed.tokens", "model.embed_tokens.weight")]
    for i, layer in enumerate(spec.decoder.layers):
        names = NAMES if layer.attention.qk_norm is None else NAMES | NORMS
        out += layer_rules(layer, i, f"model.layers.{i}", names)
        out.append(Drop((f"model.layers.{i}.self_attn.rotary_emb.inv_freq",)))
    out += [rename(f"decoder.norm.{kind}", f"model.final_layernorm.{kind}") for kind in ("weight", "bias")]
    out.append(rename("head.bias", "lm_head.bias"))
    if spec.lm.tied:
        return [*out, Tie(("lm_head.weight",), same_as="embed.tokens")]
    return [*out, rename("head.weight", "lm_head.weight")]


FAMILY = Family("phi", "PhiForCausalLM", read, write, rules)
