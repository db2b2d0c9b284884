"""Configs as they lie on the hub, in the spellings of several years: what is read from them, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cutaway.errors import ConfigError, UnsupportedModelError
from cutaway.families import family_of, gguf_family, known_families
from cutaway.formats.config import ConfigReader
from cutaway.models import Transformer
from cutaway.modules.rotary import speeds
from cutaway.spec import Llama3Scaling, LongScaling, ModelSpec

# The numbers are the models' own, as their publishers state them; left out is what says nothing.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
LLAMA3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "vocab_size": 128256,
}
MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN25 = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GRANITE = {
    "model_type": "granite",
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49159,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
PYTHIA_70M = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 512,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
GPTJ_6B = {
    "activation_function": "gelu_new",
    "architectures": ["GPTJForCausalLM"],
    "attn_pdrop": 0.0,
    "bos_token_id": 50256,
    "embd_pdrop": 0.0,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gptj",
    "n_embd": 4096,
    "n_head": 16,
    "n_inner": None,
    "n_layer": 28,
    "n_positions": 2048,
    "resid_pdrop": 0.0,
    "rotary": True,
    "rotary_dim": 64,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50, "temperature": 1.0}},
    "tie_word_embeddings": False,
    "vocab_size": 50400,
}
PHI_2 = {
    "architectures": ["PhiForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 50256,
    "embd_pdrop": 0.0,
    "eos_token_id": 50256,
    "hidden_act": "gelu_new",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 10240,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "phi",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.4,
    "qk_layernorm": False,
    "resid_pdrop": 0.1,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 51200,
}
OLMO2_7B = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
SMOLLM3_3B = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pad_token_id": 128004,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "vocab_size": 256000,
}
PHI35_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": [1.08] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
PHI4_MINI = {
    **PHI35_MINI,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
REAL = {
    "smollm2": SMOLLM2,
    "llama3-8b": LLAMA3_8B,
    "mistral-7b": MISTRAL_7B,
    "qwen2.5": QWEN25,
    "qwen3-0.6b": QWEN3_06B,
    "gemma3-1b": GEMMA3_1B,
    "granite": GRANITE,
    "gpt2": GPT2,
    "pythia-70m": PYTHIA_70M,
    "gpt-j-6b": GPTJ_6B,
    "phi-2": PHI_2,
    "olmo2-7b": OLMO2_7B,
    "smollm3-3b": SMOLLM3_3B,
    "mixtral-8x7b": MIXTRAL_8X7B,
    "qwen3-30b": QWEN3_30B,
    "gemma2-2b": GEMMA2_2B,
    "phi3.5-mini": PHI35_MINI,
    "phi4-mini": PHI4_MINI,
}


def read(values: dict[str, Any]) -> ModelSpec:
    return family_of(values["model_type"]).read(ConfigReader(values))


def kv_bytes(spec: ModelSpec) -> int:
    """Of one token, in two bytes a number."""
    return sum(2 * 2 * layer.attention.n_kv_heads * layer.attention.d_head for layer in spec.decoder.layers)


@pytest.mark.parametrize("name", REAL)
def test_there_and_back(name: str) -> None:
    """Nothing is refused, and what is written says the same as what was read."""
    spec = read(REAL[name])
    family = family_of(spec.family)
    written = family.config(spec)
    assert family.read(ConfigReader(written)) == spec
    spellings = ("rope_theta", "rope_scaling", "rope_local_base_freq", "architectures", "partial_rotary_factor")
    spellings += ("rotary_emb_base", "rotary_pct")
    for key, value in REAL[name].items():
        if key not in spellings and value is not None:
            assert written[key] == value, key


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("smollm2", 134_515_008),
        ("llama3-8b", 8_030_261_248),
        ("mistral-7b", 7_241_732_096),
        ("qwen2.5", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("gemma3-1b", 999_885_952),
        ("gpt2", 124_439_808),
        ("pythia-70m", 70_426_624),
        ("gpt-j-6b", 6_050_882_784),
        ("phi-2", 2_779_683_840),
        ("olmo2-7b", 7_298_617_344),
        ("smollm3-3b", 3_075_098_624),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b", 30_532_122_624),
        ("gemma2-2b", 2_614_341_888),
        ("phi3.5-mini", 3_821_079_552),
        ("phi4-mini", 3_836_021_760),
    ],
)
def test_parameters_are_as_many_as_published(name: str, count: int) -> None:
    with torch.device("meta"):
        model = Transformer(read(REAL[name]))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_bytes_of_a_token() -> None:
    """Case P01: key/value heads times their width; neither query heads nor hidden size."""
    assert kv_bytes(read(LLAMA3_8B)) == 131_072
    assert kv_bytes(read(QWEN3_06B)) == 114_688
    assert 8192 * 131_072 == 2**30


def test_what_is_read() -> None:
    gemma = read(GEMMA3_1B)
    windows = [layer.attention.mask.window for layer in gemma.decoder.layers]
    assert windows == [None if i % 6 == 5 else 512 for i in range(26)]
    bases = {layer.attention.mask.window: layer.attention.rotary.base for layer in gemma.decoder.layers}  # type: ignore[union-attr]
    assert bases == {512: 10_000.0, None: 1_000_000.0}
    assert gemma.decoder.layers[0].attention.score_scale == 1 / 16
    assert gemma.embedding.scale == math.sqrt(1152)
    assert gemma.head.tied
    assert {layer.attention.mask.window for layer in read(QWEN25).decoder.layers} == {None}
    assert {layer.attention.mask.window for layer in read(MISTRAL_7B).decoder.layers} == {4096}
    llama = read(LLAMA3_8B).decoder.layers[0].attention
    assert llama.rotary is not None
    assert llama.rotary.scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    assert len(speeds(llama.rotary)[0]) == 64
    granite = read(GRANITE)
    assert (granite.embedding.scale, granite.head.scale) == (12.0, 1 / 16)
    assert granite.decoder.layers[0].attention.score_scale == 1 / 128
    assert {branch.scale for branch in granite.decoder.layers[0].branches} == {0.22}
    smollm = read(SMOLLM2).decoder.layers[0].attention
    assert (smollm.n_heads, smollm.n_kv_heads, smollm.d_head) == (9, 3, 64)


def test_worked_vocabulary() -> None:
    """A table may have more rows than there are tokens: up to the next multiple."""
    case = tiny_case()
    assert QWEN3_06B["vocab_size"] == case["vocab_rows"]
    assert QWEN3_06B["hidden_size"] == case["d_model"]
    assert QWEN3_06B["tie_word_embeddings"] == case["tied"]
    multiple = case["padded_to_multiple_of"]
    assert case["vocab_rows"] % multiple == 0
    assert case["vocab_rows"] >= case["tokens"]


def tiny_case() -> dict[str, Any]:
    from tests.reference import tiny

    case: dict[str, Any] = tiny.WORKED["qwen3_0_6b_base"]
    return case


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("smollm2", "rope_interleaved", True),
        ("smollm2", "is_llama_config", False),
        ("smollm2", "pretraining_tp", 2),
        ("qwen2.5", "use_mrope", True),
        ("qwen2.5", "partial_rotary_factor", 0.5),
        ("llama3-8b", "sliding_window", 4096),
        ("qwen3-0.6b", "num_experts", 8),
        ("gemma3-1b", "use_bidirectional_attention", True),
        ("gpt2", "add_cross_attention", True),
        ("granite", "num_local_experts", 4),
        ("mistral-7b", "attention_bias", True),
        ("pythia-70m", "num_key_value_heads", 4),
        ("pythia-70m", "head_dim", 32),
        ("pythia-70m", "hidden_dropout_prob", 0.1),
        ("gpt-j-6b", "rotary_dim", None),
        ("gpt-j-6b", "rotary_dim", 63),
        ("gpt-j-6b", "rotary_dim", 258),
        ("gpt-j-6b", "rotary", False),
        ("gpt-j-6b", "scale_attn_weights", False),
        ("olmo2-7b", "clip_qkv", 8.0),
        ("olmo2-7b", "sliding_window", 4096),
        ("smollm3-3b", "no_rope_layers", [1] * 35),
        ("smollm3-3b", "no_rope_layers", [2] * 36),
        ("mixtral-8x7b", "num_experts", 4),
        ("mixtral-8x7b", "num_experts_per_tok", 9),
        ("mixtral-8x7b", "shared_expert_intermediate_size", 4096),
        ("qwen3-30b", "mlp_only_layers", "0"),
        ("qwen3-30b", "mlp_only_layers", [True]),
        ("qwen3-30b", "n_group", 2),
        ("gemma2-2b", "hidden_act", "gelu"),
        ("gemma2-2b", "sliding_window_size", 2048),
        ("phi3.5-mini", "attention_bias", True),
        ("phi4-mini", "full_attn_mod", 2),
    ],
)
def test_what_would_be_another_model_is_refused(name: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        read({**REAL[name], key: value})
    assert caught.value.field == f"/{key}"


def test_a_slip_is_told_from_a_new_setting() -> None:
    with pytest.raises(ConfigError) as caught:
        read({**LLAMA3_8B, "rms_norm_epsilon": 1e-5})
    assert "Did you mean 'rms_norm_eps'?" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3-0.6b", "gemma3-1b"])
def test_layer_types(name: str) -> None:
    values = {**REAL[name], "use_sliding_window": True} if "qwen" in name else dict(REAL[name])
    values["sliding_window"] = 16
    n = values["num_hidden_layers"]
    types = ["full_attention", "sliding_attention"] * (n // 2)
    windows = [layer.attention.mask.window for layer in read({**values, "layer_types": types}).decoder.layers]
    assert windows == [None, 16] * (n // 2)
    for bad, field in (
        (types[1:], "/layer_types"),
        (["chunked_attention"] * n, "/layer_types/0"),
        ("full", "/layer_types"),
    ):
        with pytest.raises(ConfigError) as caught:
            read({**values, "layer_types": bad})
        assert caught.value.field == field


def test_a_sliding_layer_needs_a_window() -> None:
    with pytest.raises(ConfigError) as caught:
        read({**QWEN3_06B, "layer_types": ["sliding_attention"] * 28})
    assert caught.value.field == "/sliding_window"


def turning(values: dict[str, Any]) -> list[bool]:
    return [layer.attention.rotary is not None for layer in read(values).decoder.layers]


def test_layers_without_positions() -> None:
    """SmolLM3: a list, or every so many; the list may be longer than the model."""
    plain = {key: value for key, value in SMOLLM3_3B.items() if not key.startswith("no_rope")}
    assert turning(SMOLLM3_3B) == turning(plain) == [True, True, True, False] * 9
    assert turning({**plain, "no_rope_layer_interval": 2}) == [True, False] * 18
    longer = {**plain, "no_rope_layers": [0, 1] * 20}
    assert turning(longer) == [False, True] * 18
    assert family_of("smollm3").config(read(longer))["no_rope_layers"] == [0, 1] * 20
    # Null is as many as heads; left out, it is four.
    heads = {**plain, "num_key_value_heads": None}
    assert read(heads).decoder.layers[0].attention.n_kv_heads == 16
    del heads["num_key_value_heads"]
    assert read(heads).decoder.layers[0].attention.n_kv_heads == 4


def test_layers_without_positions_slide() -> None:
    on = {**SMOLLM3_3B, "use_sliding_window": True, "sliding_window": 64}
    del on["layer_types"]
    windows = [layer.attention.mask.window for layer in read(on).decoder.layers]
    assert windows == [None, None, None, 64] * 9
    types = ["sliding_attention"] * 36
    with pytest.raises(ConfigError) as caught:
        read({**on, "use_sliding_window": False, "layer_types": types})
    assert caught.value.field == "/use_sliding_window"
    with pytest.raises(ConfigError) as caught:
        read({**on, "sliding_window": None, "layer_types": types})
    assert caught.value.field == "/sliding_window"


def test_both_names_of_a_partial_rotation() -> None:
    """Pythia's two keys and ``rope_parameters`` say the same, or are refused."""

    def rotary(**options: Any) -> tuple[float, int]:
        found = read({**PYTHIA_70M, **options}).decoder.layers[0].attention.rotary
        assert found is not None
        return found.base, found.d_rotary

    none = {"rotary_pct": None, "rotary_emb_base": None}
    new = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    assert rotary() == rotary(**none) == (10000.0, 16)
    assert rotary(rotary_pct=0.5, rotary_emb_base=500) == rotary(rope_parameters=new, **none) == (500.0, 32)
    assert rotary(rope_parameters=new, rotary_pct=0.5, rotary_emb_base=500) == (500.0, 32)
    assert rotary(rope_scaling={"type": "linear", "factor": 2.0}) == (10000.0, 16)
    for key, options in (("rotary_emb_base", {"rotary_pct": 0.5}), ("rotary_pct", {"rotary_emb_base": 500})):
        with pytest.raises(ConfigError, match="differs from rope_parameters") as caught:
            rotary(rope_parameters=new, **options)
        assert caught.value.field == f"/{key}"


def test_heads_that_are_normed_fill_the_stream() -> None:
    """Phi: the reference makes those norms d_model / heads wide, whatever head_dim says."""
    assert read({**PHI_2, "head_dim": 96}).decoder.layers[0].attention.d_head == 96
    assert read({**PHI_2, "qk_layernorm": True}).decoder.layers[0].attention.qk_norm is not None
    with pytest.raises(ConfigError, match="head_dim"):
        read({**PHI_2, "qk_layernorm": True, "head_dim": 96})


def test_registry() -> None:
    assert known_families() == sorted(known_families())
    for name in known_families():
        family = family_of(name)
        assert family.model_type == name
        if family.gguf is not None:
            stated: dict[str, object] = {"general.architecture": (arch := family.gguf.arch)}
            if "expert_count" in family.gguf.keys:
                stated[f"{arch}.expert_count"] = 4
            assert gguf_family(stated) is family
    for unknown in ("", "LLAMA", None, 3, ["llama"], "../llama", "os"):
        with pytest.raises(UnsupportedModelError, match="llama"):
            family_of(unknown)
        with pytest.raises(UnsupportedModelError, match="llama"):
            gguf_family({"general.architecture": unknown})


def test_active_parameters() -> None:
    """Case P03: a mixture counts all its experts, and works with two of eight."""
    spec = read(MIXTRAL_8X7B)
    with torch.device("meta"):
        model = Transformer(spec)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".moe.body." in name and ".router." not in name)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total - experts * 6 // 8 == 12_879_925_248
    assert total - experts * 6 // 8 - spec.vocab_size * spec.d_model == 12_748_853_248


def test_which_layers_have_experts() -> None:
    def sparse(**options: Any) -> list[int]:
        layers = read({**QWEN3_30B, "num_hidden_layers": 6, **options}).decoder.layers
        return [i for i, layer in enumerate(layers) if layer.branches[1].name == "moe"]

    assert sparse() == [0, 1, 2, 3, 4, 5]
    assert sparse(decoder_sparse_step=2) == [1, 3, 5]
    assert sparse(decoder_sparse_step=3, mlp_only_layers=[5, 99]) == [2]
    assert sparse(mlp_only_layers=None) == [0, 1, 2, 3, 4, 5]
    assert sparse(mlp_only_layers=list(range(6))) == []
    for options in ({"decoder_sparse_step": 2}, {"mlp_only_layers": [5, 0]}, {"mlp_only_layers": [0, 1, 2, 3, 4, 5]}):
        values = {**QWEN3_30B, "num_hidden_layers": 6, **options}
        family, spec = family_of("qwen3_moe"), read(values)
        written = family.config(spec)
        assert family.read(ConfigReader(written)) == spec
        for key in (*options, "num_experts", "moe_intermediate_size", "intermediate_size", "norm_topk_prob"):
            assert written[key] == values[key], key


def test_windows_of_a_mixture() -> None:
    """Qwen3-MoE slides everywhere or nowhere; what its configs say about layers is refused where it would count."""
    sliding = {**QWEN3_30B, "use_sliding_window": True, "sliding_window": 16}
    assert {layer.attention.mask.window for layer in read({**sliding, "max_window_layers": 0}).decoder.layers} == {16}
    with pytest.raises(ConfigError) as caught:
        read(sliding)
    assert caught.value.field == "/max_window_layers"
    assert read({**QWEN3_30B, "sliding_window": 16}).decoder.layers[0].attention.mask.window is None


def test_two_original_lengths_are_refused() -> None:
    """Beside the section and in it; alone beside it, or in both alike, it is what counts."""
    key = "original_max_position_embeddings"

    def original(values: dict[str, Any]) -> int:
        rotary = read(values).decoder.layers[0].attention.rotary
        assert rotary is not None
        assert isinstance(rotary.scaling, Llama3Scaling | LongScaling)
        return rotary.scaling.original_max_positions

    assert original({**LLAMA3_8B, key: 8192}) == 8192
    assert original(PHI35_MINI) == 4096
    assert original({k: v for k, v in PHI35_MINI.items() if k != key}) == 4096  # the family's default
    for values in ({**LLAMA3_8B, key: 4096}, {**PHI35_MINI, "rope_scaling": {**PHI35_MINI["rope_scaling"], key: 8192}}):  # type: ignore[dict-item]
        with pytest.raises(ConfigError) as caught:
            read(values)
        assert caught.value.field == f"/rope_scaling/{key}"


def test_phi3_turns_plainly_or_by_longrope() -> None:
    for rope in ({"type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 2.0}):
        with pytest.raises(ConfigError) as caught:
            read({**PHI35_MINI, "rope_scaling": rope})
        assert caught.value.field == "/rope_scaling"
    su = {**PHI35_MINI, "rope_scaling": {**PHI35_MINI["rope_scaling"], "type": "su"}}  # type: ignore[dict-item]
    assert read(su) == read(PHI35_MINI)
