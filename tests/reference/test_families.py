"""Every family against transformers, a row for each option of its config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cutaway.checkpoints.save import save_folder
from cutaway.errors import ConfigError
from cutaway.families import family_of, known_families
from cutaway.formats.config import ConfigReader
from cutaway.modules.rotary import yarn_magnitude
from cutaway.spec import YarnScaling
from tests.reference import oracle, tiny
from tests.reference.conftest import open_folder

pytestmark = pytest.mark.usefixtures("capped_oracle")
Folders = Callable[[str], Path]
Note = Callable[[str, str, float], float]


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference."""
    assert a.shape == b.shape
    return float((a - b).abs().max())


def test_every_family_has_a_row() -> None:
    assert {tiny.CASES[name]["model_type"] for name in tiny.FAMILIES} == set(known_families())


@pytest.mark.parametrize("name", tiny.CASES)
@torch.no_grad()
def test_logits(name: str, folder_of: Folders, measured: Note) -> None:
    ids = tiny.ids(2, 40)
    model, theirs = open_folder(folder_of(name)), oracle.logits(folder_of(name), ids)
    assert theirs.std() > 0.3
    assert measured(name, "logits", apart(model(ids), theirs)) <= 1e-4
    model.attention = "explicit"
    assert measured(name, "explicit", apart(model(ids), theirs)) <= 1e-4


@pytest.mark.parametrize("name", tiny.CASES)
@torch.no_grad()
def test_padded_batches(name: str, folder_of: Folders, measured: Note) -> None:
    """Pads left, right or in the middle change nothing, whatever ids stand there."""
    lengths, width = (40, 7, 23, 1), 40
    rows = [tiny.ids(1, n, seed=n) for n in lengths]
    alone = [oracle.logits(folder_of(name), row) for row in rows]
    model = open_folder(folder_of(name))
    for side in ("left", "right", "between"):
        ids, positions = tiny.ids(4, width, seed=9), torch.full((4, width), -1)
        places = []
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            start = 0 if side == "right" else width - n
            where = torch.arange(start, start + n)
            if side == "between":  # spread over the row
                where = torch.linspace(0, width - 1, n).long() if n > 1 else torch.tensor([width // 2])
            ids[i, where], positions[i, where] = row[0], torch.arange(n)
            places.append(where)
        for explicit in (False, True):
            model.attention = "explicit" if explicit else "fused"
            logits = model(ids, positions=positions)
            assert logits.isfinite().all()
            for i, where in enumerate(places):
                assert measured(name, "padded", apart(logits[i, where][None], alone[i])) <= 1e-4


@pytest.mark.parametrize("name", tiny.CASES)
def test_read_and_write_are_inverse(name: str) -> None:
    spec = tiny.spec_of(tiny.config(name))
    family = family_of(spec.family)
    assert family.read(ConfigReader(family.config(spec))) == spec


@pytest.mark.parametrize("name", tiny.CASES)
@torch.no_grad()
def test_saved_and_loaded(name: str, folder_of: Folders, tmp_path: Path, measured: Note) -> None:
    """What comes back is the same bits, for us and for transformers."""
    model = open_folder(folder_of(name))
    save_folder(model, tmp_path / "copy")
    again = open_folder(tmp_path / "copy")
    assert again.spec == model.spec
    own, back = model.state_dict(), again.state_dict()
    assert own.keys() == back.keys()
    assert all(torch.equal(own[key], back[key]) for key in own)
    first, second = (load_file(folder / "model.safetensors") for folder in (folder_of(name), tmp_path / "copy"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    ids = tiny.ids(1, 30)
    assert torch.equal(model(ids), again(ids))
    assert measured(name, "saved", apart(oracle.logits(tmp_path / "copy", ids), model(ids))) <= 1e-4


@torch.no_grad()
def test_shards(folder_of: Folders, tmp_path: Path) -> None:
    tiny.write(tiny.config("qwen3"), tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    ids = tiny.ids(1, 20)
    assert torch.equal(open_folder(tmp_path / "shards")(ids), open_folder(folder_of("qwen3"))(ids))


# ---- configs ----------------------------------------------------------------------------------------------

# Every field of each family's config, away from its default.
ODD = {
    "llama": {
        **tiny.config("llama-yarn-betas"),
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 777.0,
            "factor": 4.5,
            "original_max_position_embeddings": 16,
            "attention_factor": 1.25,
            "beta_fast": 3.0,
            "beta_slow": 0.25,
            "mscale": 1.1,
            "mscale_all_dim": 0.9,
            "truncate": False,
        },
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "attention_dropout": 0.1,
        "tie_word_embeddings": True,
    },
    "mistral": {
        **tiny.config("mistral-window"),
        "head_dim": 16,
        "hidden_act": "relu",
        "attention_dropout": 0.1,
        "tie_word_embeddings": True,
    },
    "qwen2": {
        **tiny.config("qwen2-layer-types"),
        "max_window_layers": 2,
        "hidden_act": "gelu",
        "attention_dropout": 0.1,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        **tiny.config("qwen3-biases"),
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": [tiny.NEAR, tiny.FAR, tiny.NEAR],
        "max_window_layers": 2,
        "hidden_act": "gelu",
        "attention_dropout": 0.1,
    },
    "gemma3_text": {
        **tiny.config("gemma3-rope"),
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
        "hidden_activation": "silu",
        "attention_dropout": 0.1,
        "tie_word_embeddings": False,
        "pad_token_id": 5,
        "eos_token_id": [7, 3],
        "bos_token_id": 9,
    },
    "granite": {
        **tiny.config("granite-biases"),
        "hidden_act": "gelu",
        "attention_dropout": 0.1,
    },
    "stablelm": {
        **tiny.config("stablelm"),
        "hidden_act": "gelu",
        "attention_dropout": 0.1,
        "hidden_dropout": 0.2,
        "use_qkv_bias": True,
        "use_parallel_residual": True,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        **tiny.config("gpt2-inverse-layer"),
        "n_inner": 48,
        "resid_pdrop": 0.2,
        "embd_pdrop": 0.3,
        "attn_pdrop": 0.4,
        "layer_norm_epsilon": 1e-3,
        "scale_attn_weights": False,
        "reorder_and_upcast_attn": True,
        "tie_word_embeddings": False,
        "summary_type": "last",
        "summary_use_proj": False,
        "summary_activation": "tanh",
        "summary_proj_to_labels": False,
        "summary_first_dropout": 0.3,
        "pad_token_id": 5,
    },
}
EVERYWHERE = {
    "initializer_range": 0.5,
    "use_cache": False,
    "rms_norm_eps": 1e-3,
    "pad_token_id": 5,
    "eos_token_id": [7, 3],
    "bos_token_id": 9,
}
# Fields that are about something else than this model's numbers, or have one value here.
ELSEWHERE = {
    "model_type", "architectures", "transformers_version", "dtype", "return_dict", "output_hidden_states",
    "id2label", "label2id", "is_encoder_decoder", "problem_type", "chunk_size_feed_forward", "_name_or_path",
    "pretraining_tp", "add_cross_attention", "use_bidirectional_attention", "output_attentions",
    "_sliding_window_pattern", "qk_layernorm",
}  # fmt: skip


def odd_config(family: str) -> dict[str, Any]:
    from transformers import AutoConfig

    known = AutoConfig.for_model(family).to_dict()
    return {**ODD[family], **{key: value for key, value in EVERYWHERE.items() if key in known}}


@pytest.mark.parametrize("family", known_families())
@torch.no_grad()
def test_every_field_comes_back(family: str, tmp_path: Path, measured: Note) -> None:
    """Case C13: no field is lost or changed on its way through."""
    from transformers import AutoConfig

    values = odd_config(family)
    folder = tiny.write(values, tmp_path / "odd")
    plain = AutoConfig.for_model(family).to_dict()
    theirs = json.loads((folder / "config.json").read_text())
    same = {key for key in plain if key not in ELSEWHERE and theirs.get(key) == plain[key]}
    assert not same, "fields left at their default"

    model = open_folder(folder)
    save_folder(model, tmp_path / "copy")
    ours = json.loads((tmp_path / "copy" / "config.json").read_text())
    for one in (theirs, ours):
        one.pop("transformers_version", None)
        one["dtype"] = one.get("dtype") or one.pop("torch_dtype")
    # Stated by us although that family's config has no such field; transformers computes the same.
    extra = {key for key in ours if key not in theirs}
    assert extra <= {"head_dim"}
    assert {key: ours.get(key, "lost") for key in theirs} == theirs
    first, second = (AutoConfig.from_pretrained(place).to_dict() for place in (folder, tmp_path / "copy"))
    assert {**second, "_name_or_path": ""} == {**first, "_name_or_path": "", **{key: ours[key] for key in extra}}

    again, ids = open_folder(tmp_path / "copy"), tiny.ids(1, 30)
    assert again.spec == model.spec
    assert torch.equal(again(ids), model(ids))
    assert (
        measured(f"{family} (every field)", "saved", apart(oracle.logits(tmp_path / "copy", ids), model(ids))) <= 1e-4
    )


def _old_spelling(values: dict[str, Any], word: str) -> dict[str, Any]:
    """The config as it was written before ``rope_parameters``."""
    old = {key: value for key, value in values.items() if key != "rope_parameters"}
    rope = dict(values.get("rope_parameters", {}))
    if tiny.FAR in rope:
        old["rope_local_base_freq"] = rope[tiny.NEAR]["rope_theta"]
        rope = dict(rope[tiny.FAR])
    if rope:
        old["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        old["rope_scaling"] = None if kind == "default" else {word: kind, **rope}
    old["torch_dtype"] = "float32"
    return old


@pytest.mark.parametrize("word", ["rope_type", "type"])
@pytest.mark.parametrize("name", [name for name, values in tiny.CASES.items() if "rope_parameters" in values])
def test_both_spellings_say_the_same(name: str, word: str) -> None:
    new = tiny.spec_of({**tiny.config(name), "dtype": "float32"})
    old = tiny.spec_of(_old_spelling(tiny.config(name), word))
    assert dict(new.kept)["dtype"] == dict(old.kept)["torch_dtype"]
    without = [{key: value for key, value in spec.kept if key not in ("dtype", "torch_dtype")} for spec in (new, old)]
    assert without[0] == without[1]
    assert all(getattr(new, part) == getattr(old, part) for part in ("embedding", "decoder", "head", "max_positions"))


@pytest.mark.parametrize("name", ["llama-yarn-betas", "llama3-factor-8", "gemma3-rope"])
@torch.no_grad()
def test_transformers_reads_the_old_spelling_as_we_do(name: str, folder_of: Folders, tmp_path: Path) -> None:
    folder = tiny.write(tiny.config(name), tmp_path / "old")
    path = folder / "config.json"
    path.write_text(json.dumps(_old_spelling(json.loads(path.read_text()), "rope_type")))
    ids = tiny.ids(1, 30)
    ours = open_folder(folder)(ids)
    assert torch.equal(ours, open_folder(folder_of(name))(ids))
    assert apart(ours, oracle.logits(folder, ids)) <= 1e-4


# ---- single reports ---------------------------------------------------------------------------------------


def test_partial_rotation_in_both_places() -> None:
    """StableLM: flat or in the section, a quarter where neither says; two that differ are refused."""

    def turned(**options: Any) -> int:
        rotary = tiny.spec_of(tiny._stablelm(**options)).decoder.layers[0].attention.rotary
        assert rotary is not None
        return rotary.d_rotary

    nested = tiny._rope("default", partial_rotary_factor=0.75)
    flat = {"rope_parameters": None, "rope_theta": 5000.0, "partial_rotary_factor": 0.75}
    assert [turned(), turned(**nested), turned(**flat)] == [2, 6, 6]
    assert turned(**nested, partial_rotary_factor=0.75) == 6
    for options in ({**nested, "partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.4}):
        with pytest.raises(ConfigError, match="partial_rotary_factor"):
            turned(**options)


def test_a_norm_for_every_head_is_refused() -> None:
    """StableLM 2 12B: no spec says it yet."""
    with pytest.raises(ConfigError, match="/qk_layernorm: this value is not supported"):
        tiny.spec_of(tiny._stablelm(qk_layernorm=True))


@torch.no_grad()
def test_stated_attention_factor_is_used(folder_of: Folders) -> None:
    """Case L01: a YaRN config may state its own magnitude."""
    ids = tiny.ids(1, 24)
    stated, formula = (open_folder(folder_of(name))(ids) for name in ("llama-yarn-attention-factor", "llama-yarn"))
    assert apart(stated, formula) > 0.5
    scaling = YarnScaling(factor=64.0, original_max_positions=4096)
    assert yarn_magnitude(scaling) == pytest.approx(1.415888, abs=1e-6)
    assert yarn_magnitude(YarnScaling(64.0, 4096, attention_factor=1.0)) == 1.0


def test_mscale() -> None:
    """Case L02: the two weights of YaRN's magnitude; an unknown rope key is refused."""
    assert yarn_magnitude(YarnScaling(16.0, 16, mscale=1.0, mscale_all_dim=1.0)) == 1.0
    assert yarn_magnitude(YarnScaling(16.0, 16)) == pytest.approx(1.2772589, abs=1e-7)
    values = tiny.config("llama-yarn")
    values["rope_parameters"]["mscale_all_dims"] = 1.0
    with pytest.raises(ConfigError, match="rope_parameters/mscale_all_dims: unknown setting"):
        tiny.spec_of(values)


@torch.no_grad()
def test_llama3_factor_is_read(folder_of: Folders) -> None:
    """Case L03: factor 8 and factor 32 are different models."""
    ids = tiny.ids(1, 24)
    assert apart(*(open_folder(folder_of(f"llama3-factor-{factor}"))(ids) for factor in (8, 32))) > 0.5


@pytest.mark.parametrize("name", tiny.FAMILIES)
@torch.no_grad()
def test_epsilon_is_read(name: str, tmp_path: Path, measured: Note) -> None:
    """Case L14: with a small stream, epsilon shows."""
    values = tiny.config(name)
    key = {"gpt2": "layer_norm_epsilon", "stablelm": "layer_norm_eps"}.get(values["model_type"], "rms_norm_eps")
    values[key] = 1e-6
    folder = tiny.write(values, tmp_path / "small")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.get_input_embeddings().weight.mul_(1e-3)
    if name == "gpt2":
        model.transformer.wpe.weight.mul_(1e-3)
    model.save_pretrained(folder)
    ids = tiny.ids(1, 24)
    theirs = oracle.logits(folder, ids)
    ours = open_folder(folder)(ids)
    size = float(theirs.abs().max())
    assert measured(name, "small (rel.)", apart(ours, theirs) / size) <= 1e-5

    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: 1e-5}))
    assert apart(open_folder(folder)(ids), theirs) / size > 1e-4


def test_stated_head_width_is_used(folder_of: Folders, tmp_path: Path) -> None:
    """Case L15: hidden 56, 3 heads, head_dim 32."""
    tensors = load_file(folder_of("qwen3") / "model.safetensors")
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (96, 56)
    assert tensors["model.layers.0.self_attn.o_proj.weight"].shape == (56, 96)
    model = open_folder(folder_of("qwen3"))
    save_folder(model, tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["head_dim"] == 32
    # transformers refuses this shape for Llama; nothing here depends on it.
    values = {
        **tiny.config("llama"),
        "hidden_size": 56,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    with torch.no_grad():
        assert tiny.transformer(values)(tiny.ids(1, 9)).isfinite().all()


@torch.no_grad()
def test_soft_caps_bound_the_logits(folder_of: Folders) -> None:
    """Case L09, for Gemma 3: the final cap holds always, the inner one shows."""
    ids = tiny.ids(2, 40)
    capped, plain = (open_folder(folder_of(name))(ids) for name in ("gemma3-caps", "gemma3"))
    assert capped.abs().max() <= 2.0
    assert plain.abs().max() > 2.0


@pytest.mark.parametrize("name", tiny.FAMILIES)
@torch.no_grad()
def test_packed_documents_do_not_meet(name: str, folder_of: Folders, measured: Note) -> None:
    """Case M04: documents in one row, told apart by segments, read as if alone."""
    lengths = (7, 5, 13)
    documents = [tiny.ids(1, n, seed=n) for n in lengths]
    alone = [oracle.logits(folder_of(name), document) for document in documents]
    model = open_folder(folder_of(name))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    segments = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    for explicit in (False, True):
        model.attention = "explicit" if explicit else "fused"
        packed = model(torch.cat(documents, 1), positions, segments)
        for part, document in zip(packed.split(lengths, 1), alone, strict=True):
            assert measured(name, "packed", apart(part, document)) <= 1e-4
        other = model(torch.cat([tiny.ids(1, 7, seed=99), *documents[1:]], 1), positions, segments)
        assert torch.equal(other[:, 7:], packed[:, 7:])
