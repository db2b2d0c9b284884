"""Qwen2 and 2.5 (Yang et al. 2024): Llama with biases on q, k and v."""

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
from cutaway.families.family import Family, GgufForm
from cutaway.families.rope import read_rotary, write_rotary
from cutaway.formats.config import ConfigReader
from cutaway.spec import AttentionSpec, EmbeddingSpec, HeadSpec, MaskRule, MlpSpec, ModelSpec, NormSpec, StackSpec


def windows(c: ConfigReader, n_layers: int) -> list[int | None]:
    """Qwen's three keys for which layers slide; ``layer_types`` overrides them."""
    on = c.flag("use_sliding_window", False)
    window = c.integer("sliding_window", None if "sliding_window" in c else 4096, high=1 << 40) if on else None
    first = c.integer("max_window_layers", 28, low=0)
    slides = ["sliding_attention" if window is not None and i >= first else "full_attention" for i in range(n_layers)]
    found = read_windows(c, n_layers, window, slides)
    # Only what `write` could not tell from the layers.
    c.keep("max_window_layers", *(() if any(found) else ("sliding_window",)))
    if on != any(found):
        c.keep("use_sliding_window")
    return found


def read(c: ConfigReader) -> ModelSpec:
    """A ``Qwen2Config`` as a spec."""
    n = read_sizes(c, max_positions=32768)
    rotary = read_rotary(c, n.d_head, n.max_positions)
    dropout = c.number("attention_dropout", 0.0, low=0, high=1)
    mlp = MlpSpec(n.d_ff, c.choice("hidden_act", ACTIVATIONS, "silu"), gated=True)
    norm = NormSpec("rms", c.number("rms_norm_eps", 1e-6, above=0))
    layers = tuple(
        pre_norm_block(
            AttentionSpec(
                n.n_heads,
                n.n_kv_heads,
                n.d_head,
                mask=MaskRule(window=window),
                rotary=rotary,
                qkv_bias=True,
                dropout=dropout,
            ),
            mlp,
            norm,
        )
        for window in windows(c, n.n_layers)
    )
    return ModelSpec(
        family="qwen2",
        vocab_size=n.vocab_size,
        d_model=n.d_model,
        max_positions=n.max_positions,
        embedding=EmbeddingSpec(),
        decoder=StackSpec(layers, norm),
        head=HeadSpec(c.flag("tie_word_embeddings", False)),
        kept=c.finish(),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    attention, mlp = parts(spec.decoder.layers[0])
    assert attention.rotary is not None
    slides = write_windows(spec)
    return {
        **write_sizes(spec),
        **slides,
        "use_sliding_window": "sliding_window" in slides,
        "hidden_act": ACTIVATION_NAMES[mlp.activation],
        "rms_norm_eps": first_norm(spec).eps,
        "rope_parameters": write_rotary(attention.rotary),
    }


FAMILY = Family("qwen2", "Qwen2ForCausalLM", read, write, llama_rules, gguf=GgufForm("qwen2"))
