"""Small models with a real vocabulary, of every family that GGUF has a form of."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tests.reference import tiny
from tests.tokenizers import small

from cutaway.model import Model
from cutaway.spec import GenerationSettings
from cutaway.tokenizers import Tokenizer

FAR, NEAR = tiny.FAR, tiny.NEAR


def gemma3(kinds: list[str], **options: Any) -> dict[str, Any]:
    """Gemma 3 as llama.cpp has it: the scale is the head's, and scores are not capped."""
    ropes = {
        FAR: {"rope_type": "default", "rope_theta": 50_000.0},
        NEAR: {"rope_type": "default", "rope_theta": 700.0},
    }
    own = {"num_hidden_layers": len(kinds), "layer_types": kinds, "query_pre_attn_scalar": 16, "rope_parameters": ropes}
    return {**tiny.config("gemma3"), **own, **options}


def scaled(name: str, kind: str, **options: Any) -> dict[str, Any]:
    """A case with its global rotary positions scaled."""
    rope = {"rope_type": kind, "rope_theta": 5000.0, **options}
    return {**tiny.config(name), "rope_parameters": rope}


SIX = [NEAR] * 5 + [FAR]
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
GEMMA_LINEAR = {
    FAR: {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 8.0},
    NEAR: {"rope_type": "default", "rope_theta": 10_000.0},
}
# Name → config, and which of the small vocabularies.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": (tiny.config("llama"), "prefixed"),
    "llama-tied": (tiny.config("llama-tied"), "bytes"),
    "llama-head-width": ({**tiny.config("llama-mqa"), "hidden_act": "silu"}, "bytes"),
    "llama-linear": (tiny.config("llama-linear"), "bytes"),
    "llama-yarn": (tiny.config("llama-yarn"), "bytes"),
    "llama3-factor-8": (tiny.config("llama3-factor-8"), "bytes"),
    "llama3-factor-32": (tiny.config("llama3-factor-32"), "bytes"),
    "qwen2": (tiny.config("qwen2"), "bytes"),
    "qwen2-yarn": (scaled("qwen2", "yarn", **YARN), "bytes"),
    "qwen3": (tiny.config("qwen3"), "bytes"),
    "qwen3-tied": ({**tiny.config("qwen3"), "tie_word_embeddings": True}, "bytes"),
    "gemma3": (gemma3([*SIX, NEAR]), "plain"),
    "gemma3-every-second": (gemma3([NEAR, FAR, NEAR, FAR], sliding_window=5), "plain"),
    "gemma3-local": (gemma3([NEAR] * 3, tie_word_embeddings=False), "plain"),
    "gemma3-linear-and-cap": (gemma3(SIX, rope_parameters=GEMMA_LINEAR, final_logit_softcapping=2.0), "plain"),
    "mixtral": (tiny.config("mixtral"), "prefixed"),
    "mixtral-tied-linear": ({**scaled("mixtral-window", "linear", factor=2.0), "sliding_window": None}, "bytes"),
    "qwen3-moe": ({**tiny.config("qwen3-moe"), "norm_topk_prob": True}, "bytes"),
    "gpt2": (tiny.config("gpt2"), "bytes"),
    "gpt2-untied-wide": ({**tiny.config("gpt2-untied"), "activation_function": "gelu_new", "n_inner": 48}, "bytes"),
}


def vocabulary(kind: str) -> Tokenizer:
    """Byte-level, or SentencePiece's with or without a space in front."""
    return small.byte_level() if kind == "bytes" else small.sentencepiece(kind == "prefixed")


def model(name: str, *, exact: bool = True) -> Model:
    """A case with scaled random weights, ``exact`` ones such that bf16 holds them."""
    values, kind = copy.deepcopy(CASES[name])
    tokenizer = vocabulary(kind)
    values["vocab_size"] = tokenizer.vocab_size + 3  # rows that no token has
    values["n_positions" if "n_embd" in values else "max_position_embeddings"] = 128
    transformer = tiny.transformer(values)
    if exact:
        with torch.no_grad():
            for parameter in transformer.parameters():
                parameter.copy_(parameter.bfloat16())
    return Model(transformer, tokenizer, GenerationSettings(eos_ids=tuple(sorted(tokenizer.eos_ids))))
