"""Encoders' configs and files as they lie on the hub: what is read from them, what comes back, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.reference import tiny
from tests.reference import tiny_encoders as encoders
from tests.reference.conftest import open_folder

import cutaway
from cutaway.checkpoints.save import save_folder
from cutaway.errors import ConfigError, ShapeMismatch, UnsupportedModelError
from cutaway.families import family_of
from cutaway.formats.config import ConfigReader
from cutaway.models import Transformer
from cutaway.spec import ClassifierSpec, HeadSpec, ModelSpec, PoolerSpec, TransformSpec
from cutaway.spec.check import check

# The numbers are the models' own, as their publishers state them.
BERT = {
    "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
    "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
    "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
}  # fmt: skip
MULTILINGUAL = {
    **{key: value for key, value in BERT.items() if key not in ("gradient_checkpointing", "position_embedding_type")},
    "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128, "pooler_type": "first_token_transform", "vocab_size": 119547,
}  # fmt: skip
MINILM = {
    "_name_or_path": "nreimers/MiniLM-L6-H384-uncased", "architectures": ["BertModel"], "hidden_act": "gelu",
    "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False, "hidden_dropout_prob": 0.1,
    "hidden_size": 384, "initializer_range": 0.02, "intermediate_size": 1536, "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512, "model_type": "bert", "num_attention_heads": 12, "num_hidden_layers": 6,
    "pad_token_id": 0, "position_embedding_type": "absolute", "transformers_version": "4.8.2", "type_vocab_size": 2,
    "use_cache": True, "vocab_size": 30522,
}  # fmt: skip
ROBERTA = {
    "architectures": ["RobertaForMaskedLM"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0,
    "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05, "max_position_embeddings": 514,
    "model_type": "roberta", "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
    "type_vocab_size": 1, "vocab_size": 50265,
}  # fmt: skip
DISTILBERT = {
    "activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1, "dim": 768,
    "dropout": 0.1, "hidden_dim": 3072, "initializer_range": 0.02, "max_position_embeddings": 512,
    "model_type": "distilbert", "n_heads": 12, "n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True,
    "transformers_version": "4.10.0.dev0", "vocab_size": 30522,
}  # fmt: skip
SST2 = {
    **DISTILBERT, "architectures": ["DistilBertForSequenceClassification"], "finetuning_task": "sst-2",
    "id2label": {"0": "NEGATIVE", "1": "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}, "output_past": True,
}  # fmt: skip
MODERNBERT = {
    "architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
    "classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": True, "deterministic_flash_attn": False,
    "embedding_dropout": 0.0, "eos_token_id": 50282, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
    "gradient_checkpointing": False, "hidden_activation": "gelu", "hidden_size": 768,
    "initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "intermediate_size": 1152, "layer_norm_eps": 1e-05,
    "local_attention": 128, "local_rope_theta": 10000.0, "max_position_embeddings": 8192, "mlp_bias": False,
    "mlp_dropout": 0.0, "model_type": "modernbert", "norm_bias": False, "norm_eps": 1e-05,
    "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283, "position_embedding_type": "absolute",
    "reference_compile": None, "repad_logits_with_grad": False, "sep_token_id": 50282,
    "sparse_pred_ignore_index": -100, "sparse_prediction": False, "tie_word_embeddings": True, "vocab_size": 50368,
}  # fmt: skip
REAL = {
    "bert-base-uncased": (BERT, 109_514_298),
    "bert-base-multilingual": (MULTILINGUAL, 177_974_523),
    "minilm": (MINILM, 22_713_216),
    "roberta-base": (ROBERTA, 124_697_433),
    "distilbert-base": (DISTILBERT, 66_985_530),
    "distilbert-sst2": (SST2, 66_955_010),
    "modernbert-base": (MODERNBERT, 149_655_232),
}


def read(values: dict[str, Any]) -> ModelSpec:
    return family_of(values["model_type"]).read(ConfigReader(values))


@pytest.mark.parametrize("name", REAL)
def test_there_and_back(name: str) -> None:
    """Nothing is refused, what is written says the same as what was read, and parameters are as many as published."""
    values, count = REAL[name]
    spec = read(values)
    family = family_of(spec.family)
    check(spec)
    written = family.config(spec)
    assert family.read(ConfigReader(written)) == spec
    spelled = ("global_rope_theta", "local_rope_theta")
    assert {key: written.get(key) for key in values if key not in spelled} == {
        key: value for key, value in values.items() if key not in spelled
    }
    with torch.device("meta"):
        model = Transformer(spec)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_what_is_read() -> None:
    roberta, modern = read(ROBERTA), read(MODERNBERT)
    assert (roberta.max_positions, roberta.position_limit, roberta.embedding.types) == (512, 512, 1)
    layers = [layer.attention for layer in modern.encoder.layers]
    assert [layer.mask.window for layer in layers] == [65 if i % 3 else None for i in range(22)]
    assert [layer.rotary.base for layer in layers if layer.rotary] == [
        10_000.0 if i % 3 else 160_000.0 for i in range(22)
    ]
    assert [layer.branches[0].pre_norm is None for layer in modern.encoder.layers] == [True] + [False] * 21
    null = read({**MODERNBERT, "local_rope_theta": None}).encoder.layers[1].attention.rotary
    assert null is not None
    assert null.base == 160_000.0  # as the code said that came with it
    assert read(MINILM).head == PoolerSpec("first", TransformSpec("tanh"))
    assert read({key: value for key, value in BERT.items() if key != "architectures"}).head == read(MINILM).head
    assert isinstance(read({**BERT, "architectures": ["BertForPreTraining"]}).head, HeadSpec)
    head = read(SST2).head
    assert isinstance(head, ClassifierSpec)
    assert (head.labels, head.kind, head.dropout) == (("NEGATIVE", "POSITIVE"), "single", 0.2)


ROW = "ForSequenceClassification"


@pytest.mark.parametrize(
    ("said", "labels", "kind"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "single"),
        ({"num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2"), "single"),
        ({"id2label": {"0": "score"}}, ("score",), "regression"),
        ({"id2label": {"1": "b", "0": "a"}, "problem_type": None}, ("a", "b"), "single"),
        ({"id2label": {"0": "a", "1": "b"}, "problem_type": "regression"}, ("a", "b"), "regression"),
        ({"id2label": {"0": "a"}, "problem_type": "single_label_classification"}, ("a",), "single"),
        ({"id2label": {"0": "a", "1": "a"}, "label2id": {"a": 0}}, ("a", "a"), "single"),
        ({"id2label": {"0": "a", "1": "b"}, "problem_type": "single_label_classification"}, ("a", "b"), "single"),
    ],
)
def test_labels(said: dict[str, Any], labels: tuple[str, ...], kind: str) -> None:
    values = {**BERT, "architectures": [f"Bert{ROW}"], **said}
    spec = read(values)
    assert isinstance(spec.head, ClassifierSpec)
    assert (spec.head.labels, spec.head.kind) == (labels, kind)
    written = family_of("bert").config(spec)
    assert read(written) == spec
    assert {key: written[key] for key in said if key != "num_labels"} == {
        k: v for k, v in said.items() if k != "num_labels"
    }


@pytest.mark.parametrize(
    ("values", "said", "where"),
    [
        (BERT, {"architectures": [f"Bert{ROW}"], "id2label": {"0": "a", "2": "b"}}, "/id2label"),
        (BERT, {"architectures": [f"Bert{ROW}"], "id2label": ["a"]}, "/id2label"),
        (BERT, {"architectures": [f"Bert{ROW}"], "id2label": {"0": "a"}, "num_labels": 2}, "/num_labels"),
        (BERT, {"architectures": [f"Bert{ROW}"], "problem_type": "ranking"}, "/problem_type"),
        (BERT, {"position_embedding_type": "relative_key"}, "/position_embedding_type"),
        (BERT, {"is_decoder": True}, "/is_decoder"),
        (BERT, {"add_cross_attention": True}, "/add_cross_attention"),
        (BERT, {"head_dim": 32}, "/head_dim"),
        (BERT, {"num_key_value_heads": 4}, "/num_key_value_heads"),
        (BERT, {"hiden_act": "gelu"}, "/hiden_act"),
        (ROBERTA, {"max_position_embeddings": 2}, "/max_position_embeddings"),
        (DISTILBERT, {"n_heads": 7}, "/n_heads"),
        (MODERNBERT, {"classifier_pooling": "max"}, "/classifier_pooling"),
        (MODERNBERT, {"layer_norm_eps": 1e-3}, "/layer_norm_eps"),
        (MODERNBERT, {"layer_types": ["full_attention"]}, "/layer_types"),
        (MODERNBERT, {"rope_parameters": {"sliding_attention": {"rope_theta": 5.0}}}, "/local_rope_theta"),
        (MODERNBERT, {"rope_parameters": {"rope_theta": 5.0}}, "/rope_parameters/rope_theta"),
    ],
)  # fmt: skip
def test_refused_by_name(values: dict[str, Any], said: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read({**values, **said})
    assert caught.value.field == where


@pytest.mark.parametrize("name", ["bert-base-uncased", "roberta-base", "distilbert-base", "modernbert-base"])
def test_other_heads_are_refused_by_name(name: str) -> None:
    values = REAL[name][0]
    own = values["architectures"][0].removesuffix("ForMaskedLM")
    for end in ("ForQuestionAnswering", "ForMultipleChoice", "ForCausalLM", "LMHeadModel"):
        with pytest.raises(UnsupportedModelError, match=f"{own}ForMaskedLM.*{own}{end}"):
            read({**values, "architectures": [own + end]})
    with pytest.raises(UnsupportedModelError):
        read({**values, "architectures": ["ElectraForMaskedLM"]})


def test_a_classifier_has_one_transform() -> None:
    head = read({**MODERNBERT, "architectures": [f"ModernBert{ROW}"]}).head
    assert isinstance(head, ClassifierSpec)
    assert head.pooler is not None
    with pytest.raises(ConfigError, match="/head/transform"):
        check(replace(read(MODERNBERT), head=replace(head, transform=head.pooler.transform)))


# ---- files ------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_norms_under_their_first_names(tmp_path: Path) -> None:
    """Checkpoints of 2018 call a norm's weight gamma and its shift beta, as transformers still reads."""
    folder = encoders.write(encoders.config("bert-mlm"), tmp_path / "old")
    ids, file = tiny.ids(1, 20), folder / "model.safetensors"
    wanted, tensors = open_folder(folder)(ids), load_file(file)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert len(old.keys() - tensors.keys()) == 16
    old["cls.seq_relationship.weight"], old["cls.seq_relationship.bias"] = torch.zeros(2, 32), torch.zeros(2)
    old["bert.embeddings.position_ids"] = torch.arange(48)[None]
    save_file(old, file, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"left behind.*cls\.seq_relationship"):
        assert torch.equal(open_folder(folder)(ids), wanted)
    assert (encoders.lone(folder, ids)[1] - wanted).abs().max() <= 1e-4

    save_file({**old, "bert.embeddings.LayerNorm.weight": torch.ones(32)}, file)
    with pytest.raises(ShapeMismatch, match=r"1 tensor unexpected: bert\.embeddings\.LayerNorm\.gamma"):
        open_folder(folder)


@pytest.mark.parametrize("name", ["bert", "roberta"])
@torch.no_grad()
def test_saved_without_a_pooler(name: str, tmp_path: Path) -> None:
    """``add_pooling_layer=False`` is not in the config: the tensors say it."""
    folder = encoders.write(encoders.config(name), tmp_path / "bare", add_pooling_layer=False)
    ids = tiny.ids(1, 20)
    model = open_folder(folder)
    assert model.spec.head is None
    hidden = encoders.lone(folder, ids)[0]
    assert (model(ids) - hidden).abs().max() <= 1e-4
    save_folder(model, tmp_path / "copy")
    again = open_folder(tmp_path / "copy")
    assert again.spec == model.spec
    assert torch.equal(again(ids), model(ids))
    assert torch.equal(encoders.lone(tmp_path / "copy", ids)[0], hidden)
    assert load_file(folder / "model.safetensors").keys() == load_file(tmp_path / "copy/model.safetensors").keys()

    # Half a pooler is a broken file.
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "pooler.dense.weight": torch.ones(32, 32)}, folder / "model.safetensors")
    with pytest.raises(ShapeMismatch, match=r"1 tensor missing: pooler\.dense\.bias"):
        open_folder(folder)


def test_what_a_family_cannot_say_is_refused(tmp_path: Path) -> None:
    """Another norm, one that is missing, another head: by pointer; our own format holds it."""
    distil = cutaway.load(str(encoders.write(encoders.config("distilbert-labels"), tmp_path / "distil")))
    spec = distil.spec
    assert isinstance(spec.head, ClassifierSpec)
    assert spec.embedding.norm is not None
    for changed, where in (
        (replace(spec, embedding=replace(spec.embedding, norm=replace(spec.embedding.norm, eps=1e-3))), "/embedding"),
        (replace(spec, head=replace(spec.head, pooler=PoolerSpec("mean", TransformSpec("relu")))), "/head/pooler"),
        (replace(spec, head=PoolerSpec("mean")), "/head"),
        (replace(spec, embedding=replace(spec.embedding, types=2)), "/embedding/types"),
    ):
        model = Transformer(changed)
        tiny.scale_randomly(model, norm_mean=1.0)
        with pytest.raises(ConfigError) as caught:
            save_folder(model, tmp_path / "no")
        assert (caught.value.field or "").startswith(where), caught.value
        save_folder(model, tmp_path / "own", own=True)
        assert open_folder(tmp_path / "own").spec.head == changed.head


def test_an_untied_head_has_the_shift_that_is_used(tmp_path: Path) -> None:
    """transformers keeps two when they are not tied, and adds ``decoder.bias``."""
    folder = encoders.write(encoders.config("roberta-mlm-untied"), tmp_path / "untied")
    tensors = load_file(folder / "model.safetensors")
    assert not torch.equal(tensors["lm_head.bias"], tensors["lm_head.decoder.bias"])
    model = open_folder(folder)
    assert torch.equal(model.state_dict()["head.bias"], tensors["lm_head.decoder.bias"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(ShapeMismatch, match="differs from") as caught:
        open_folder(folder)
    assert caught.value.field == "lm_head.decoder.weight"


@pytest.mark.parametrize("family", encoders.FAMILIES)
@torch.no_grad()
def test_another_head_is_put_on(family: str, tmp_path: Path) -> None:
    """What the config of a masked LM said of labels gives way to the spec's: the start of most fine-tuning."""
    said = encoders.labelled("a", "b") | {"problem_type": "single_label_classification", "classifier_dropout": 0.3}
    if family == "distilbert":
        said["seq_classif_dropout"] = said.pop("classifier_dropout")
    folder = encoders.write({**encoders.config(f"{family}-mlm"), **said, "tie_word_embeddings": False}, tmp_path / "lm")
    spec = open_folder(folder).spec
    head = tiny.spec_of(encoders.config(f"{family}-multi")).head
    assert isinstance(head, ClassifierSpec)
    assert head.pooler is not None
    if family == "modernbert":
        head = replace(head, pooler=replace(head.pooler, pool="mean"))
    model = Transformer(replace(spec, head=head)).eval()
    tiny.scale_randomly(model, norm_mean=1.0)
    save_folder(model, tmp_path / "copy")
    again, ids = open_folder(tmp_path / "copy"), tiny.ids(2, 20)
    assert again.spec.head == head
    assert torch.equal(again(ids), model(ids))
    reference = encoders.reference(tmp_path / "copy")
    assert reference.config.id2label == dict(enumerate(head.labels))
    assert reference.config.problem_type == "multi_label_classification"
    assert (encoders.lone(tmp_path / "copy", ids)[1] - model(ids)).abs().max() <= 1e-4
