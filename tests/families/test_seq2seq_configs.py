"""Configs of encoder–decoders: every field, as they lie on the hub, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.reference import tiny_seq2seq as tiny
from tests.reference.conftest import open_folder
from tests.reference.tiny import spec_of

from cutaway.checkpoints.save import config_of, save_folder
from cutaway.errors import ConfigError, CutawayError, UnsupportedModelError
from cutaway.families import family_of
from cutaway.formats.config import ConfigReader
from cutaway.modules.bias import buckets
from cutaway.spec import BucketBias, HeadSpec, LearnedPositions, SinusoidalPositions


@pytest.mark.parametrize("name", tiny.CASES)
def test_read_and_write_are_inverse(name: str) -> None:
    spec = spec_of(tiny.config(name))
    assert family_of(spec.family).read(ConfigReader(config_of(family_of(spec.family), spec))) == spec


COMMON = {"pad_token_id": 5, "eos_token_id": [7, 3], "bos_token_id": 9, "use_cache": False}
PLACES = {
    "dropout": 0.2,
    "attention_dropout": 0.3,
    "activation_dropout": 0.4,
    "activation_function": "relu",
    "classifier_dropout": 0.5,
    "init_std": 0.5,
    "scale_embedding": True,
    "tie_word_embeddings": False,
    "decoder_start_token_id": 11,
    "forced_eos_token_id": 12,
}
# Every field of each family's config, away from its default.
ODD = {
    "t5": {
        **tiny.config("t5-v1.1"),
        "dropout_rate": 0.2,
        "layer_norm_epsilon": 1e-3,
        "initializer_factor": 0.5,
        "classifier_dropout": 0.3,
    },
    "bart": {**tiny.config("bart"), **PLACES},
    "marian": {
        key: value for key, value in {**tiny.config("marian-untied"), **PLACES}.items() if key[:10] != "classifier"
    },
}
# Fields that are about something else than this model's numbers, or have one value here.
ELSEWHERE = {
    "model_type", "architectures", "transformers_version", "dtype", "return_dict", "output_hidden_states", "id2label",
    "label2id", "is_encoder_decoder", "problem_type", "chunk_size_feed_forward", "_name_or_path", "output_attentions",
    "is_decoder", "encoder_layerdrop", "decoder_layerdrop",
}  # fmt: skip


@pytest.mark.parametrize("family", ODD)
@torch.no_grad()
def test_every_field_comes_back(family: str, tmp_path: Path) -> None:
    """Case C13: no field is lost or changed on its way through, and transformers computes the same."""
    from transformers import AutoConfig

    plain = AutoConfig.for_model(family).to_dict()
    folder = tiny.write({**ODD[family], **COMMON}, tmp_path / "odd")
    theirs = json.loads((folder / "config.json").read_text())
    # transformers ties every T5 by its config, and looks for a head in the file.
    tied = {"tie_word_embeddings"} if family == "t5" else set()
    assert {key for key in plain if key not in ELSEWHERE | tied and theirs.get(key) == plain[key]} == set()

    model = open_folder(folder)
    save_folder(model, tmp_path / "copy")
    ours = json.loads((tmp_path / "copy" / "config.json").read_text())
    for one in (theirs, ours):
        one.pop("transformers_version", None)
    assert {key: ours.get(key, "lost") for key in theirs if key not in tied} == {
        key: value for key, value in theirs.items() if key not in tied
    }
    assert {key for key in ours if key not in theirs} <= {"n_positions"}
    first, second = (AutoConfig.from_pretrained(place).to_dict() for place in (folder, tmp_path / "copy"))
    second.pop("n_positions", None)
    assert {**second, "_name_or_path": ""} == {**first, "_name_or_path": ""}

    source, target = tiny.ids(2, 11), tiny.ids(2, 9, seed=2)
    again = open_folder(tmp_path / "copy")
    assert again.spec == model.spec
    logits = model(target, source=model.read(source))
    assert torch.equal(again(target, source=again.read(source)), logits)
    assert float((tiny.outputs(tmp_path / "copy", source, target)[2] - logits).abs().max()) <= 1e-4


# ---- T5's head ---------------------------------------------------------------------------------------------


def test_buckets() -> None:
    """Case L17: distances −200 … 128 of 32 buckets that end at 128, both ways and one way."""
    distance = torch.tensor([-200, -20, -16, -8, -1, 0, 1, 8, 20, 128])
    both = buckets(distance, BucketBias(32, 128, both_ways=True))
    assert both.tolist() == [15, 10, 10, 8, 1, 0, 17, 24, 26, 31]
    assert buckets(distance, BucketBias(32, 128)).tolist() == [31, 17, 16, 8, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("said", "stored", "tied", "scaled"),
    [
        ({}, False, True, True),  # 1.0
        ({"tie_word_embeddings": True}, False, True, True),
        ({"tie_word_embeddings": False}, True, False, False),  # 1.1 and Flan, as they were published
        ({"tie_word_embeddings": False}, False, True, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, True, False, False),  # the same, saved anew
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, False, True, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, True, False, True),
        ({"tie_word_embeddings": False, "scale_decoder_outputs": True}, True, False, True),
    ],
)
@torch.no_grad()
def test_tied_or_not(said: dict[str, bool], stored: bool, tied: bool, scaled: bool, tmp_path: Path) -> None:
    """Case L17: whether logits are scaled is the config's to say, whether the head is tied is the file's."""
    values = {**tiny.config("t5"), "tie_word_embeddings": not stored}
    path = tiny.write(values, tmp_path) / "config.json"
    config = json.loads(path.read_text())
    for key in ("tie_word_embeddings", "scale_decoder_outputs"):
        config.pop(key, None)
    path.write_text(json.dumps({**config, **said}))
    model, source, target = open_folder(tmp_path), tiny.ids(2, 11), tiny.ids(2, 9, seed=2)
    assert model.spec.head == HeadSpec(tied, scale=32**-0.5 if scaled else 1.0)
    logits = model(target, source=model.read(source))
    assert float((tiny.outputs(tmp_path, source, target)[2] - logits).abs().max()) <= 1e-4
    save_folder(model, tmp_path / "copy")
    assert open_folder(tmp_path / "copy").spec == model.spec
    assert torch.equal(tiny.outputs(tmp_path / "copy", source, target)[2], tiny.outputs(tmp_path, source, target)[2])


@torch.no_grad()
def test_a_head_stored_although_it_is_tied(tmp_path: Path) -> None:
    """Files made of torch's own name every tensor, tied or not."""
    tiny.write(tiny.config("t5"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        tensors[name] = tensors["shared.weight"].clone()
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    save_file({**tensors, unused: torch.zeros(8, 4)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert open_folder(tmp_path).spec.lm.tied


# ---- as they lie on the hub -----------------------------------------------------------------------------------

FLAN = {
    "architectures": ["T5ForConditionalGeneration"], "d_ff": 1024, "d_kv": 64, "d_model": 512, "num_heads": 6,
    "decoder_start_token_id": 0, "dense_act_fn": "gelu_new", "dropout_rate": 0.1, "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu", "initializer_factor": 1.0, "is_encoder_decoder": True, "is_gated_act": True,
    "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512, "num_decoder_layers": 8, "num_layers": 8,
    "output_past": True, "pad_token_id": 0, "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32, "tie_word_embeddings": False, "torch_dtype": "float32",
    "transformers_version": "4.23.1", "use_cache": True, "vocab_size": 32128,
    "task_specific_params": {"summarization": {"num_beams": 4, "prefix": "summarize: "}},
}  # fmt: skip
CNN = {
    "_num_labels": 3, "activation_dropout": 0.0, "activation_function": "gelu", "add_final_layer_norm": False,
    "architectures": ["BartForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 0,
    "classif_dropout": 0.0, "classifier_dropout": 0.0, "d_model": 1024, "decoder_attention_heads": 16,
    "decoder_ffn_dim": 4096, "decoder_layerdrop": 0.0, "decoder_layers": 12, "decoder_start_token_id": 2,
    "dropout": 0.1, "early_stopping": True, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096,
    "encoder_layerdrop": 0.0, "encoder_layers": 12, "eos_token_id": 2, "force_bos_token_to_be_generated": True,
    "forced_bos_token_id": 0, "forced_eos_token_id": 2, "gradient_checkpointing": False, "init_std": 0.02,
    "is_encoder_decoder": True, "length_penalty": 2.0, "max_length": 142, "max_position_embeddings": 1024,
    "min_length": 56, "model_type": "bart", "no_repeat_ngram_size": 3, "normalize_before": False, "num_beams": 4,
    "num_hidden_layers": 12, "output_past": True, "pad_token_id": 1, "prefix": " ", "scale_embedding": False,
    "use_cache": True, "vocab_size": 50264,
}  # fmt: skip
OPUS = {
    "_name_or_path": "/tmp/Helsinki-NLP/opus-mt-en-de", "_num_labels": 3, "activation_dropout": 0.0,
    "activation_function": "swish", "add_bias_logits": False, "add_final_layer_norm": False,
    "architectures": ["MarianMTModel"], "attention_dropout": 0.0, "bad_words_ids": [[58100]], "bos_token_id": 0,
    "classif_dropout": 0.0, "classifier_dropout": 0.0, "d_model": 512, "decoder_attention_heads": 8,
    "decoder_ffn_dim": 2048, "decoder_layerdrop": 0.0, "decoder_layers": 6, "decoder_start_token_id": 58100,
    "decoder_vocab_size": 58101, "dropout": 0.1, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048,
    "encoder_layerdrop": 0.0, "encoder_layers": 6, "eos_token_id": 0, "forced_eos_token_id": 0,
    "gradient_checkpointing": False, "init_std": 0.02, "is_encoder_decoder": True, "max_length": 512,
    "max_position_embeddings": 512, "model_type": "marian", "normalize_before": False, "normalize_embedding": False,
    "num_beams": 6, "num_hidden_layers": 6, "pad_token_id": 58100, "scale_embedding": True,
    "share_encoder_decoder_embeddings": True, "static_position_embeddings": True, "transformers_version": "4.22.0",
    "use_cache": True, "vocab_size": 58101,
}  # fmt: skip


@pytest.mark.parametrize("values", [FLAN, CNN, OPUS], ids=["flan", "bart-cnn", "opus-mt"])
def test_published(values: dict[str, Any]) -> None:
    """All of it comes back on saving."""
    spec = spec_of(values)
    back = family_of(spec.family).config(spec)
    same = {"swish": "silu"}  # today's word
    assert {key: back.get(key, "lost") for key in values} == {
        key: same.get(value, value) if isinstance(value, str) else value for key, value in values.items()
    }


def test_what_they_come_to() -> None:
    flan, cnn, opus = (spec_of(values) for values in (FLAN, CNN, OPUS))
    assert flan.head == HeadSpec(tied=False)
    assert (flan.encoder.layers[0].attention.bias, flan.encoder.layers[0].attention.scale) == (
        BucketBias(32, 128, both_ways=True),
        1.0,
    )
    assert cnn.embedding.positions == LearnedPositions(1026, 2)
    assert (cnn.source_limit, cnn.position_limit, cnn.source_vocab_size) == (1024, 1024, None)
    assert opus.embedding.positions == SinusoidalPositions("halves")
    assert (opus.embedding.scale, opus.lm.bias, opus.lm.tied) == (512**0.5, True, True)


@pytest.mark.parametrize(
    ("name", "options", "where"),
    [
        ("t5", {"feed_forward_proj": "swiglu"}, "/feed_forward_proj"),
        ("t5", {"dense_act_fn": "gelu"}, "/dense_act_fn"),
        ("t5", {"is_gated_act": True}, "/is_gated_act"),
        ("t5", {"is_decoder": True}, "/is_decoder"),
        ("t5", {"is_encoder_decoder": False}, "/is_encoder_decoder"),
        ("t5", {"num_head": 4}, "/num_head"),
        ("bart", {"encoder_layerdrop": 1.5}, "/encoder_layerdrop"),
        ("bart", {"num_hidden_layers": 5}, "/num_hidden_layers"),
        ("bart", {"normalize_before": True}, "/normalize_before"),
        ("bart", {"add_final_layer_norm": True}, "/add_final_layer_norm"),
        ("bart", {"normalize_embedding": False}, "/normalize_embedding"),
        ("bart", {"static_position_embeddings": True}, "/static_position_embeddings"),
        ("bart", {"extra_pos_embeddings": 0}, "/extra_pos_embeddings"),
        ("bart", {"decoder_attention_heads": 5}, "/decoder_attention_heads"),
        ("bart", {"d_model": 32.0}, "/d_model"),
        ("marian", {"add_bias_logits": True}, "/add_bias_logits"),
        ("marian", {"normalize_embedding": True}, "/normalize_embedding"),
        ("marian", {"static_position_embeddings": False}, "/static_position_embeddings"),
        ("marian", {"decoder_vocab_size": 60}, "/decoder_vocab_size"),
        ("marian", {"decoder_layerdrop": -0.5}, "/decoder_layerdrop"),
    ],
)
def test_refused_by_name(name: str, options: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of({**tiny.config(name), **options})
    assert caught.value.field == where


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("t5", "T5ForSequenceClassification"),
        ("t5", "T5ForTokenClassification"),
        ("bart", "BartForSequenceClassification"),
        ("bart", "BartForQuestionAnswering"),
        ("bart", "BartForCausalLM"),
        ("marian", "MarianForCausalLM"),
    ],
)
def test_other_classes_are_refused_by_name(name: str, cls: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        spec_of({**tiny.config(name), "architectures": [cls]})
    assert caught.value.field == "/architectures"
    assert cls in str(caught.value)


def test_stored_waves(tmp_path: Path) -> None:
    """Marian's positions may lie in the file, in half precision too; anything else there is not left out in silence."""
    path = tiny.write(tiny.config("marian"), tmp_path) / "model.safetensors"
    tensors = load_file(path)
    angles = torch.arange(48)[:, None] * 10000 ** (-torch.arange(0, 32, 2) / 32)
    waves = torch.cat([angles.sin(), angles.cos()], 1)
    names = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]
    plain = open_folder(tmp_path).state_dict()
    for stored in (waves, waves.bfloat16()):
        save_file({**tensors, **{name: stored.clone() for name in names}}, path, {"format": "pt"})
        again = open_folder(tmp_path).state_dict()
        assert all(torch.equal(plain[key], again[key]) for key in plain)
    for bad in (waves.flip(0), waves[:, :8], waves[0], torch.full_like(waves, torch.nan)):
        save_file({**tensors, names[1]: bad.contiguous()}, path, {"format": "pt"})
        with pytest.raises(UnsupportedModelError, match="sines") as caught:
            open_folder(tmp_path)
        assert caught.value.field == names[1]


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    """Of the encoder, the cross-attention, the shift: nothing starts at random."""
    path = tiny.write(tiny.config(name), tmp_path) / "model.safetensors"
    tensors = load_file(path)
    wanted = ("final_logits_bias", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
    wanted += ("decoder.block.1.layer.1.EncDecAttention.k.weight", "model.decoder.layers.1.encoder_attn.v_proj.bias")
    for missing in (key for key in wanted if key in tensors):
        save_file({key: value for key, value in tensors.items() if key != missing}, path, {"format": "pt"})
        with pytest.raises(CutawayError) as caught:
            open_folder(tmp_path)
        assert caught.value.field == missing
