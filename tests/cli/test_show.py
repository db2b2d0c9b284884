"""``cutaway show``."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway
from cutaway.cli import taps
from cutaway.cli.statistics import measure
from cutaway.cli.text import width
from cutaway.formats.safetensors import save_safetensors
from cutaway.spec.names import tap_names
from tests.cli.conftest import config, write_tokenizer
from tests.reference import tiny

Call = Callable[..., Any]


def test_the_tree_folds_equal_layers_and_adds_up(call: Call, folder: Path) -> None:
    done = call("show", folder)
    assert (done.code, done.err) == (0, "")
    assert "layers 0–2" in done.out
    assert "3 × " in done.out
    assert done.out.count("pre_norm") == 2
    model = cutaway.load(folder)
    count = sum(p.numel() for p in model.transformer.parameters())
    assert f"{count:,}" in done.out
    value = call("show", folder, "--json").json
    assert value["parameters"] == count
    assert value["bytes"] == 4 * count
    assert [t["name"] for t in value["tensors"]][:2] == ["embed.tokens", "decoder.layers.0.attn.pre_norm"]
    assert (value["not_used"], value["missing"]) == ([], [])
    assert value["types"]["F32"]["parameters"] == count
    assert value["family"] == "llama"


def test_verbose_shows_every_layer_and_the_files_names(call: Call, folder: Path) -> None:
    out = call("show", folder, "-v").out
    assert [f"layer {i}" in out for i in range(4)] == [True, True, True, False]
    assert "model.layers.1.self_attn.q_proj.weight" in out


def test_a_gguf_with_types_that_differ_by_layer(call: Call, gguf_file: Path) -> None:
    done = call("show", gguf_file)
    assert "layers 0–2" in done.out
    assert "F32/Q8_0" in done.out
    assert "~" in done.out
    assert "= embed.tokens" in done.out
    types = call("show", gguf_file, "--json").json["types"]
    assert set(types) == {"Q8_0", "F32"}
    tensors = [json.loads(line) for line in call("show", gguf_file, "--jsonl").out.splitlines()]
    assert {"name": "decoder.layers.0.attn.q", "stored": "blk.0.attn_q.weight", "shape": [32, 32]}.items() <= tensors[
        2
    ].items()


def test_layers_of_two_kinds(call: Call, tmp_path: Path) -> None:
    from tests.reference import tiny

    cutaway.save(cutaway.Model(tiny.transformer("gemma3")), tmp_path / "two")
    done = call("show", tmp_path / "two")
    assert "layers 0, 2" in done.out
    assert "layer 1" in done.out
    assert "window 8" in done.out
    assert "i = 1" not in call("show", tmp_path / "two", "--taps").out  # the same names and shapes


def test_fused_tensors_are_taken_apart(call: Call, base_folder: Path) -> None:
    value = call("show", base_folder, "--json").json
    parts = {t["name"]: t for t in value["tensors"]}
    assert {parts[f"decoder.layers.0.attn.{x}"]["stored"] for x in "qkv"} == {"transformer.h.0.attn.c_attn.weight"}
    assert value["bytes"] == 4 * value["parameters"]
    model = cutaway.load(base_folder)
    one = call("show", base_folder, "decoder.layers.0.attn.k", "--json").json
    wanted = model.transformer.state_dict()["decoder.layers.0.branches.attn.body.k.weight"]
    assert one["mean"] == pytest.approx(float(wanted.mean()), rel=1e-3, abs=1e-7)
    done = call("show", base_folder, "transformer.h.0.attn.c_attn.weight")
    assert done.code == 2
    assert "decoder.layers.0.attn.q" in done.err


def test_depth_and_filter(call: Call, folder: Path) -> None:
    sizes = [len(call("show", folder, "--depth", d, "-q").out.splitlines()) for d in (1, 2, 3, 4)]
    assert sizes == sorted(set(sizes))
    done = call("show", folder, "--filter", "layers.1.*norm")
    assert done.code == 0
    assert call("show", folder, "--filter", "attn.q").out.count("attn.q") == 3
    assert call("show", folder, "--filter", "q_proj").out.count("attn.q") == 3
    done = call("show", folder, "--filter", "nothing")
    assert (done.code, done.out) == (2, "")


@pytest.mark.parametrize("name", ["decoder.layers.1.mlp.up", "model.layers.1.mlp.up_proj.weight"])
def test_one_tensor(call: Call, folder: Path, name: str) -> None:
    wanted = cutaway.load(folder).transformer.state_dict()["decoder.layers.1.branches.mlp.body.up.weight"]
    found = call("show", folder, name, "--json").json
    assert found["shape"] == list(wanted.shape)
    assert found["count"] == wanted.numel() == sum(found["histogram"]) + found["below"] + found["above"]
    for key, value in (("min", wanted.min()), ("max", wanted.max()), ("std", wanted.std(correction=0))):
        assert found[key] == pytest.approx(float(value), rel=1e-5)
    assert (found["nan"], found["inf"], found["zeros"]) == (0, 0, 0)
    text = call("show", folder, name).out
    assert "64 × 32 · F32 · 2,048 numbers" in text
    assert "█" in text


def test_a_quantised_tensor_is_what_the_model_has(call: Call, gguf_file: Path) -> None:
    wanted = cutaway.load(gguf_file).transformer.state_dict()["decoder.layers.0.branches.attn.body.q.weight"]
    found = call("show", gguf_file, "blk.0.attn_q.weight", "--json").json
    assert found["type"] == "Q8_0"
    assert found["max"] == pytest.approx(float(wanted.max()))


def test_a_tensor_that_is_not_there(call: Call, folder: Path) -> None:
    done = call("show", folder, "decoder.layers.1.mlp.pu")
    assert done.code == 2
    assert "decoder.layers.1.mlp.up" in done.err
    assert call("show", folder, "decoder.norm", "--taps").code == 2


@pytest.mark.parametrize(
    ("values", "facts"),
    [
        ([1.0, float("nan"), float("inf"), 0.0], {"nan": 1, "inf": 1, "zeros": 1, "min": 0.0, "max": 1.0}),
        ([float("nan")], {"nan": 1, "min": None, "histogram": ()}),
        ([2.0, 2.0], {"std": 0.0, "histogram": ()}),
        ([], {"count": 0, "mean": None}),
        ([True, False], {"mean": 0.5}),
        ([-float("inf"), 3.0], {"inf": 1, "max": 3.0}),
    ],
)
def test_statistics_of_odd_tensors(values: list[Any], facts: dict[str, Any]) -> None:
    found = measure(torch.tensor(values)).as_dict()
    assert facts.items() <= found.items()


def test_statistics_of_other_types() -> None:
    x = torch.tensor([-3.0, 0.0, 5.0])
    for dtype in (torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn):
        found = measure(x.to(dtype))
        assert (found.min, found.max, found.zeros) == (-3.0, 5.0, 1)


def test_nan_in_a_file_is_counted_and_loud(call: Call, tmp_path: Path) -> None:
    save_safetensors(tmp_path / "odd.safetensors", {"w": torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]])})
    done = call("show", tmp_path / "odd.safetensors", "w", stdout_tty=True)
    assert "NaN 1" in done.out
    assert "\x1b[1;31m" in done.out
    done = call("show", tmp_path / "odd.safetensors")
    assert done.code == 0
    assert "no config.json" in done.out


def test_a_family_that_is_not_known_still_shows_its_tensors(call: Call, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    save_safetensors(tmp_path / "model.safetensors", {"a.b": torch.ones(2, 3)})
    done = call("show", tmp_path)
    assert done.code == 0
    assert "unknown model type" in done.out
    assert "a.b" in done.out
    assert call("show", tmp_path, "--json").json["family"] is None
    assert call("show", tmp_path, "--taps").code == 2


def test_what_is_missing_or_left_over_is_said(call: Call, folder: Path, tmp_path: Path) -> None:
    from cutaway.formats.safetensors import SafetensorsFile

    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with SafetensorsFile(folder / "model.safetensors") as file:
        tensors = {name: file.read(name) for name in file.names() if "layers.2.mlp.up" not in name}
    save_safetensors(tmp_path / "model.safetensors", {**tensors, "extra": torch.ones(1)})
    done = call("show", tmp_path)
    assert done.code == 0
    assert "1 tensor is not used by the model: extra" in done.err
    assert "1 tensor is missing: model.layers.2.mlp.up_proj.weight" in done.err


def test_taps(call: Call, folder: Path) -> None:
    out = call("show", folder, "--taps").out
    assert "decoder.layers.{i}.attn.weights" in out
    assert "[batch, 4, query, key]" in out
    assert "layers.0." not in out
    assert "decoder.layers.2.attn.weights" in call("show", folder, "--taps", "-v").out
    rows = call("show", folder, "--taps", "--json").json["taps"]
    by_name = {row["name"]: row for row in rows}
    assert by_name["decoder.layers.0.attn.q"]["axes"] == ["batch", "query", "head", "d_head"]
    assert by_name["decoder.layers.0.attn.q"]["shape"] == [None, None, 4, 8]
    model = cutaway.load(folder)
    seen = model.trace([5, 6, 7], "*")
    assert set(seen) == set(by_name)
    for name, tensor in seen.items():
        shape = by_name[name]["shape"]
        assert [a for a, b in zip(tensor.shape, shape, strict=True) if b is not None and a != b] == [], name
    assert call("show", folder, "--taps", "--filter", "layers.1.attn.z").out.count("\n") == 2
    assert call("show", folder, "--taps", "--filter", "zzz").code == 2


@pytest.mark.parametrize("flags", [(), ("--taps",), ("--config",), ("decoder.norm",), ("--json",)])
def test_the_model_may_be_named_as_elsewhere(call: Call, folder: Path, flags: tuple[str, ...]) -> None:
    wanted = call("show", folder, *flags)
    assert wanted.code == 0
    assert call("show", "-m", folder, *flags) == wanted
    assert call("show", *flags, "--model", folder) == wanted


def test_too_many_names(call: Call, folder: Path) -> None:
    assert call("show", folder, "decoder.norm", "x").code == 2
    assert call("show", "-m", folder, "decoder.norm", "x").code == 2
    assert call("show", "").code == 3
    assert call("show", "-m", " ").code == 3


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_every_quantity_says_what_it_is(family: str) -> None:
    spec = tiny.transformer(family).spec
    for name in tap_names(spec):
        assert 0 < len(taps.meaning(name)) <= 19, name  # 80 columns have room for it


@pytest.mark.parametrize(("columns", "there"), [(60, False), (80, True), (140, True)])
def test_taps_say_what_they_are_where_there_is_room(
    call: Call, folder: Path, columns: int, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = call("show", folder, "--taps").out
    assert ("who reads whom" in out) == there
    assert "…" not in out
    monkeypatch.delenv("COLUMNS")
    assert "who reads whom" in call("show", folder, "--taps").out  # a pipe has room for all
    rows = {row["name"]: row for row in call("show", folder, "--taps", "--json").json["taps"]}
    assert rows["logits"]["meaning"] == "next-token scores"


def test_config_template_and_tokenizer(call: Call, folder: Path, gguf_file: Path, base_folder: Path) -> None:
    assert call("show", folder, "--config").json["hidden_size"] == 32
    out = call("show", gguf_file, "--config").out
    assert "llama.block_count" in out
    assert "values)" in out
    assert call("show", gguf_file, "--config", "--json").json["llama.block_count"] == 3
    for model in (folder, gguf_file):
        assert "<|im_start|>" in call("show", model, "--template").out
        value = call("show", model, "--tokenizer", "--json").json
        assert value["vocab_size"] == config()["vocab_size"]
        assert value["special"] == {"<|end|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
        assert "3 control tokens" in call("show", model, "--tokenizer").out
    done = call("show", base_folder, "--template")
    assert done.code == 3
    assert "cutaway run" in done.err


@pytest.mark.parametrize("columns", [24, 40, 55, 80, 130])
@pytest.mark.parametrize("flags", [(), ("--depth", "2"), ("--taps",), ("decoder.norm",), ("--filter", "norm")])
def test_every_line_fits(
    call: Call, gguf_file: Path, columns: int, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = call("show", gguf_file, *flags).out.splitlines()
    wide = [line for line in lines if width(line) > columns]
    # prose and names are whole rather than short; tables fit from 40 columns on
    assert not [line for line in wide if columns >= 40 and line[:1] in "├└│md"], wide


def test_ascii_where_nothing_else_can_be_said(call: Call, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    from cutaway.cli.group import invoke

    for flags in ([], ["decoder.layers.0.attn.q"], ["--taps"], ["--tokenizer"]):
        assert invoke(["show", str(gguf_file), *flags]) == 0


def test_bad_files(call: Call, tmp_path: Path) -> None:
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"")
    done = call("show", empty)
    assert done.code == 3
    assert len(done.err.splitlines()) == 3
    junk = tmp_path / "junk.safetensors"
    junk.write_bytes(b"\x00" * 100)
    assert call("show", junk).code == 3
    assert call("show", tmp_path / "missing").code == 3
    assert call("show", tmp_path / "missing.safetensors", "--json").error["code"] == "request"
    bare = tmp_path / "bare"
    bare.mkdir()
    assert call("show", bare).code == 3
    write_tokenizer(bare)
    assert call("show", bare).code == 3
    with warnings.catch_warnings():
        assert call("show", "smollm2", "--offline").code == 5
