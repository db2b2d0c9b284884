"""What encoder–decoders' configs and tensors have in common, and what BART's and Marian's share beyond that."""

from __future__ import annotations

from typing import Any

from cutaway.errors import UnsupportedModelError
from cutaway.families.common import ACTIVATION_NAMES, ACTIVATIONS, MOST_LAYERS, MOST_POSITIONS, head_width
from cutaway.families.encoder import BOTH_WAYS, norm_rules, post_norm_block, stack_rules
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import Drop, Row, Tie, WeightRule, rename
from cutaway.spec import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    LearnedPositions,
    MlpSpec,
    ModelSpec,
    NormSpec,
    SinusoidalPositions,
    StackSpec,
)

# Settings for generating that older configs hold: see checkpoints/settings.py, which reads them.
GENERATION = (
    "bad_words_ids", "do_sample", "early_stopping", "force_bos_token_to_be_generated", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beams",
    "num_return_sequences", "repetition_penalty", "temperature", "top_k", "top_p",
)  # fmt: skip
# Marks of training and of other heads; what `write` states already is not among them.
OTHERS = ("_num_labels", "classif_dropout", "classifier_dropout", "extra_pos_embeddings", "init_std", "save_step")
NORM = NormSpec("layer", 1e-5, bias=True)  # no config says otherwise
DEFAULT_POSITIONS = 1024

ENCODER_NAMES = {
    **{f"attn.body.{x}": f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")},
    "attn.post_norm": "self_attn_layer_norm",
    "mlp.body.up": "fc1",
    "mlp.body.down": "fc2",
    "mlp.post_norm": "final_layer_norm",
}
DECODER_NAMES = {
    **ENCODER_NAMES,
    **{f"cross.body.{x}": f"encoder_attn.{x}_proj" for x in ("q", "k", "v", "out")},
    "cross.post_norm": "encoder_attn_layer_norm",
}


def read_class(c: ConfigReader, classes: tuple[str, ...]) -> str:
    """Which of these classes the config's ``architectures`` name; without any, the first.

    Raises:
        UnsupportedModelError: another one, by its name.
    """
    stated = c.raw("architectures", None) or [classes[0]]
    first = stated[0] if isinstance(stated, list) else stated
    if first not in classes or (isinstance(stated, list) and len(stated) > 1):
        wanted = " or ".join(classes)
        raise UnsupportedModelError(
            "no such model here", path=c.path, field="/architectures", expected=wanted, got=stated
        )
    return str(first)


def read_body(
    c: ConfigReader,
    family: str,
    *,
    vocab_size: int,
    source_vocab_size: int | None,
    positions: LearnedPositions | SinusoidalPositions,
    normed: bool,
    head: HeadSpec | None,
) -> ModelSpec:
    """A config of BART's kind as a spec: the layers of Vaswani et al. 2017.

    Args:
        c: the config.
        family: whose it is.
        vocab_size, source_vocab_size: as in the spec.
        positions: of either side.
        normed: whether the sum of rows is normed before the first layer.
        head: what follows the decoder.
    """
    c.raw("model_type", None)
    c.fixed("is_encoder_decoder", (True,), True)
    c.fixed("is_decoder", (False,), False)
    d_model = c.integer("d_model")
    dropout = c.number("dropout", 0.1, low=0, high=1)
    weight_dropout = c.number("attention_dropout", 0.0, low=0, high=1)
    inner_dropout = c.number("activation_dropout", 0.0, low=0, high=1)
    activation = c.choice("activation_function", ACTIVATIONS, "gelu")
    stacks: dict[str, StackSpec] = {}
    for side in ("encoder", "decoder"):
        n_heads = c.integer(f"{side}_attention_heads")
        width = head_width(c, f"{side}_attention_heads", d_model, n_heads)
        attention = AttentionSpec(n_heads, n_heads, width, qkv_bias=True, out_bias=True, dropout=weight_dropout)
        both = AttentionSpec(n_heads, n_heads, width, BOTH_WAYS, qkv_bias=True, out_bias=True, dropout=weight_dropout)
        d_ff = c.integer(f"{side}_ffn_dim", high=1 << 24)
        mlp = MlpSpec(d_ff, activation, bias=True, out_bias=True, dropout=inner_dropout)
        layer = _layer(side, attention, both, mlp, dropout)
        stacks[side] = StackSpec((layer,) * c.size(f"{side}_layers", high=MOST_LAYERS))
        # Whole layers left out in training, at random: not done here, and nothing to one who only runs it.
        c.number(f"{side}_layerdrop", 0.0, low=0, high=1)
        c.keep(f"{side}_layerdrop")
    n_encoder = len(stacks["encoder"].layers)
    c.fixed("num_hidden_layers", (n_encoder,), n_encoder)  # the reference takes it for another name of encoder_layers
    # Switches of the code that these checkpoints were trained with; the reference has one way each.
    for key in ("normalize_before", "add_final_layer_norm", "add_bias_logits"):
        c.fixed(key, (False,), False)
    c.fixed("normalize_embedding", (normed,), normed)
    static = isinstance(positions, SinusoidalPositions)
    c.fixed("static_position_embeddings", (static,), static)
    legacy = ("normalize_before", "add_final_layer_norm", "add_bias_logits", "normalize_embedding")
    c.keep(*GENERATION, *OTHERS, *legacy, "static_position_embeddings", "num_hidden_layers")
    embedding = EmbeddingSpec(
        scale=d_model**0.5 if c.flag("scale_embedding", False) else 1.0,
        positions=positions,
        norm=NORM if normed else None,
        dropout=dropout,
    )
    return ModelSpec(
        family=family,
        vocab_size=vocab_size,
        d_model=d_model,
        max_positions=c.integer("max_position_embeddings", DEFAULT_POSITIONS, high=MOST_POSITIONS),
        embedding=embedding,
        decoder=stacks["decoder"],
        head=head,
        encoder=stacks["encoder"],
        source=embedding,
        source_vocab_size=source_vocab_size,
        kept=c.finish(),
    )


def _layer(side: str, causal: AttentionSpec, both: AttentionSpec, mlp: MlpSpec, dropout: float) -> BlockSpec:
    if side == "encoder":
        return post_norm_block(both, mlp, NORM, dropout=dropout)
    return post_norm_block(causal, mlp, NORM, cross=crossing(both), dropout=dropout)


def crossing(spec: AttentionSpec) -> AttentionSpec:
    """The attention to a source that goes with an attention to the text itself."""
    return AttentionSpec(
        spec.n_heads,
        spec.n_kv_heads,
        spec.d_head,
        BOTH_WAYS,
        scale=spec.scale,
        qkv_bias=spec.qkv_bias,
        out_bias=spec.out_bias,
        dropout=spec.dropout,
        cross=True,
    )


def inside(layer: BlockSpec) -> MlpSpec:
    """A layer's feed-forward network."""
    return next(branch.body for branch in layer.branches if isinstance(branch.body, MlpSpec))


def write_body(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read_body`."""
    out: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        layer = spec.stacks[side].layers[0]
        out[f"{side}_layers"] = len(spec.stacks[side].layers)
        out[f"{side}_attention_heads"] = layer.attention.n_heads
        out[f"{side}_ffn_dim"] = inside(layer).d_ff
    mlp = inside(spec.decoder.layers[0])
    return {
        **out,
        "d_model": spec.d_model,
        "max_position_embeddings": spec.max_positions,
        "dropout": spec.embedding.dropout,
        "attention_dropout": spec.decoder.layers[0].attention.dropout,
        "activation_dropout": mlp.dropout,
        "activation_function": ACTIVATION_NAMES[mlp.activation],
        "scale_embedding": spec.embedding.scale != 1.0,
        "is_encoder_decoder": True,
        "is_decoder": False,
    }


def body_rules(spec: ModelSpec, at: str) -> list[WeightRule]:
    """Tables and layers; ``at`` is what their names begin with."""
    if spec.source_vocab_size is None:
        rules: list[WeightRule] = [rename("embed.tokens", f"{at}shared.weight")]
        rules += [Tie((f"{at}{side}.embed_tokens.weight",), same_as="embed.tokens") for side in ("encoder", "decoder")]
    else:
        rules = [rename("source_embed.tokens", f"{at}encoder.embed_tokens.weight")]
        rules += [rename("embed.tokens", f"{at}decoder.embed_tokens.weight")]
        rules += [Drop((f"{at}shared.weight",))]  # where neither side shares it, nobody reads it
    for side, ours in (("encoder", "source_embed"), ("decoder", "embed")):
        names = ENCODER_NAMES if side == "encoder" else DECODER_NAMES
        rules += stack_rules(spec, side, f"{at}{side}.layers.{{i}}", names)
        rules += norm_rules(f"{ours}.norm", spec.embedding.norm, f"{at}{side}.layernorm_embedding")
        stored = f"{at}{side}.embed_positions.weight"
        learned = isinstance(spec.embedding.positions, LearnedPositions)
        rules += [rename(f"{ours}.positions", stored) if learned else Drop((stored,)), Drop((f"{at}{side}.version",))]
    return rules


def head_rules(spec: ModelSpec) -> list[WeightRule]:
    """The matrix, and the shift that is stored as a row. transformers keeps it as it is in training; here it learns."""
    if spec.head is None:
        return []
    matrix = (
        Tie(("lm_head.weight",), same_as="embed.tokens") if spec.lm.tied else rename("head.weight", "lm_head.weight")
    )
    return [matrix, Row(("head.bias",), ("final_logits_bias",))]


__all__ = [
    "DEFAULT_POSITIONS",
    "GENERATION",
    "body_rules",
    "crossing",
    "head_rules",
    "inside",
    "read_body",
    "read_class",
    "write_body",
]
