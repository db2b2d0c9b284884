"""GPT-J (Wang & Komatsuzaki 2021): one norm for branches side by side, neighbouring channels that turn together."""

from __future__ import annotations

from typing import Any

from cutaway.families.common import (
    ACTIVATIONS,
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_ROWS,
    first_norm,
    layer_rules,
    parts,
)
from cutaway.families.family import Family
from cutaway.families.gpt2 import SUMMARY
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
    RotarySpec,
    StackSpec,
)


def read(c: ConfigReader) -> ModelSpec:
    """A ``GPTJConfig`` as a spec."""
    c.raw("model_type", None)
    d_model, n_heads = c.integer("n_embd"), c.integer("n_head")
    if d_model % n_heads:
        raise c.error("n_head", "must divide n_embd", expected=f"a divisor of {d_model}", got=n_heads)
    d_head = d_model // n_heads
    # Null takes the table as wide as the stream, which fits a single head only.
    d_rotary = d_model if c.raw("rotary_dim", 64) is None else c.integer("rotary_dim", 64)
    if d_rotary % 2 or d_rotary > d_head:
        expected = f"an even number of a head's {d_head} channels"
        raise c.error("rotary_dim", "these channels cannot turn", expected=expected, got=c.raw("rotary_dim", 64))
    attention = AttentionSpec(
        n_heads,
        n_heads,
        d_head,
        rotary=RotarySpec(10000.0, d_rotary, interleaved=True),
        dropout=c.number("attn_pdrop", 0.0, low=0, high=1),
    )
    d_ff = c.integer("n_inner", 4 * d_model, high=1 << 24)
    mlp = MlpSpec(d_ff, c.choice("activation_function", ACTIVATIONS, "gelu_new"), bias=True, out_bias=True)
    norm = NormSpec("layer", c.number("layer_norm_epsilon", 1e-5, above=0), bias=True)
    dropout = c.number("resid_pdrop", 0.0, low=0, high=1)
    branches = (BranchSpec("attn", attention, pre_norm=norm, dropout=dropout), BranchSpec("mlp", mlp, dropout=dropout))
    block = BlockSpec(branches, parallel=True, shared_norm=True)
    for key in ("rotary", "scale_attn_weights"):  # stated by older configs, true in every one
        c.fixed(key, (True,), True)
        c.keep(key)
    c.keep(*SUMMARY)
    return ModelSpec(
        family="gptj",
        vocab_size=c.size("vocab_size", high=MOST_ROWS),
        d_model=d_model,
        max_positions=c.integer("n_positions", 2048, high=MOST_POSITIONS),
        embedding=EmbeddingSpec(dropout=c.number("embd_pdrop", 0.0, low=0, high=1)),
        decoder=StackSpec((block,) * c.size("n_layer", high=MOST_LAYERS), norm),
        head=HeadSpec(c.flag("tie_word_embeddings", False), bias=True),
        kept=c.finish(),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    block = spec.decoder.layers[0]
    attention, mlp = parts(block)
    assert attention.rotary is not None
    return {
        "vocab_size": spec.vocab_size,
        "n_embd": spec.d_model,
        "n_layer": spec.n_layers,
        "n_head": attention.n_heads,
        "n_positions": spec.max_positions,
        "n_inner": mlp.d_ff,
        "rotary_dim": attention.rotary.d_rotary,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(mlp.activation, mlp.activation),
        "layer_norm_epsilon": first_norm(spec).eps,
        "resid_pdrop": block.branches[0].dropout,
        "embd_pdrop": spec.embedding.dropout,
        "attn_pdrop": attention.dropout,
        "tie_word_embeddings": spec.lm.tied,
    }


NAMES = {f"attn.body.{x}": f"attn.{x}_proj" for x in ("q", "k", "v", "out")} | {
    "attn.pre_norm": "ln_1",
    "mlp.body.up": "mlp.fc_in",
    "mlp.body.down": "mlp.fc_out",
}


def rules(spec: ModelSpec) -> list[WeightRule]:
    """GPT-2's places, with plain matrices; the head has a bias, tied or not."""
    out: list[WeightRule] = [rename("embed.tokens", "transformer.wte.weight")]
    for i, layer in enumerate(spec.decoder.layers):
        out += layer_rules(layer, i, f"transformer.h.{i}", NAMES)
        # Older files carry the causal mask as a tensor.
        out += [Drop((f"transformer.h.{i}.attn.{name}",)) for name in ("bias", "masked_bias")]
    out += [rename(f"decoder.norm.{kind}", f"transformer.ln_f.{kind}") for kind in ("weight", "bias")]
    out.append(rename("head.bias", "lm_head.bias"))
    if spec.lm.tied:
        return [*out, Tie(("lm_head.weight",), same_as="embed.tokens")]
    return [*out, rename("head.weight", "lm_head.weight")]


FAMILY = Family("gptj", "GPTJForCausalLM", read, write, rules, base_prefix="transformer.")
