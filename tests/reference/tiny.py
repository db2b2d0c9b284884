"""Tiny models of every family, with each option away from its default somewhere.

Their weights are *scaled random*: with a default initialisation (norms of one, no biases, matrices near
zero) a wrong norm, cap or order changes no number that a test could see.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

from cutaway.families import family_of
from cutaway.formats.config import ConfigReader
from cutaway.models import Transformer
from cutaway.spec import ModelSpec
from cutaway.spec.names import tap_names

# Numbers that a correct implementation must reproduce; each was recomputed independently.
WORKED = json.loads((Path(__file__).parent / "worked_numbers.json").read_text())

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 63,
    "eos_token_id": 63,
}
FAR, NEAR = "full_attention", "sliding_attention"


def _llama(**options: Any) -> dict[str, Any]:
    return {"model_type": "llama", **SIZES, "rms_norm_eps": 1e-5, **options}


def _rope(kind: str, theta: float = 5000.0, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **options}}


def _yarn(**options: Any) -> dict[str, Any]:
    return _llama(**_rope("yarn", **{"factor": 4.0, "original_max_position_embeddings": 16, **options}))


def _llama3(factor: float) -> dict[str, Any]:
    return _llama(
        **_rope("llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
    )


def _llama3_band(low: float, high: float) -> dict[str, Any]:
    """Wavelengths of 6, 10, 17, 27, 44, 73, 118 and 193 on both sides of the band 64 / high … 64 / low, and in it."""
    band = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": 64}
    return _llama(head_dim=16, **_rope("llama3", 50.0, factor=8.0, **band))


def _mistral(**options: Any) -> dict[str, Any]:
    return {"model_type": "mistral", **SIZES, **_rope("default", 900.0), **options}


def _qwen2(**options: Any) -> dict[str, Any]:
    return {"model_type": "qwen2", **SIZES, **_rope("default", 20_000.0), **options}


def _qwen3(**options: Any) -> dict[str, Any]:
    # A head width that is not hidden_size / heads (case L15).
    odd = {"hidden_size": 56, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}
    return {"model_type": "qwen3", **SIZES, **odd, **_rope("default", 20_000.0), **options}


def _gemma3(**options: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        **SIZES,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "layer_types": [NEAR, FAR, NEAR],
        "rope_parameters": {
            FAR: {"rope_type": "default", "rope_theta": 50_000.0},
            NEAR: {"rope_type": "default", "rope_theta": 700.0},
        },
        **options,
    }


def _granite(**options: Any) -> dict[str, Any]:
    constants = {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.7,
    }
    return {"model_type": "granite", **SIZES, **_rope("default", 3000.0), **constants, **options}


def _stablelm(**options: Any) -> dict[str, Any]:
    return {"model_type": "stablelm", **SIZES, **_rope("default", 3000.0), "layer_norm_eps": 1e-4, **options}


def _gpt_neox(**options: Any) -> dict[str, Any]:
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    return {"model_type": "gpt_neox", **sizes, "layer_norm_eps": 1e-4, **options}


def _gptj(**options: Any) -> dict[str, Any]:
    return {"model_type": "gptj", **GPT2, "rotary_dim": 4, **options}


def _phi(**options: Any) -> dict[str, Any]:
    return {"model_type": "phi", **SIZES, "layer_norm_eps": 1e-4, **options}


def _olmo2(**options: Any) -> dict[str, Any]:
    return {"model_type": "olmo2", **SIZES, **_rope("default", 3000.0), **options}


def _smollm3(**options: Any) -> dict[str, Any]:
    return {"model_type": "smollm3", **SIZES, **_rope("default", 3000.0), **options}


def _falcon(**options: Any) -> dict[str, Any]:
    sizes = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "intermediate_size")}
    return {"model_type": "falcon", **sizes, **({} if "alibi" in options else _rope("default", 3000.0)), **options}


# Heads of 8, and so many that their ALiBi slopes are no plain powers: of six still powers of two, which bfloat16 holds
# as they are, of twelve odd powers of the root of two, which it rounds.
SIX = {"hidden_size": 48, "num_attention_heads": 6}
TWELVE = {"hidden_size": 96, "num_attention_heads": 12}
_RW = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, **SIX}


def _bloom(**options: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 64, "hidden_size": 48, "n_layer": 3, "n_head": 6, "pad_token_id": 0}
    return {"model_type": "bloom", **sizes, **options}


def _mpt(heads: int = 6, attn: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 64, "d_model": 8 * heads, "n_layers": 3, "n_heads": heads, "max_seq_len": 64}
    return {"model_type": "mpt", **sizes, "pad_token_id": 0, "attn_config": attn or {}, **options}


def _mixtral(**options: Any) -> dict[str, Any]:
    return {"model_type": "mixtral", **SIZES, **_rope("default", 900.0), "num_local_experts": 5, **options}


def _qwen3_moe(**options: Any) -> dict[str, Any]:
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    return {"model_type": "qwen3_moe", **SIZES, "head_dim": 16, **experts, **options}


def _gemma2(**options: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma2",
        **SIZES,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        **_rope("default", 700.0),
        **options,
    }


def _phi3(**options: Any) -> dict[str, Any]:
    return {"model_type": "phi3", **SIZES, **options}


def _longrope(pairs: int, original: int, **options: Any) -> dict[str, Any]:
    """Another factor for each pair, in either list."""
    lists = {
        "short_factor": [1.0 + 0.25 * i for i in range(pairs)],
        "long_factor": [1.5 + 2.0 * i for i in range(pairs)],
    }
    rope = _rope("longrope", 3000.0, **lists, original_max_position_embeddings=original, **options)
    return {**rope, "original_max_position_embeddings": original, "max_position_embeddings": 4 * original}


def _gpt2(**options: Any) -> dict[str, Any]:
    return {"model_type": "gpt2", **GPT2, **options}


# A row of the matrix: its name, and its config in transformers' own words.
CASES: dict[str, dict[str, Any]] = {
    "llama": _llama(),
    "llama-tied": _llama(tie_word_embeddings=True, **_rope("default", 123_456.0)),
    "llama-biases": _llama(attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "llama-mha": _llama(num_key_value_heads=4, hidden_act="gelu_pytorch_tanh"),
    "llama-mqa": _llama(num_key_value_heads=1, head_dim=16, hidden_act="relu"),
    "llama-relu2": _llama(hidden_act="relu2"),
    "llama-linear": _llama(**_rope("linear", factor=4.0)),
    "llama3-factor-8": _llama3(8.0),
    "llama3-factor-32": _llama3(32.0),
    "llama3-narrow-band": _llama3_band(2.0, 3.0),
    "llama3-wide-band": _llama3_band(0.5, 8.0),
    "llama-yarn": _yarn(),
    "llama-yarn-attention-factor": _yarn(attention_factor=1.0),
    "llama-yarn-mscale": _yarn(factor=16.0, mscale=1.0, mscale_all_dim=1.0),
    "llama-yarn-mscales-apart": _yarn(factor=16.0, mscale=1.3, mscale_all_dim=0.6),
    "llama-yarn-betas": _yarn(beta_fast=3.0, beta_slow=0.2),
    "llama-yarn-no-truncate": _yarn(beta_fast=2.0, beta_slow=0.3, truncate=False),
    "llama-dynamic": _llama(**_rope("dynamic", factor=3.0)),
    "mistral-window": _mistral(sliding_window=8),
    "mistral-full": _mistral(sliding_window=None, head_dim=16),
    "qwen2": _qwen2(),
    "qwen2-sliding": _qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1, tie_word_embeddings=True),
    "qwen2-layer-types": _qwen2(use_sliding_window=True, sliding_window=8, layer_types=[NEAR, FAR, NEAR]),
    "qwen3": _qwen3(),
    "qwen3-biases": _qwen3(attention_bias=True, tie_word_embeddings=True),
    "qwen3-sliding": _qwen3(use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "gemma3": _gemma3(),
    "gemma3-caps": _gemma3(attn_logit_softcapping=1.0, final_logit_softcapping=2.0),
    "gemma3-rope": _gemma3(
        rope_parameters={
            FAR: {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 8.0},
            NEAR: {"rope_type": "default", "rope_theta": 700.0},
        },
        attention_bias=True,
    ),
    "gemma3-untied": _gemma3(tie_word_embeddings=False, hidden_activation="silu", layer_types=[NEAR, NEAR, NEAR]),
    "gemma3-global": _gemma3(layer_types=[FAR, FAR, FAR]),
    "granite": _granite(),
    "granite-biases": _granite(
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        **_rope("linear", factor=2.0),
    ),
    "stablelm": _stablelm(partial_rotary_factor=0.5),
    "stablelm-parallel": _stablelm(use_parallel_residual=True, use_qkv_bias=True, tie_word_embeddings=True),
    "stablelm-parallel-mha": _stablelm(
        use_parallel_residual=True, num_key_value_heads=4, hidden_act="gelu", partial_rotary_factor=1.0
    ),
    # 0.8 of eight channels is six.
    "stablelm-linear": _stablelm(use_qkv_bias=True, **_rope("linear", factor=2.0, partial_rotary_factor=0.8)),
    "stablelm-llama3": _stablelm(
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
            partial_rotary_factor=0.75,
        )
    ),
    "stablelm-yarn": _stablelm(
        **_rope("yarn", factor=4.0, original_max_position_embeddings=16, partial_rotary_factor=0.75)
    ),
    "gpt-neox": _gpt_neox(rotary_pct=0.5, rotary_emb_base=3000),
    "gpt-neox-sequential": _gpt_neox(use_parallel_residual=False, tie_word_embeddings=True, hidden_act="relu"),
    "gpt-neox-no-biases": _gpt_neox(attention_bias=False, rotary_pct=1.0, hidden_act="gelu_pytorch_tanh"),
    "gpt-neox-linear": _gpt_neox(**_rope("linear", factor=2.0, partial_rotary_factor=0.75)),
    "gptj": _gptj(),
    "gptj-tied": _gptj(tie_word_embeddings=True, rotary_dim=8, activation_function="gelu"),
    "gptj-inner": _gptj(n_inner=48, rotary_dim=2, layer_norm_epsilon=1e-3, activation_function="relu"),
    "phi": _phi(partial_rotary_factor=0.75, **_rope("default", 3000.0)),
    "phi-qk-norm": _phi(qk_layernorm=True, num_key_value_heads=4, tie_word_embeddings=True, hidden_act="relu"),
    "phi-mqa": _phi(num_key_value_heads=1, head_dim=16, partial_rotary_factor=1.0, hidden_act="silu"),
    "phi-linear": _phi(qk_layernorm=True, **_rope("linear", factor=2.0, partial_rotary_factor=0.25)),
    "olmo2": _olmo2(),
    "olmo2-biases": _olmo2(attention_bias=True, tie_word_embeddings=True, hidden_act="gelu", num_key_value_heads=4),
    "olmo2-linear": _olmo2(head_dim=16, num_key_value_heads=1, **_rope("linear", factor=2.0)),
    "smollm3": _smollm3(no_rope_layers=[1, 0, 1]),
    "smollm3-interval": _smollm3(no_rope_layer_interval=2, attention_bias=True, tie_word_embeddings=False),
    "smollm3-sliding": _smollm3(no_rope_layer_interval=2, use_sliding_window=True, sliding_window=8, mlp_bias=True),
    "smollm3-layer-types": _smollm3(
        no_rope_layers=[0, 1, 1],
        use_sliding_window=True,
        sliding_window=8,
        layer_types=[NEAR, NEAR, FAR],
        num_key_value_heads=None,
        hidden_act="gelu",
    ),
    "smollm3-yarn": _smollm3(
        **_rope("yarn", factor=4.0, original_max_position_embeddings=16), head_dim=16, no_rope_layer_interval=3
    ),
    "smollm3-no-positions": {"model_type": "smollm3", **SIZES, "no_rope_layers": [0, 0, 0], "hidden_act": "relu"},
    "falcon": _falcon(),
    "falcon-options": _falcon(bias=True, ffn_hidden_size=48, activation="relu", tie_word_embeddings=False),
    "falcon-linear": _falcon(layer_norm_epsilon=1e-3, activation="gelu_pytorch_tanh", **_rope("linear", factor=4.0)),
    "falcon-mha": _falcon(multi_query=False),
    "falcon-sequential": _falcon(parallel_attn=False, activation="silu"),
    "falcon-40b": _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-40b-options": _falcon(new_decoder_architecture=True, num_kv_heads=1, bias=True, alibi=True),
    "falcon-11b": _falcon(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, bias=True),
    "falcon-rw": _falcon(**_RW),
    "falcon-rw-power-of-two": _falcon(**{**_RW, "num_attention_heads": 8, "hidden_size": 64}),
    "falcon-rw-twelve": _falcon(**{**_RW, **TWELVE}),
    "falcon-alibi-7b": _falcon(alibi=True, **SIX),
    "bloom": _bloom(),
    "bloom-power-of-two": _bloom(n_head=4, layer_norm_epsilon=1e-3, slow_but_exact=True),
    "bloom-untied": _bloom(n_head=3, tie_word_embeddings=False),
    "mpt": _mpt(attn={"clip_qkv": 0.9}),
    "mpt-power-of-two": _mpt(heads=4, layer_norm_epsilon=1e-3, learned_pos_emb=False, norm_type="layernorm"),
    "mpt-scales": _mpt(heads=3, attn={"alibi_bias_max": 4, "softmax_scale": 0.2}, tie_word_embeddings=False),
    "mpt-logit-scale": _mpt(logit_scale=0.4, expansion_ratio=3),
    "mixtral": _mixtral(),
    "mixtral-window": _mixtral(sliding_window=8, num_experts_per_tok=3, head_dim=16, tie_word_embeddings=True),
    "mixtral-top-1": _mixtral(num_experts_per_tok=1, hidden_act="gelu", **_rope("linear", factor=2.0)),
    "qwen3-moe": _qwen3_moe(),
    "qwen3-moe-normalised": _qwen3_moe(norm_topk_prob=True, num_experts_per_tok=2, attention_bias=True),
    # Experts in the second layer only.
    "qwen3-moe-step": _qwen3_moe(decoder_sparse_step=2, tie_word_embeddings=True, **_rope("linear", factor=2.0)),
    "qwen3-moe-listed": _qwen3_moe(
        mlp_only_layers=[1], use_sliding_window=True, sliding_window=8, hidden_act="gelu", **_rope("default", 500.0)
    ),
    "gemma2": _gemma2(),
    "gemma2-caps": _gemma2(attn_logit_softcapping=1.0, final_logit_softcapping=2.0, layer_types=[FAR, NEAR, NEAR]),
    "gemma2-uncapped": _gemma2(
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=False,
        attention_bias=True,
        hidden_activation="silu",
    ),
    "gemma2-linear": _gemma2(layer_types=[FAR] * 3, **_rope("linear", factor=8.0)),
    "phi3": _phi3(partial_rotary_factor=0.5),
    "phi3-window": _phi3(sliding_window=8, num_key_value_heads=4, hidden_act="gelu", tie_word_embeddings=True),
    "phi3-longrope": _phi3(**_longrope(3, 64, partial_rotary_factor=0.75)),
    "phi3-longrope-factor": _phi3(**_longrope(4, 64, factor=32.0), sliding_window=8),
    "phi3-longrope-attention-factor": _phi3(**_longrope(4, 64, factor=32.0, attention_factor=1.3)),
    "gpt2": _gpt2(),
    "gpt2-inverse-layer": _gpt2(scale_attn_by_inverse_layer_idx=True, activation_function="gelu"),
    "gpt2-unscaled": _gpt2(scale_attn_weights=False, activation_function="relu"),
    "gpt2-unscaled-inverse-layer": _gpt2(
        scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True, activation_function="relu2"
    ),
    "gpt2-inner": _gpt2(n_inner=48, layer_norm_epsilon=1e-3, activation_function="silu"),
    "gpt2-untied": _gpt2(tie_word_embeddings=False, activation_function="gelu_pytorch_tanh"),
}

# One row of each family, for what need not be done for every option.
FAMILIES = (
    "llama",
    "mistral-window",
    "qwen2-layer-types",
    "qwen3",
    "gemma3",
    "gemma3-caps",
    "granite",
    "stablelm",
    "stablelm-parallel",
    "gpt-neox",
    "gpt-neox-sequential",
    "gptj",
    "phi",
    "phi-qk-norm",
    "olmo2",
    "smollm3-layer-types",
    "falcon-40b",
    "falcon-rw",
    "bloom",
    "mpt",
    "mixtral-window",
    "qwen3-moe-listed",
    "gemma2",
    "phi3-longrope",
    "gpt2",
)


def config(name: str) -> dict[str, Any]:
    """A case's config, to be changed at will."""
    return copy.deepcopy(CASES[name])


def spec_of(values: dict[str, Any]) -> ModelSpec:
    """A config as a spec."""
    return family_of(values["model_type"]).read(ConfigReader(values))


@torch.no_grad()
def scale_randomly(module: torch.nn.Module, *, norm_mean: float, seed: int = 0) -> None:
    """Matrices ~ N(0, 0.25²), norm weights ~ norm_mean + N(0, 0.5²), biases ~ N(0, 0.3²)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(0.25 * noise)
        elif name.endswith("bias"):
            parameter.copy_(0.3 * noise)
        else:
            parameter.copy_(norm_mean + 0.5 * noise)


def here(model: Transformer, name: str) -> str:
    """A quantity of a feed-forward network, or the like of it where the layer has experts."""
    if name in tap_names(model.spec):
        return name
    return name.replace(".mlp.", ".moe.").replace(".act", ".router_weights")


def norm_mean(values: dict[str, Any]) -> float:
    """Gemma multiplies by one more than the weight."""
    return 0.0 if values["model_type"].startswith("gemma") else 1.0


def transformer(values: dict[str, Any] | str, seed: int = 0) -> Transformer:
    """Ours, filled without any file, in evaluation mode."""
    if isinstance(values, str):
        values = config(values)
    model = Transformer(spec_of(values))
    scale_randomly(model, norm_mean=norm_mean(values), seed=seed)
    return model.eval()


def write(values: dict[str, Any], folder: Path, *, seed: int = 0, max_shard_size: str | None = None) -> Path:
    """Let transformers make the model and write its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {key: value for key, value in copy.deepcopy(values).items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values["model_type"], **options))
    scale_randomly(model, norm_mean=norm_mean(values), seed=seed)
    model.save_pretrained(folder, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    return folder


def ids(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random token ids, none of them a special one: transformers gives a pad's row no gradient."""
    return torch.randint(3, SIZES["vocab_size"] - 1, shape, generator=torch.Generator().manual_seed(seed))
