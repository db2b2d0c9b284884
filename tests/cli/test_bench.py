"""``cutaway bench``: what it tells, of each kind of model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cutaway
from cutaway import measure
from tests.cli.test_encoders import Zoo, zoo

Call = Callable[..., Any]
FEW = ("--prompt-len", 12, "--gen", 3, "--batch", 2, "--rounds", 2)
__all__ = ["zoo"]


@pytest.fixture(autouse=True)
def _little_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is read from a small buffer here."""
    monkeypatch.setattr(measure.measured, "__defaults__", (*measure.measured.__defaults__[:-1], 1 << 16))  # type: ignore[index]


def test_json_of_a_decoder(call: Call, folder: Path, gguf_file: Path) -> None:
    for path in (folder, gguf_file):
        done = call("bench", path, *FEW, "--json")
        assert done.code == 0, done.err
        value, model = done.json, cutaway.load(path)
        names = [figure["name"] for figure in value["figures"]]
        assert names == ["memory", "prefill 12", "decode 3", "batch 2 × 3"]
        for figure in value["figures"]:
            low, high = min(figure["values"]), max(figure["values"])
            assert len(figure["values"]) == value["rounds"] == 2
            assert (figure["least"], figure["most"], figure["median"]) == (low, high, pytest.approx((low + high) / 2))
            assert low > 0
            assert (figure["share_of_memory_speed"] is not None) == (figure["name"][:5] in ("decod", "batch"))
        memory = value["memory"]
        assert memory["weights"] == measure.weight_bytes(model.transformer)
        assert memory["cache_for_a_token"] == 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes
        assert memory["peak"] is None or memory["peak"] > memory["weights"]
    assert memory["weights"] < 2 * path.stat().st_size  # as the file has them


def test_table_of_a_decoder(call: Call, folder: Path) -> None:
    done = call("bench", folder, *FEW)
    assert done.code == 0, done.err
    assert done.err == "measuring: 2 rounds after one that warms up\n"
    lines = done.out.splitlines()
    assert lines[0].startswith(str(folder)) or folder.name in lines[0]
    words = [line.split()[0] for line in lines[3:8]]
    assert words == ["load", "memory", "prefill", "decode", "batch"]
    assert sum("of what reading memory allows" in line or "of what" in line for line in lines) == 2
    assert lines[-1].startswith("memory")
    assert "a token" in lines[-1]
    assert call("bench", folder, *FEW, "-q").err == ""
    assert call("bench", "-m", folder, *FEW, "-q").code == 0


def test_what_rounding_costs(call: Call, folder: Path) -> None:
    done = call("bench", folder, *FEW, "--quantize", "int8")
    assert done.code == 0, done.err
    last = done.out.splitlines()[-1]
    assert last.startswith("int8")
    assert "perplexity" in last
    value = call("bench", folder, *FEW, "--quantize", "int8", "--json").json
    assert value["quantize"] == "int8"
    assert value["cost"]["moved"] > 0
    assert call("bench", folder, *FEW, "--json").json["cost"] is None


def test_an_encoder_reads_texts(call: Call, zoo: Zoo) -> None:
    value = call("bench", zoo("bare"), *FEW, "--json").json
    assert [(figure["name"], figure["unit"]) for figure in value["figures"]] == [
        ("memory", "GB/s"),
        ("2 texts of 12", "texts/s"),
        ("2 texts of 16", "texts/s"),
    ]
    assert value["memory"]["cache_for_a_token"] is None


def test_an_encoder_and_decoder_writes(call: Call, zoo: Zoo) -> None:
    for name in ("t5", "bart"):
        value = call("bench", zoo(name), *FEW, "--json").json
        assert [figure["unit"] for figure in value["figures"]] == ["GB/s", *3 * ["tokens/s"]]
        assert value["memory"]["read_for_a_token"] < value["memory"]["weights"]


def test_what_cannot_be(call: Call, folder: Path, tmp_path: Path) -> None:
    for wrong in (("--gen", 1), ("--batch", 0), ("--rounds", 0), ("--prompt-len", 0)):
        done = call("bench", folder, *FEW, *wrong)
        assert (done.code, done.out) == (2, ""), wrong
        assert wrong[0][2:].replace("-", "_") in done.err
    assert call("bench", tmp_path / "nothing").code == 3
