"""Hostile and broken model folders: each gets its stated outcome, quickly, and never another exception.

The rows are those of the house's table H: robustness.md, 3.2.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.reference import tiny

from cutaway.checkpoints.load import Checkpoint, load_checkpoint
from cutaway.checkpoints.resolve import Resolved, resolve
from cutaway.checkpoints.save import save_folder
from cutaway.errors import (
    ConfigError,
    CutawayError,
    DtypeError,
    FormatError,
    LimitExceeded,
    ShapeMismatch,
    ShardError,
    UnsafeFormatError,
    UnsupportedModelError,
)
from cutaway.families import known_families
from cutaway.formats.shards import save_sharded

WEIGHTS = "model.safetensors"


def load(folder: Path) -> Checkpoint:
    return load_checkpoint(resolve(folder))


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, bytes]]:
    """A case as the files of its folder."""
    made: dict[str, dict[str, bytes]] = {}

    def files(name: str) -> dict[str, bytes]:
        if name not in made:
            folder = tmp_path_factory.mktemp("sound")
            save_folder(tiny.transformer(name), folder)
            made[name] = {path.name: path.read_bytes() for path in folder.iterdir()}
        return made[name]

    return files


@pytest.fixture
def folder(tmp_path: Path, sound: Callable[[str], dict[str, bytes]]) -> Path:
    """A sound tiny Llama, to be broken."""
    return put(tmp_path / "m", sound("llama"))


def put(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def change(folder: Path, name: str = "config.json", **changes: Any) -> None:
    """Set fields of a JSON file; ... takes one out."""
    path = folder / name
    values = json.loads(path.read_text()) if path.exists() else {}
    for key, value in changes.items():
        if value is ...:
            values.pop(key, None)
        else:
            values[key] = value
    path.write_text(json.dumps(values))


def retensor(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def refused(
    folder: Path, kind: type[CutawayError], field: str | None = None, file: str = "config.json"
) -> CutawayError:
    """The error, which names the file and the field in one line."""
    with pytest.raises(CutawayError) as caught:
        load(folder)
    error = caught.value
    assert type(error) is kind, repr(error)
    assert error.path == str(folder / file)
    if field is not None:
        assert error.field == field
    assert "\n" not in str(error)
    assert str(error).startswith(str(folder / file))
    return error


def test_the_sound_one_loads(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(folder).transformer.spec == tiny.spec_of(json.loads((folder / "config.json").read_text()))


# ---- H1–H4: the file as such ------------------------------------------------------------------------------


def test_h1_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(folder, ConfigError)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xef\xbb\xbf{}",
        b'{"model_type": "llama",}',
        b"[1, 2]",
        b"null",
        b'{"a": "\xff"}',
        b"{",
        b"[" * 100_000,
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 10_000 + b"}",
    ],
    ids=lambda data: repr(data[:24]),
)
def test_h1_not_a_config(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    refused(folder, ConfigError)


def test_h1_too_large(folder: Path) -> None:
    os.truncate(folder / "config.json", 200 << 20)  # a hole: nothing is written, and nothing is read
    refused(folder, LimitExceeded)


def test_h1_not_a_file(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(CutawayError):
        load(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(CutawayError):
        load(folder)


def test_h2_a_key_twice(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"vocab_size": 64', '"vocab_size": 64, "vocab_size": 65'))
    refused(folder, ConfigError, "/vocab_size")


@pytest.mark.parametrize("value", ["mamba", "", 5, None, ["llama"], ...])
def test_h3_unknown_family(folder: Path, value: Any) -> None:
    change(folder, model_type=value)
    error = refused(folder, UnsupportedModelError, "/model_type")
    assert all(name in str(error) for name in known_families())


def test_h4_code_is_never_run(folder: Path, tmp_path: Path) -> None:
    for name in ("modeling_x.py", "conftest.py", "torch.py", "sitecustomize.py", "configuration_x.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    change(folder, auto_map={"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.X"})
    before = set(sys.modules)
    with pytest.warns(UserWarning, match="auto_map names code, which is not run; llama is built in"):
        load(folder)
    change(folder, model_type="x")
    error = refused(folder, UnsupportedModelError, "/model_type")
    assert "auto_map" in str(error.hint)
    assert not (tmp_path / "ran").exists()
    assert not {name for name in set(sys.modules) - before if "modeling_x" in name or "configuration_x" in name}
    assert str(folder) not in sys.path


# ---- H5–H9: values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 1.5, "576", True, 1e308, 2**70, None, [32], {}, ...])
@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "intermediate_size"])
def test_h5_sizes(folder: Path, key: str, value: Any) -> None:
    change(folder, **{key: value})
    error = refused(folder, ConfigError, f"/{key}")
    if value is not ...:
        assert "int 1…" in str(error.expected) or value is None


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
def test_h5_counts(folder: Path, key: str, value: Any) -> None:
    change(folder, **{key: value})
    refused(folder, ConfigError, f"/{key}")


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 10**9), ("vocab_size", 2**40), ("vocab_size", 10**30)]
)
def test_h6_budgets(folder: Path, key: str, value: int) -> None:
    change(folder, **{key: value})
    refused(folder, LimitExceeded, f"/{key}")


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 4096), ("vocab_size", 1 << 24), ("intermediate_size", 1 << 24)]
)
def test_h6_against_the_tensors(folder: Path, key: str, value: int) -> None:
    """Within the budget, but not what is stored: nothing is allocated for it."""
    change(folder, **{key: value})
    with pytest.raises(ShapeMismatch) as caught:
        load(folder)
    assert len(str(caught.value)) < 1200


def test_h7_divisors(folder: Path) -> None:
    change(folder, num_attention_heads=5, num_key_value_heads=5, head_dim=...)
    error = refused(folder, ConfigError, "/num_attention_heads")
    assert "hidden_size" in str(error)
    change(folder, num_attention_heads=4, num_key_value_heads=3)
    error = refused(folder, ConfigError, "/num_key_value_heads")
    assert "num_attention_heads" in str(error)
    change(folder, num_key_value_heads=2, head_dim=7)
    error = refused(folder, ConfigError, "/head_dim")
    assert "rotary" in str(error)


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("field", "rope"),
    [
        ("short_factor", {"rope_type": "longrope", "factor": 2.0}),
        ("long_factor", {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 3}),
        ("rope_type", {"rope_type": "proportional"}),
        ("rope_type", {"rope_type": 5}),
        ("type", {"type": "mrope", "factor": 2.0}),
        ("factor", {"type": "dynamic"}),
        ("factor", {"rope_type": "linear"}),
        ("factor", {"rope_type": "linear", "factor": 0}),
        ("factor", {"rope_type": "linear", "factor": -2.0}),
        ("factor", {"rope_type": "linear", "factor": "2"}),
        ("factor", {"rope_type": "linear", "factor": True}),
        ("type", {"rope_type": "linear", "type": "yarn", "factor": 2.0}),
        ("low_freq_factor", {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}),
        ("high_freq_factor", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}),
        ("beta_fast", {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}),
        ("attention_factor", {"rope_type": "yarn", "factor": 2.0, "attention_factor": -1.0}),
        ("truncate", {"rope_type": "yarn", "factor": 2.0, "truncate": 1}),
        ("mrope_section", {"rope_type": "default", "mrope_section": [1, 2]}),
    ],
)
def test_h8_rope(folder: Path, where: str, field: str, rope: dict[str, Any]) -> None:
    change(folder, rope_parameters=...)
    change(folder, **{where: rope})
    refused(folder, ConfigError, f"/{where}/{field}")


def test_h8_rope_as_a_whole(folder: Path) -> None:
    change(folder, rope_parameters="default")
    refused(folder, ConfigError, "/rope_parameters")
    change(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rope_theta=2e4)
    refused(folder, ConfigError, "/rope_theta")
    change(folder, rope_theta=..., rope_scaling={"rope_type": "linear", "factor": 2.0})
    refused(folder, ConfigError, "/rope_scaling")
    change(folder, rope_scaling=..., rope_parameters={"rope_type": "default", "rope_theta": 0})
    refused(folder, ConfigError, "/rope_parameters/rope_theta")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", 0),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", None),
        ("hidden_act", "swooshish"),
        ("hidden_act", 3),
        ("dtype", "float7"),
        ("torch_dtype", 16),
        ("attention_dropout", -0.1),
        ("attention_dropout", 1.5),
        ("attention_bias", "false"),
        ("tie_word_embeddings", 1),
        ("pretraining_tp", 2),
        ("is_encoder_decoder", True),
        ("sliding_window", 8),
        ("a_new_option", 1),
    ],
)
def test_h9_values(folder: Path, key: str, value: Any) -> None:
    if key == "torch_dtype":
        change(folder, dtype=...)
    if value is None:
        change(folder, **{key: value})  # a null says no more than leaving out
        load(folder)
        return
    change(folder, **{key: value})
    refused(folder, ConfigError, f"/{key}")


def test_h9_a_person_may_know_better(folder: Path) -> None:
    change(folder, a_new_option=1)
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert "ignore=('a_new_option',)" in str(caught.value.hint)
    assert load_checkpoint(resolve(folder), ignore=("a_new_option",)).transformer.spec.kept


# ---- H10–H14: weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "model.ckpt", "x.pkl"])
def test_h10_only_pickles(folder: Path, name: str) -> None:
    (folder / WEIGHTS).rename(folder / name)
    with pytest.raises(UnsafeFormatError) as caught:
        load(folder)
    assert name in str(caught.value)
    assert "onvert" in str(caught.value.hint)


def test_h10_a_pickle_beside_is_left_alone(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    load(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(UnsupportedModelError, match="no weights"):
        load(folder)
    with pytest.raises(ShardError, match="has no weights"):
        load_checkpoint(Resolved("folder", folder, ""))


def sharded(folder: Path) -> dict[str, Any]:
    tensors = load_file(folder / WEIGHTS)
    save_sharded(folder, tensors, max_shard_bytes=40_000)
    index: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    return index


def write_index(folder: Path, index: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_h11_shards(folder: Path, tmp_path: Path) -> None:
    index = sharded(folder)
    load(folder)
    places = index["weight_map"]
    names = sorted(set(places.values()))
    norm = "model.norm.weight"
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes((folder / names[0]).read_bytes())
    for bad in ("../outside.safetensors", str(outside), "a\\b.safetensors", 5, "gone.safetensors", ""):
        write_index(folder, {**index, "weight_map": {**places, norm: bad}})
        with pytest.raises(ShardError) as caught:
            load(folder)
        assert caught.value.field == f"/weight_map/{norm}"
    (folder / "link.safetensors").symlink_to(outside)
    write_index(folder, {**index, "weight_map": {**places, norm: "link.safetensors"}})
    with pytest.raises(ShardError, match="links out of its folder"):
        load(folder)
    (folder / "link.safetensors").unlink()
    other = next(name for name in names if name != places[norm])
    write_index(folder, {**index, "weight_map": {**places, norm: other}})
    with pytest.raises(ShardError) as caught:
        load(folder)
    assert caught.value.field == f"/weight_map/{norm}"
    write_index(folder, {**index, "metadata": {"total_size": 1}})
    with pytest.warns(UserWarning, match="total_size"):
        load(folder)


def test_h11_a_tensor_in_two_shards(folder: Path) -> None:
    index = sharded(folder)
    names = sorted(set(index["weight_map"].values()))
    both = load_file(folder / names[1]) | load_file(folder / names[0])
    save_file(both, folder / names[1], {"format": "pt"})
    with pytest.raises(ShardError, match="tensor is in two shards"):
        load(folder)


def test_h12_an_extra_shard(folder: Path) -> None:
    sharded(folder)
    save_file({"x": torch.zeros(3)}, folder / "model-00009-of-00009.safetensors")
    with pytest.warns(UserWarning, match="1 safetensors files are not in the index"):
        load(folder)


def test_h13_missing(folder: Path) -> None:
    retensor(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ShapeMismatch, match=r"1 tensor missing: model\.layers\.1\.mlp\.up_proj\.weight") as caught:
        load(folder)
    error = caught.value
    assert error.field == "model.layers.1.mlp.up_proj.weight"


def test_h13_many_missing(folder: Path) -> None:
    change(folder, num_hidden_layers=5)
    with pytest.raises(ShapeMismatch, match=r"18 tensors missing: model\.layers\.3\.[^ ]+, .* and 1\d more"):
        load(folder)


def test_h13_unexpected(folder: Path) -> None:
    retensor(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": torch.ones(4)}))
    with pytest.raises(ShapeMismatch, match=r"1 tensor unexpected: model\.layers\.0\.self_attn\.sinks"):
        load(folder)


def test_h13_turned(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    retensor(folder, lambda tensors: tensors.update({name: tensors[name].t().contiguous()}))
    with pytest.raises(ShapeMismatch) as caught:
        load(folder)
    assert caught.value.field == name
    assert (caught.value.expected, caught.value.got) == ("[64, 32]", "[32, 64]")


def test_h13_dtypes(folder: Path) -> None:
    """Floating types may be mixed; whole numbers are no weights."""
    name = "model.layers.0.mlp.up_proj.weight"
    retensor(folder, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    assert load(folder).transformer.dtype == torch.float32
    retensor(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(DtypeError) as caught:
        load(folder)
    assert caught.value.field == name


def test_h14_tied_and_yet_different(folder: Path) -> None:
    """``lm_head`` beside tied embeddings must be the same."""
    change(folder, tie_word_embeddings=True)
    with pytest.raises(ShapeMismatch) as caught:
        load(folder)
    assert caught.value.field == "lm_head.weight"
    assert "tie_word_embeddings" in str(caught.value.hint)
    retensor(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load(folder).transformer.head.weight is None


# ---- H15–H20 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [{"quant_method": "gptq", "bits": 4}, {"bits": 4}, "awq", {"quant_method": 7}])
def test_h15_quantized(folder: Path, value: Any) -> None:
    change(folder, quantization_config=value)
    error = refused(folder, UnsupportedModelError, "/quantization_config")
    if value == {"quant_method": "gptq", "bits": 4}:
        assert error.got == "gptq"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token_id", 64),
        ("eos_token_id", -1),
        ("eos_token_id", [1, 64]),
        ("eos_token_id", "2"),
        ("eos_token_id", [1, True]),
        ("eos_token_id", [[1]]),
        ("pad_token_id", 1000),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("do_sample", "yes"),
    ],
)
def test_h16_generation_config(folder: Path, key: str, value: Any) -> None:
    change(folder, "generation_config.json", **{key: value})
    refused(folder, ConfigError, f"/{key}", "generation_config.json")


def test_h16_in_the_config_itself(folder: Path) -> None:
    change(folder, eos_token_id=64)
    refused(folder, ConfigError, "/eos_token_id")


def test_h16_what_is_fine(folder: Path) -> None:
    change(folder, eos_token_id=None, pad_token_id=None)
    change(folder, "generation_config.json", eos_token_id=[5, 2], do_sample=True, temperature=0.6, top_p=0.9, top_k=20)
    settings = load(folder).settings
    assert (settings.eos_ids, settings.temperature, settings.top_k, settings.top_p) == ((2, 5), 0.6, 20, 0.9)
    change(folder, "generation_config.json", eos_token_id=None, do_sample=False)
    settings = load(folder).settings
    assert (settings.eos_ids, settings.temperature) == ((), 0.0)
    (folder / "generation_config.json").write_text("[]")
    refused(folder, ConfigError, file="generation_config.json")


def test_h17_several_ends(folder: Path) -> None:
    change(folder, eos_token_id=1)
    change(folder, "generation_config.json", eos_token_id=[1, 6])
    assert load(folder).settings.eos_ids == (1, 6)  # the longer list says all that the other does
    change(folder, "generation_config.json", eos_token_id=[6])
    with pytest.warns(UserWarning, match="different end tokens"):
        settings = load(folder).settings
    assert settings.eos_ids == (1, 6)


def test_settings_that_are_not_followed_are_named(folder: Path) -> None:
    change(folder, "generation_config.json", encoder_no_repeat_ngram_size=3)
    with pytest.warns(UserWarning, match="encoder_no_repeat_ngram_size"):
        load(folder)


def test_h18_names_that_differ_in_case(folder: Path) -> None:
    (folder / "Model.safetensors").write_bytes(b"junk")
    with pytest.raises(ShardError, match="ambiguous"):
        load(folder)


def test_h20_many_files(folder: Path) -> None:
    for i in range(10_001):
        (folder / f"f{i}").touch()
    with pytest.raises(LimitExceeded):
        load(folder)


def test_h20_links_in_circles(folder: Path, tmp_path: Path) -> None:
    (folder / "again").symlink_to(folder)
    load(folder)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder / WEIGHTS)
    with pytest.raises(CutawayError):
        load(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder / "config.json")
    refused(folder, ConfigError)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(FormatError):
        load(tmp_path / "loop")


def test_one_file_of_a_folder(folder: Path) -> None:
    """A ``.safetensors`` that is named is the one that is read."""
    retensor(folder, lambda tensors: None)
    (folder / "other.safetensors").write_bytes((folder / WEIGHTS).read_bytes())
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, "model.norm.weight": torch.full((32,), 7.0)}, folder / "other.safetensors", {"format": "pt"})
    model = load(folder / "other.safetensors").transformer
    assert bool((model.decoder.norm.weight == 7).all())
    assert isinstance(resolve(folder / "other.safetensors"), Resolved)


# ---- every family ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_no_field_accepts_nonsense(name: str, tmp_path: Path, sound: Callable[[str], dict[str, bytes]]) -> None:
    """Each field of each family's config set to what it cannot be: an error of ours, or a load that means the same."""
    folder = put(tmp_path / "m", sound(name))
    values = json.loads((folder / "config.json").read_text())
    for key in values:
        for nonsense in (-(2**63), 1e300, "\x1b[31m", [], {}, [[[]]], True, None):
            (folder / "config.json").write_text(json.dumps({**values, key: nonsense}))
            # Anything else than an error of ours would come through here.
            with warnings.catch_warnings(), contextlib.suppress(CutawayError):
                warnings.simplefilter("ignore")
                load(folder)
