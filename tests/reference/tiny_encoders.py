"""Tiny encoders of every family with every head, and transformers' own answers (see tiny.py for the weights)."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.reference.tiny import FAR, NEAR, scale_randomly, spec_of

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
}
DISTIL = {
    "vocab_size": 64,
    "dim": 32,
    "n_layers": 3,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
}
ROPES = {
    FAR: {"rope_type": "default", "rope_theta": 5000.0},
    NEAR: {"rope_type": "default", "rope_theta": 300.0},
}
# model_type → how its classes' names begin, and what a config of it states at least.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**SIZES, "type_vocab_size": 3}),
    "roberta": ("Roberta", {**SIZES, "pad_token_id": 1, "max_position_embeddings": 50}),
    "distilbert": ("DistilBert", DISTIL),
    "modernbert": (
        "ModernBert",
        {**SIZES, "bos_token_id": 1, "eos_token_id": 2, "local_attention": 12, "rope_parameters": ROPES},
    ),
}


def labelled(*names: str, **options: Any) -> dict[str, Any]:
    """Labels both ways, with numbers as JSON has them."""
    numbered = {str(i): name for i, name in enumerate(names)}
    return {"id2label": numbered, "label2id": {name: i for i, name in enumerate(names)}, **options}


# A row's name after its family's → the class, and what its config says of the head.
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "": ("Model", {}),
    "-mlm": ("ForMaskedLM", {}),
    "-mlm-untied": ("ForMaskedLM", {"tie_word_embeddings": False}),
    "-labels": ("ForSequenceClassification", labelled("sad", "glad", "mad")),
    "-multi": (
        "ForSequenceClassification",
        labelled("a", "b", "c", "d", problem_type="multi_label_classification"),
    ),
    "-regression": ("ForSequenceClassification", labelled("stars")),
    "-tokens": ("ForTokenClassification", labelled("O", "B-PER", "I-PER", "B-LOC", "I-LOC")),
}


def _row(family: str, kind: str, **options: Any) -> dict[str, Any]:
    name, values = FAMILIES[family]
    return {"model_type": family, "architectures": [name + kind], **values, **options}


CASES: dict[str, dict[str, Any]] = {
    **{family + name: _row(family, kind, **said) for family in FAMILIES for name, (kind, said) in HEADS.items()},
    "bert-relu": _row("bert", "ForMaskedLM", hidden_act="relu", layer_norm_eps=1e-3, type_vocab_size=1),
    "bert-gelu-tanh": _row("bert", "Model", hidden_act="gelu_new", num_attention_heads=2),
    "roberta-far-pad": _row("roberta", "Model", pad_token_id=2, hidden_act="silu", layer_norm_eps=1e-3),
    "roberta-relu": _row("roberta", "ForMaskedLM", hidden_act="relu", type_vocab_size=1),
    "distilbert-relu": _row("distilbert", "ForMaskedLM", activation="relu", sinusoidal_pos_embds=True, n_heads=8),
    "modernbert-biases": _row(
        "modernbert", "ForMaskedLM", attention_bias=True, mlp_bias=True, norm_bias=True, classifier_bias=True,
        decoder_bias=False, hidden_activation="silu", classifier_activation="relu", norm_eps=1e-3,
    ),
    "modernbert-mean": _row(
        "modernbert", "ForSequenceClassification", **labelled("no", "yes"), classifier_pooling="mean",
        classifier_bias=True, norm_bias=True, classifier_activation="silu",
    ),
    "modernbert-odd-window": _row("modernbert", "Model", local_attention=7, layer_types=[NEAR, FAR, NEAR]),
    "modernbert-global": _row("modernbert", "Model", layer_types=[FAR] * 3, num_attention_heads=2),
    "modernbert-yarn": _row(
        "modernbert", "Model", layer_types=[NEAR, NEAR, FAR], rope_parameters={
            FAR: {"rope_type": "yarn", "rope_theta": 900.0, "factor": 4.0, "original_max_position_embeddings": 16},
            NEAR: {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
        },
    ),
}  # fmt: skip
ONE_EACH = tuple(f"{family}-mlm" for family in FAMILIES)


def config(name: str) -> dict[str, Any]:
    """A case's config, to be changed at will."""
    return copy.deepcopy(CASES[name])


def write(values: dict[str, Any], folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """Let transformers make the model that ``architectures`` names and write its folder."""
    import transformers

    said = {key: value for key, value in copy.deepcopy(values).items() if key not in ("model_type", "architectures")}
    made = transformers.AutoConfig.for_model(values["model_type"], **said)
    model = getattr(transformers, values["architectures"][0])(made, **options)
    scale_randomly(model, norm_mean=1.0, seed=seed)
    model.save_pretrained(folder)
    return folder


@functools.cache
def reference(folder: Path) -> Any:
    """The folder as transformers loads it: its own class, fp32, plain attention."""
    import transformers

    named = json.loads((folder / "config.json").read_text())["architectures"][0]
    kind = getattr(transformers, named)
    return kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def answers(model: Any, ids: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    """transformers' hidden states, and what its head makes of them (of a bare model without a pooler, the same)."""
    body = getattr(model, model.base_model_prefix, model)
    hidden = body(input_ids=ids, **inputs)
    if body is not model:
        return hidden.last_hidden_state, model(input_ids=ids, **inputs).logits
    pooled = getattr(hidden, "pooler_output", None)
    return hidden.last_hidden_state, hidden.last_hidden_state if pooled is None else pooled


def lone(folder: Path, ids: Tensor, types: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same of whole texts without padding, from a loaded folder, without gradients."""
    with torch.no_grad():
        return answers(reference(folder), ids, **({} if types is None else {"token_type_ids": types}))


def types_for(name: str, ids: Tensor) -> Tensor | None:
    """Random token types, where the family has them."""
    count = spec_of(config(name)).embedding.types
    return torch.randint(0, count, ids.shape, generator=torch.Generator().manual_seed(7)) if count else None
