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
from cutaway.spec import Llama3Scaling, ModelSpec

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
REAL = {
    "smollm2": SMOLLM2,
    "llama3-8b": LLAMA3_8B,
    "mistral-7b": MISTRAL_7B,
    "qwen2.5": QWEN25,
    "qwen3-0.6b": QWEN3_06B,
    "gemma3-1b": GEMMA3_1B,
    "granite": GRANITE,
    "gpt2": GPT2,
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
    spellings = ("rope_theta", "rope_scaling", "rope_local_base_freq", "architectures")
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
        ("llama3-8b", "original_max_position_embeddings", 8192),
        ("qwen3-0.6b", "num_experts", 8),
        ("gemma3-1b", "use_bidirectional_attention", True),
        ("gpt2", "add_cross_attention", True),
        ("granite", "num_local_experts", 4),
        ("mistral-7b", "attention_bias", True),
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


def test_registry() -> None:
    assert known_families() == sorted(known_families())
    for name in known_families():
        family = family_of(name)
        assert family.model_type == name
        if family.gguf is not None:
            assert gguf_family(family.gguf.arch) is family
    for unknown in ("", "LLAMA", None, 3, ["llama"], "../llama", "os"):
        with pytest.raises(UnsupportedModelError, match="llama"):
            family_of(unknown)
        with pytest.raises(UnsupportedModelError, match="llama"):
            gguf_family(unknown)
