"""Tiny models through GGUF: what llama.cpp's converter alters is undone, bit by bit (case C06).

The converter itself is not at hand. What it does is known and is done here to tensors that transformers
wrote: Llama's (and Mixtral's) q and k rows are reordered so that rotary pairs lie side by side, Gemma's
norm weights are stored plus one, GPT-2's matrices are turned, a layer's experts become one tensor, Llama
3's slowed frequencies a tensor of divisors. ``gguf``, the format's own package, writes the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cutaway.checkpoints.load import load_checkpoint
from cutaway.checkpoints.resolve import Resolved
from cutaway.checkpoints.save import save_folder
from cutaway.errors import ConfigError, ShapeMismatch
from cutaway.models import Transformer
from tests.reference import oracle, tiny
from tests.reference.conftest import open_folder

Note = Callable[[str, str, float], float]

IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
}
EXPERT = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
ARCHITECTURES = {"gemma3_text": "gemma3", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
IN_GEMMA_LAYER = IN_LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
IN_GPT2_LAYER = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}


def side_by_side(rows: Tensor, n_heads: int) -> Tensor:
    """Channels j and j + half of each head become 2j and 2j + 1."""
    half = rows.shape[0] // n_heads // 2
    order = [head * 2 * half + j + side * half for head in range(n_heads) for j in range(half) for side in (0, 1)]
    return rows[order]


def converted(values: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A folder's tensors as a GGUF holds them."""
    kind = values["model_type"]
    names = {"gemma3_text": IN_GEMMA_LAYER, "gpt2": IN_GPT2_LAYER}.get(kind, IN_LAYER)
    out = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        stem, suffix = name.rsplit(".", 1)
        if ".experts." in stem:
            layer, (e, part) = stem.split(".")[2], stem.split(".")[-2:]
            experts.setdefault(f"blk.{layer}.ffn_{EXPERT[part]}_exps.weight", {})[int(e)] = tensor
            continue
        if stem in OUTSIDE:
            theirs = OUTSIDE[stem]
        else:
            _, _, layer, rest = stem.split(".", 3)
            theirs = f"blk.{layer}.{names[rest]}"
        if kind in ("llama", "mixtral") and stem.endswith(("q_proj", "k_proj")):
            heads = "num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"
            tensor = side_by_side(tensor, values[heads])
        if kind == "gemma3_text" and stem.endswith("norm"):
            tensor = tensor + 1
        if kind == "gpt2" and suffix == "weight" and stem.split(".")[-1].startswith("c_"):
            tensor = tensor.t().contiguous()
        out[f"{theirs}.{suffix}"] = tensor
    return out | {name: torch.stack([each[e] for e in range(len(each))]) for name, each in experts.items()}


def llama3_divisors(rope: dict[str, Any], width: int) -> Tensor:
    """What each pair's frequency is divided by."""
    divisors = []
    for pair in range(0, width, 2):
        turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-pair / width) / (2 * math.pi)
        share = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        share = min(max(share, 0.0), 1.0)
        divisors.append(1 / ((1 - share) / rope["factor"] + share))
    return torch.tensor(divisors)


def write(path: Path, values: dict[str, Any], tensors: dict[str, Tensor], matrices: str = "F32", **more: Any) -> Path:
    """A GGUF of a config and converted tensors; ``more`` are metadata keys without their prefix."""
    kind = values["model_type"]
    arch = ARCHITECTURES.get(kind, kind)
    writer = gguf.GGUFWriter(path, arch)
    width = values.get("head_dim", values.get("hidden_size", 0) // values.get("num_attention_heads", 1))
    if kind == "gpt2":
        writer.add_block_count(values["n_layer"])
        writer.add_context_length(values["n_positions"])
        writer.add_embedding_length(values["n_embd"])
        writer.add_feed_forward_length(4 * values["n_embd"])
        writer.add_head_count(values["n_head"])
        writer.add_layer_norm_eps(1e-5)
    else:
        rope = values.get("rope_parameters", {"rope_theta": 10_000.0, "rope_type": "default"})
        rope = rope.get(tiny.FAR, rope)
        writer.add_block_count(values["num_hidden_layers"])
        writer.add_context_length(values["max_position_embeddings"])
        writer.add_embedding_length(values["hidden_size"])
        writer.add_feed_forward_length(values["intermediate_size"])
        writer.add_head_count(values["num_attention_heads"])
        writer.add_head_count_kv(values["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(values.get("rms_norm_eps", 1e-5 if kind == "mixtral" else 1e-6))
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_key_length(width)
        writer.add_value_length(width)
        if kind == "llama":
            writer.add_vocab_size(values["vocab_size"])
            writer.add_rope_dimension_count(width)
        if rope["rope_type"] in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope["rope_type"] == "llama3":
            tensors = {**tensors, "rope_freqs.weight": llama3_divisors(rope, width)}
        if (n := values.get("num_local_experts", values.get("num_experts"))) is not None:
            writer.add_expert_count(n)
            writer.add_expert_used_count(values.get("num_experts_per_tok", 2))
        if kind == "qwen3_moe":
            writer.add_expert_feed_forward_length(values["moe_intermediate_size"])
        if kind == "gemma3_text":
            writer.add_sliding_window(values["sliding_window"])
            if values.get("final_logit_softcapping"):
                writer.add_final_logit_softcapping(values["final_logit_softcapping"])
    for key, value in more.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{arch}.{key}", value)
    for name, tensor in tensors.items():
        data = tensor.contiguous().numpy()
        if matrices != "F32" and data.ndim > 1 and "ffn_gate_inp" not in name:
            type_ = gguf.GGMLQuantizationType[matrices]
            writer.add_tensor(name, gguf.quants.quantize(data, type_), raw_dtype=type_)
        else:
            writer.add_tensor(name, data.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def open_gguf(path: Path) -> Transformer:
    return load_checkpoint(Resolved("gguf", path, f"path:{path}")).transformer


# What a GGUF of this family can say: it has fewer words than a config.
CASES = {
    "llama": tiny.config("llama"),
    "llama-tied": tiny.config("llama-tied"),
    "llama-mqa": {**tiny.config("llama-mqa"), "hidden_act": "silu"},
    "llama-linear": tiny.config("llama-linear"),
    "llama-yarn": tiny.config("llama-yarn"),
    "llama3-factor-8": tiny.config("llama3-factor-8"),
    "llama3-factor-32": tiny.config("llama3-factor-32"),
    "qwen2": tiny.config("qwen2"),
    "qwen3": tiny.config("qwen3"),
    "gemma3": {
        **tiny.config("gemma3-rope"),
        "num_hidden_layers": 7,
        "layer_types": [tiny.NEAR] * 5 + [tiny.FAR, tiny.NEAR],
        "query_pre_attn_scalar": 16,
        "attention_bias": False,
        "final_logit_softcapping": 2.0,
        "rope_parameters": {
            tiny.FAR: {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 8.0},
            tiny.NEAR: {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "mixtral": tiny.config("mixtral"),
    "mixtral-top-1": {**tiny.config("mixtral-top-1"), "hidden_act": "silu"},
    "qwen3-moe": {**tiny.config("qwen3-moe"), "norm_topk_prob": True, "moe_intermediate_size": 32},
    "gpt2": tiny.config("gpt2"),
    "gpt2-untied": {**tiny.config("gpt2-untied"), "activation_function": "gelu_new"},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A case as transformers' folder, its weights such that bf16 holds them exactly."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            folder = tiny.write(CASES[name], tmp_path_factory.mktemp("source") / name)
            tensors = load_file(folder / "model.safetensors")
            exact = {key: tensor.bfloat16().float() for key, tensor in tensors.items()}
            save_file(exact, folder / "model.safetensors", {"format": "pt"})
            made[name] = folder
        return made[name]

    return find


@pytest.mark.parametrize("matrices", ["F32", "BF16"])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_weights_and_logits(
    name: str, matrices: str, source: Callable[[str], Path], tmp_path: Path, measured: Note
) -> None:
    values, folder = CASES[name], source(name)
    tensors = converted(values, load_file(folder / "model.safetensors"))
    model = open_gguf(write(tmp_path / "m.gguf", values, tensors, matrices))
    ours, wanted = model.state_dict(), open_folder(folder).state_dict()
    assert ours.keys() == wanted.keys()
    assert [key for key in ours if not torch.equal(ours[key], wanted[key])] == []
    ids = tiny.ids(2, 30)
    assert measured(name, "gguf", float((model(ids) - oracle.logits(folder, ids)).abs().max())) <= 1e-4


@torch.no_grad()
def test_gpt2_with_a_copy_of_its_table(source: Callable[[str], Path], tmp_path: Path) -> None:
    """Older converters stored the tied output matrix once more."""
    folder = source("gpt2")
    tensors = converted(CASES["gpt2"], load_file(folder / "model.safetensors"))
    tensors["output.weight"] = tensors["token_embd.weight"].clone()
    ids = tiny.ids(1, 20)
    model = open_gguf(write(tmp_path / "m.gguf", CASES["gpt2"], tensors))
    assert float((model(ids) - oracle.logits(folder, ids)).abs().max()) <= 1e-4


@torch.no_grad()
def test_gemma3_with_newer_keys(source: Callable[[str], Path], tmp_path: Path) -> None:
    """The local base and the pattern of layers, where a file states them."""
    folder = source("gemma3")
    tensors = converted(CASES["gemma3"], load_file(folder / "model.safetensors"))
    stated = {"rope.freq_base_swa": 10_000.0, "attention.sliding_window_pattern": 6}
    one, two = (
        open_gguf(write(tmp_path / f"{len(more)}.gguf", CASES["gemma3"], tensors, **more)) for more in ({}, stated)
    )
    assert one.spec.decoder == two.spec.decoder


@torch.no_grad()
def test_a_gguf_as_a_folder(source: Callable[[str], Path], tmp_path: Path) -> None:
    """GGUF → Hugging Face: the same bits, and transformers' logits."""
    for name in ("llama-yarn", "gemma3", "gpt2", "qwen3", "mixtral", "qwen3-moe"):
        folder = source(name)
        tensors = converted(CASES[name], load_file(folder / "model.safetensors"))
        save_folder(open_gguf(write(tmp_path / f"{name}.gguf", CASES[name], tensors)), tmp_path / name)
        first, second = (load_file(place / "model.safetensors") for place in (folder, tmp_path / name))
        assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
        ids = tiny.ids(1, 20)
        assert float((oracle.logits(tmp_path / name, ids) - oracle.logits(folder, ids)).abs().max()) <= 1e-4


def test_what_a_gguf_may_not_hide(source: Callable[[str], Path], tmp_path: Path) -> None:
    """An unknown setting, a tensor too many, one too few, a layer count that the tensors do not bear out."""
    values = CASES["qwen2"]
    tensors = converted(values, load_file(source("qwen2") / "model.safetensors"))
    path = tmp_path / "m.gguf"
    with pytest.raises(ConfigError, match=r"qwen2\.attention\.temperature: unknown setting"):
        open_gguf(write(path, values, tensors, **{"attention.temperature": 2.0}))
    with pytest.raises(ShapeMismatch, match=r"1 tensor unexpected: blk\.0\.attn_sinks\.weight"):
        open_gguf(write(path, values, {**tensors, "blk.0.attn_sinks.weight": torch.ones(4)}))
    without = {name: tensor for name, tensor in tensors.items() if name != "blk.1.ffn_norm.weight"}
    with pytest.raises(ShapeMismatch, match=r"1 tensor missing: blk\.1\.ffn_norm\.weight"):
        open_gguf(write(path, values, without))
    with pytest.raises(ConfigError, match=r"qwen2\.block_count: differs from the tensors \(expected 3, got 4\)"):
        open_gguf(write(path, {**values, "num_hidden_layers": 4}, tensors))
