"""T5 (Raffel et al. 2020): RMSNorm before each branch, no biases, unscaled scores, and distances in buckets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cutaway.families.common import ACTIVATION_NAMES, ACTIVATIONS, MOST_LAYERS, MOST_POSITIONS, MOST_ROWS
from cutaway.families.encoder import BOTH_WAYS, norm_rules, stack_rules
from cutaway.families.family import Family, Stored
from cutaway.families.seq2seq import GENERATION, crossing, inside, read_class
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import Drop, Tie, WeightRule, rename
from cutaway.spec import (
    Activation,
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    BucketBias,
    EmbeddingSpec,
    HeadSpec,
    MaskRule,
    MlpSpec,
    ModelSpec,
    NormSpec,
    StackSpec,
)

LM, BODY, ENCODER = "T5ForConditionalGeneration", "T5Model", "T5EncoderModel"
OLD_LM = "T5WithLMHeadModel"  # what the first checkpoints call it
HEAD = "lm_head.weight"


def read(c: ConfigReader) -> ModelSpec:
    """A ``T5Config`` as a spec."""
    c.raw("model_type", None)
    name = read_class(c, (LM, BODY, ENCODER, OLD_LM))
    name = LM if name == OLD_LM else name
    c.fixed("is_decoder", (False,), False)
    if name == ENCODER:
        c.flag("is_encoder_decoder", False)  # published both ways
        c.keep("is_encoder_decoder", "num_decoder_layers")
    else:
        c.fixed("is_encoder_decoder", (True,), True)
    d_model, n_heads = c.integer("d_model"), c.integer("num_heads")
    dropout = c.number("dropout_rate", 0.1, low=0, high=1)
    norm = NormSpec("rms", c.number("layer_norm_epsilon", 1e-6, above=0))
    activation, gated = _curve(c)
    mlp = MlpSpec(c.integer("d_ff", high=1 << 24), activation, gated=gated, dropout=dropout)
    d_head = c.integer("d_kv", 64)
    n_buckets = c.integer("relative_attention_num_buckets", 32)
    furthest = c.integer("relative_attention_max_distance", 128)
    n_layers = c.size("num_layers", high=MOST_LAYERS)
    n_decoder = c.integer("num_decoder_layers", n_layers, high=MOST_LAYERS)

    def stack(mask: MaskRule, n: int, crosses: bool) -> StackSpec:
        bias = BucketBias(n_buckets, furthest, both_ways=not mask.causal)
        attention = AttentionSpec(n_heads, n_heads, d_head, mask, bias=bias, scale=1.0, dropout=dropout)
        branches = [BranchSpec("attn", attention, norm, dropout=dropout), BranchSpec("mlp", mlp, norm, dropout=dropout)]
        if crosses:
            branches.insert(1, BranchSpec("cross", crossing(attention), norm, dropout=dropout))
        return StackSpec((BlockSpec(tuple(branches)),) * n, norm, dropout)

    tied, scale = c.flag("tie_word_embeddings", True), _scale(c, d_model)
    if name != LM:
        c.keep("tie_word_embeddings", "scale_decoder_outputs")
    c.keep(*GENERATION, "classifier_dropout")
    embedding = EmbeddingSpec(dropout=dropout)
    return ModelSpec(
        family="t5",
        vocab_size=c.size("vocab_size", high=MOST_ROWS),
        d_model=d_model,
        max_positions=c.integer("n_positions", 512, high=MOST_POSITIONS),  # what it was trained with: no end of a table
        embedding=embedding,
        decoder=StackSpec() if name == ENCODER else stack(MaskRule(), n_decoder, crosses=True),
        head=HeadSpec(tied, scale=scale) if name == LM else None,
        encoder=stack(BOTH_WAYS, n_layers, crosses=False),
        source=None if name == ENCODER else embedding,
        kept=c.finish(),
    )


def _scale(c: ConfigReader, d_model: int) -> float:
    """What logits are multiplied by. Before transformers said it by itself, tied embeddings meant it (case L17)."""
    scaled = c.flag("scale_decoder_outputs", c.flag("tie_word_embeddings", True))
    return d_model**-0.5 if scaled else 1.0


def _curve(c: ConfigReader) -> tuple[Activation, bool]:
    """Activation and whether there is a gate, from ``gated-gelu`` or the like; newer configs say the parts too."""
    options = {f"{gate}{name}": (act, bool(gate)) for name, act in ACTIVATIONS.items() for gate in ("", "gated-")}
    options["gated-gelu"] = ("gelu_tanh", True)  # v1.1 meant this one
    activation, gated = c.choice("feed_forward_proj", options, "relu")
    if c.has("dense_act_fn") and c.choice("dense_act_fn", ACTIVATIONS) != activation:
        raise c.error("dense_act_fn", "contradicts feed_forward_proj", expected=activation, got=c.raw("dense_act_fn"))
    c.raw("dense_act_fn", None)
    c.fixed("is_gated_act", (gated,), gated)
    return activation, gated


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    first = spec.encoder.layers[0]
    attention, mlp, norm = first.attention, inside(first), spec.encoder.norm
    assert norm is not None
    assert isinstance(attention.bias, BucketBias)
    curve = "gelu_new" if mlp.activation == "gelu_tanh" else ACTIVATION_NAMES[mlp.activation]
    out = {
        "architectures": [ENCODER if spec.source is None else BODY if spec.head is None else LM],
        "vocab_size": spec.vocab_size,
        "d_model": spec.d_model,
        "d_kv": attention.d_head,
        "d_ff": mlp.d_ff,
        "num_layers": len(spec.encoder.layers),
        "num_heads": attention.n_heads,
        "relative_attention_num_buckets": attention.bias.n_buckets,
        "relative_attention_max_distance": attention.bias.max_distance,
        "dropout_rate": spec.embedding.dropout,
        "layer_norm_epsilon": norm.eps,
        "feed_forward_proj": ("gated-gelu" if curve == "gelu_new" else f"gated-{curve}") if mlp.gated else curve,
        "dense_act_fn": curve,
        "is_gated_act": mlp.gated,
        "is_encoder_decoder": spec.source is not None,
        "is_decoder": False,
        "n_positions": spec.max_positions,
    }
    if spec.source is not None:
        out["num_decoder_layers"] = len(spec.decoder.layers)
    if spec.head is not None:
        out["tie_word_embeddings"] = spec.lm.tied
        out["scale_decoder_outputs"] = spec.lm.scale != 1.0
    return out


def settle(spec: ModelSpec, stored: Stored) -> ModelSpec:
    """Whether the head is tied, where the config leaves it open or contradicts the file: as the file has it.

    transformers 5 writes ``tie_word_embeddings: true`` whatever the head, and asks the tensors.
    """
    if spec.head is None:
        return spec
    own = HEAD in stored.names()
    if own and spec.lm.tied and "shared.weight" in stored.names():
        own = not torch.equal(stored.read(HEAD), stored.read("shared.weight"))
    return replace(spec, head=replace(spec.lm, tied=not own))


def rules(spec: ModelSpec) -> list[WeightRule]:
    """Tensors under T5's names: a layer's parts are numbered, and its first has the stack's table of distances."""
    out: list[WeightRule] = [rename("embed.tokens", "shared.weight")]
    gate = inside(spec.encoder.layers[0]).gated
    parts = {"attn": ("SelfAttention", 0), "cross": ("EncDecAttention", 1)}
    for name, stack in spec.stacks.items():
        last = len(stack.layers[0].branches) - 1
        names = {f"mlp.body.{'up' if not gate else 'gate'}": f"layer.{last}.DenseReluDense.{'wi_0' if gate else 'wi'}"}
        names |= {"mlp.body.up": f"layer.{last}.DenseReluDense.wi_1"} if gate else {}
        names |= {"mlp.body.down": f"layer.{last}.DenseReluDense.wo", "mlp.pre_norm": f"layer.{last}.layer_norm"}
        for ours, (theirs, i) in parts.items():
            names |= {f"{ours}.body.{x}": f"layer.{i}.{theirs}.{x}" for x in "qkv"}
            names |= {f"{ours}.body.out": f"layer.{i}.{theirs}.o", f"{ours}.pre_norm": f"layer.{i}.layer_norm"}
        out += stack_rules(spec, name, f"{name}.block.{{i}}", names)
        table = "relative_attention_bias.weight"
        out.append(rename(f"{name}.biases.0.weight", f"{name}.block.0.layer.0.SelfAttention.{table}"))
        out += norm_rules(f"{name}.norm", stack.norm, f"{name}.final_layer_norm")
        out.append(Tie((f"{name}.embed_tokens.weight",), same_as="embed.tokens"))
    out.append(Drop(("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)))
    if spec.head is None:
        return out
    return [*out, Tie((HEAD,), same_as="embed.tokens") if spec.lm.tied else rename("head.weight", HEAD)]


FAMILY = Family("t5", "", read, write, rules, base_prefix="", settle=settle)
