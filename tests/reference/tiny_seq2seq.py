"""Tiny encoder–decoders, with each option away from its default somewhere; see ``tiny.py``.

A source and a target have different lengths, and a shared table is no excuse for reading the wrong one: where there are
two tables, they have different sizes.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cutaway.models import Transformer
from tests.reference import tiny

T5 = {
    "model_type": "t5",
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 12,  # heads wider together than the stream
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 64,
    "max_position_embeddings": 48,
    "encoder_layers": 2,
    "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_layers": 3,
    "decoder_ffn_dim": 40,
    "decoder_attention_heads": 2,
    "d_model": 32,
    "dropout": 0.0,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}


def _t5(**options: Any) -> dict[str, Any]:
    return {**T5, **options}


def _bart(**options: Any) -> dict[str, Any]:
    return {"model_type": "bart", **BART, **options}


def _marian(**options: Any) -> dict[str, Any]:
    marian = {
        "encoder_layers": 1,
        "decoder_layers": 2,
        "pad_token_id": 63,
        "decoder_start_token_id": 63,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
    }
    return {"model_type": "marian", **BART, **marian, "bos_token_id": None, "scale_embedding": True, **options}


# A row of the matrix: its name, and its config in transformers' own words.
CASES: dict[str, dict[str, Any]] = {
    "t5": _t5(),
    # As version 1.1 and Flan were published: a gate, and a head of its own.
    "t5-v1.1": _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "t5-v1.1-tied": _t5(feed_forward_proj="gated-silu", scale_decoder_outputs=False, num_decoder_layers=None),
    "t5-untied-scaled": _t5(tie_word_embeddings=False, scale_decoder_outputs=True, feed_forward_proj="gelu_new"),
    "t5-gelu": _t5(feed_forward_proj="gelu", relative_attention_num_buckets=32, relative_attention_max_distance=128),
    "t5-gated-relu": _t5(feed_forward_proj="gated-relu", layer_norm_epsilon=1e-3, num_heads=3, d_kv=64),
    "bart": _bart(),
    "bart-scaled": _bart(scale_embedding=True, activation_function="relu"),
    "bart-untied": _bart(tie_word_embeddings=False, activation_function="gelu_new"),
    "bart-swish": _bart(activation_function="swish", encoder_attention_heads=8, encoder_layers=1),
    "marian": _marian(),
    "marian-unscaled": _marian(scale_embedding=False),
    "marian-swish": _marian(activation_function="swish", d_model=24, decoder_attention_heads=3),
    "marian-two-tables": _marian(share_encoder_decoder_embeddings=False, vocab_size=80, decoder_vocab_size=64),
    "marian-untied": _marian(
        share_encoder_decoder_embeddings=False, decoder_vocab_size=64, vocab_size=80, tie_word_embeddings=False
    ),
}
# One row of each kind, for what need not be done for every option.
FAMILIES = ("t5", "t5-v1.1", "bart", "marian-swish", "marian-two-tables")
# Without a head, or without a decoder.
BARE = {
    "T5Model": "t5-v1.1",
    "T5EncoderModel": "t5",
    "BartModel": "bart-scaled",
    "MarianModel": "marian-two-tables",
}


def config(name: str) -> dict[str, Any]:
    """A case's config, to be changed at will."""
    return copy.deepcopy(CASES[name])


def transformer(values: dict[str, Any] | str, seed: int = 0) -> Transformer:
    """Ours, filled without any file, in evaluation mode."""
    values = config(values) if isinstance(values, str) else values
    model = tiny.transformer(values, seed)
    if values["model_type"] == "t5":
        _soften(model, values["d_kv"])
    return model


@torch.no_grad()
def _soften(model: torch.nn.Module, d_head: int) -> None:
    """Queries as small as T5's own, which stand for the scale that its scores do not have.

    With larger ones every softmax picks one key, and fp32's last bit decides which.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".q.weight"):
            parameter.mul_(d_head**-0.5)


@torch.no_grad()
def scale_randomly(model: Any, seed: int = 0) -> None:
    """Parameters as everywhere; the shift of the logits, which is no parameter there; and heads that are not tied."""
    if model.config.model_type == "t5":
        untie(model)
    tiny.scale_randomly(model, norm_mean=1.0, seed=seed)
    if model.config.model_type == "t5":
        _soften(model, model.config.d_kv)
    for module in model.modules():
        if hasattr(module, "create_weight"):
            module.weight.copy_(module.create_weight())  # waves are waves
    generator = torch.Generator().manual_seed(seed + 1)
    for name, buffer in model.named_buffers():
        if name == "final_logits_bias":
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def untie(model: Any) -> None:
    """Give T5 a head of its own where its config said so, which transformers 5.24 overhears unless a file has one."""
    if getattr(model, "lm_head", None) is not None and model.config.untied:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
        model.all_tied_weights_keys.pop("lm_head.weight", None)


def write(values: dict[str, Any], folder: Path, *, seed: int = 0, cls: str | None = None) -> Path:
    """Let transformers make the model and write its folder.

    Args:
        values: the config.
        folder: where.
        seed: of the weights.
        cls: the class, where it is not the one that generates.
    """
    import transformers

    options = {key: value for key, value in copy.deepcopy(values).items() if key != "model_type"}
    settings = transformers.AutoConfig.for_model(values["model_type"], **options)
    settings.untied = values.get("tie_word_embeddings") is False
    model = getattr(transformers, cls or GENERATING[values["model_type"]])(settings)
    scale_randomly(model, seed=seed)
    del model.config.untied
    model.save_pretrained(folder)
    return folder


GENERATING = {"t5": "T5ForConditionalGeneration", "bart": "BartForConditionalGeneration", "marian": "MarianMTModel"}


@functools.cache
def _pristine(folder: Path, cls: str | None) -> Any:
    import transformers

    auto = getattr(transformers, cls) if cls else transformers.AutoModelForSeq2SeqLM
    return auto.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def reference(folder: Path, cls: str | None = None) -> Any:
    """The reference's model of a folder."""
    return _pristine(folder, cls)


@torch.no_grad()
def outputs(folder: Path, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's encoder output, decoder output and logits of whole texts without padding."""
    model = reference(folder)
    got = model(input_ids=source, decoder_input_ids=target, use_cache=False)
    body = model if model.config.model_type == "t5" else model.model
    memory = got.encoder_last_hidden_state
    kwargs = {"encoder_hidden_states": memory, "use_cache": False}
    return memory, body.decoder(input_ids=target, **kwargs).last_hidden_state, got.logits


def ids(*shape: int, seed: int = 1) -> Tensor:
    """Random token ids of both vocabularies, none of them a special one."""
    return tiny.ids(*shape, seed=seed)
