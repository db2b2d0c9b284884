"""SmolLM3 (Bakouch et al. 2025): Llama with layers that know no positions (NoPE), every fourth by default."""

from __future__ import annotations

from typing import Any

from cutaway.families.common import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    first_norm,
    llama_rules,
    parts,
    pre_norm_block,
    read_sizes,
    read_windows,
    write_sizes,
    write_windows,
)
from cutaway.families.family import Family
from cutaway.families.rope import read_rotary, write_rotary
from cutaway.formats.config import ConfigReader
from cutaway.spec import AttentionSpec, EmbeddingSpec, HeadSpec, MaskRule, MlpSpec, ModelSpec, NormSpec, StackSpec


def _turning(c: ConfigReader, n_layers: int) -> list[bool]:
    """Which layers rotate: where ``no_rope_layers``, whatever its name says, has a 1."""
    every = c.integer("no_rope_layer_interval", 4)
    c.keep("no_rope_layer_interval")
    stated = c.raw("no_rope_layers", None)
    if stated is None:
        return [(i + 1) % every != 0 for i in range(n_layers)]
    if not isinstance(stated, list) or len(stated) < n_layers or any(x not in (0, 1) for x in stated):
        expected = f"a list of at least {n_layers}, each 1 (rotary positions) or 0 (none)"
        raise c.error("no_rope_layers", "one entry a layer is needed", expected=expected, got=stated)
    if len(stated) > n_layers:
        c.keep("no_rope_layers")
    return [bool(x) for x in stated[:n_layers]]


def _windows(c: ConfigReader, turning: list[bool]) -> list[int | None]:
    """Where ``layer_types`` does not say which layers slide, those without positions do, if any."""
    on, window = c.flag("use_sliding_window", False), c.integer("sliding_window", None, high=1 << 40)
    slides = on and window is not None
    pattern = ["sliding_attention" if slides and not turns else "full_attention" for turns in turning]
    found = read_windows(c, len(turning), window, pattern)
    if any(found) and not on:
        raise c.error("use_sliding_window", "false, though a layer of layer_types slides", expected=True, got=False)
    # Only what `write` could not tell from the layers.
    c.keep(*(() if any(found) else ("sliding_window",)), *(() if on == any(found) else ("use_sliding_window",)))
    return found


def read(c: ConfigReader) -> ModelSpec:
    """A ``SmolLM3Config`` as a spec."""
    # Left out, there are four; null, as many as heads.
    n = read_sizes(c, max_positions=32768, n_kv_heads=None if "num_key_value_heads" in c else 4)
    rotary = read_rotary(c, n.d_head, n.max_positions, base=2_000_000.0)
    bias, mlp_bias = c.flag("attention_bias", False), c.flag("mlp_bias", False)
    dropout = c.number("attention_dropout", 0.0, low=0, high=1)
    mlp = MlpSpec(n.d_ff, c.choice("hidden_act", ACTIVATIONS, "silu"), gated=True, bias=mlp_bias, out_bias=mlp_bias)
    norm = NormSpec("rms", c.number("rms_norm_eps", 1e-6, above=0))
    turning = _turning(c, n.n_layers)
    layers = tuple(
        pre_norm_block(
            AttentionSpec(
                n.n_heads,
                n.n_kv_heads,
                n.d_head,
                mask=MaskRule(window=window),
                rotary=rotary if turns else None,
                qkv_bias=bias,
                out_bias=bias,
                dropout=dropout,
            ),
            mlp,
            norm,
        )
        for turns, window in zip(turning, _windows(c, turning), strict=True)
    )
    if not any(turning):
        c.keep("rope_parameters", "rope_theta", "rope_scaling")
    c.keep("max_window_layers", "pretraining_tp")  # stated by SmolLM3 3B; the reference reads neither
    return ModelSpec(
        family="smollm3",
        vocab_size=n.vocab_size,
        d_model=n.d_model,
        max_positions=n.max_positions,
        embedding=EmbeddingSpec(),
        decoder=StackSpec(layers, norm),
        head=HeadSpec(c.flag("tie_word_embeddings", True)),
        kept=c.finish(),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    attention, mlp = parts(spec.decoder.layers[0])
    rotaries = [layer.attention.rotary for layer in spec.decoder.layers]
    rotary = next((one for one in rotaries if one is not None), None)
    windows = write_windows(spec)
    return {
        **write_sizes(spec),
        **windows,
        "use_sliding_window": "sliding_window" in windows,
        "no_rope_layers": [int(one is not None) for one in rotaries],
        "attention_bias": attention.qkv_bias,
        "mlp_bias": mlp.bias,
        "hidden_act": ACTIVATION_NAMES[mlp.activation],
        "rms_norm_eps": first_norm(spec).eps,
        **({} if rotary is None else {"rope_parameters": write_rotary(rotary)}),
    }


FAMILY = Family("smollm3", "SmolLM3ForCausalLM", read, write, llama_rules)
