"""GGUF's names for tensors: one vocabulary for all architectures."""

from __future__ import annotations

from cutaway.formats.rules import Drop, Tie, WeightRule, rename
from cutaway.spec import ModelSpec

# Ours within a layer → the word between ``blk.{i}.`` and ``.weight``.
IN_LAYER = {
    "attn.pre_norm": "attn_norm",
    "attn.out_norm": "post_attention_norm",
    "attn.body.q": "attn_q",
    "attn.body.k": "attn_k",
    "attn.body.v": "attn_v",
    "attn.body.q_norm": "attn_q_norm",
    "attn.body.k_norm": "attn_k_norm",
    "attn.body.out": "attn_output",
    "mlp.pre_norm": "ffn_norm",
    "mlp.out_norm": "post_ffw_norm",
    "mlp.body.gate": "ffn_gate",
    "mlp.body.up": "ffn_up",
    "mlp.body.down": "ffn_down",
    "moe.pre_norm": "ffn_norm",
    "moe.out_norm": "post_ffw_norm",
    "moe.body.router": "ffn_gate_inp",
}
EXPERTS = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}  # all of a layer's in one tensor
OUTSIDE = {
    "embed.tokens": "token_embd.weight",
    "embed.positions": "position_embd.weight",
    "decoder.norm.weight": "output_norm.weight",
    "decoder.norm.bias": "output_norm.bias",
    "head.weight": "output.weight",
    "head.bias": "output.bias",
}


def gguf_rules(spec: ModelSpec, parameters: list[str], altered: list[WeightRule]) -> list[WeightRule]:
    """A rule for every parameter: the family's where it has one, the common name otherwise.

    Args:
        spec: the model.
        parameters: names of the model's parameters.
        altered: rules for what this family stores otherwise.
    """
    covered = {name for rule in altered for name in rule.ours}
    rules = list(altered)
    for name in parameters:
        if name in covered:
            continue
        if name in OUTSIDE:
            rules.append(rename(name, OUTSIDE[name]))
            continue
        # decoder.layers.{i}.branches.{what}.{kind}
        _, _, i, _, rest = name.split(".", 4)
        what, kind = rest.rsplit(".", 1)
        if what == "moe.body":
            rules.append(rename(name, f"blk.{i}.{EXPERTS[kind]}.weight"))
        else:
            rules.append(rename(name, f"blk.{i}.{IN_LAYER[what]}.{kind}"))
    if spec.lm.tied:
        rules.append(Tie(("output.weight",), same_as="embed.tokens"))
    rules += [Drop((f"blk.{i}.attn_rot_embd.weight",)) for i in range(spec.n_layers)]
    return [*rules, Drop(("rope_freqs.weight",))]  # read with the metadata
