"""What a GGUF says of its model (rows G13–G15, G18 of the hostile table), through `cutaway.load`."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import cutaway
from cutaway import store
from cutaway.errors import ConfigError, CutawayError, LimitExceeded, ShapeMismatch, UnsupportedModelError
from cutaway.formats.ahead import Ahead
from cutaway.formats.gguf import GgufFile

D, LAYERS, ROWS, HEADS, KV, FF = 16, 2, 24, 4, 2, 32
BASE: dict[str, Any] = {
    "block_count": ("u32", LAYERS),
    "context_length": ("u32", 64),
    "embedding_length": ("u32", D),
    "feed_forward_length": ("u32", FF),
    "attention.head_count": ("u32", HEADS),
    "attention.head_count_kv": ("u32", KV),
    "rope.freq_base": ("f32", 10000.0),
    "attention.layer_norm_rms_epsilon": ("f32", 1e-5),
}
ADD = {
    "u32": "add_uint32",
    "f32": "add_float32",
    "i32": "add_int32",
    "str": "add_string",
    "bool": "add_bool",
    "arr": "add_array",
}


def write(
    path: Path, changes: dict[str, Any] | None = None, *, arch: Any = "llama", tensors: dict[str, Any] | None = None
) -> Path:
    """A tiny Llama; a change of None leaves the key out."""
    writer = gguf.GGUFWriter(path, "llama")
    if arch is None or not isinstance(arch, str):
        writer.kv_data[0].pop("general.architecture")
        if arch is not None:
            writer.add_uint32("general.architecture", arch)
    elif arch != "llama":
        writer.kv_data[0]["general.architecture"].value = arch
    for key, value in {**BASE, **(changes or {})}.items():
        if value is not None:
            getattr(writer, ADD[value[0]])(
                key if "." in key and key.startswith(("rope_", "general")) else f"llama.{key}", value[1]
            )
    rng = np.random.default_rng(0)
    shapes: dict[str, Any] = {"token_embd.weight": (ROWS, D), "output_norm.weight": (D,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (D,),
            f"blk.{i}.ffn_norm.weight": (D,),
            f"blk.{i}.attn_q.weight": (D, D),
            f"blk.{i}.attn_k.weight": (D // HEADS * KV, D),
            f"blk.{i}.attn_v.weight": (D // HEADS * KV, D),
            f"blk.{i}.attn_output.weight": (D, D),
            f"blk.{i}.ffn_gate.weight": (FF, D),
            f"blk.{i}.ffn_up.weight": (FF, D),
            f"blk.{i}.ffn_down.weight": (D, FF),
        }
    for name, shape in {**shapes, **(tensors or {})}.items():
        if shape is not None:
            writer.add_tensor(name, rng.normal(0, 0.25, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_loads(tmp_path: Path) -> None:
    model = cutaway.load(write(tmp_path / "m.gguf"))
    assert model.tokenizer is None
    assert model.logits([1, 2, 3]).shape == (1, 3, ROWS)
    assert len(model.generate([1, 2, 3], max_tokens=4).tokens) == 4


@pytest.mark.parametrize("arch", [None, 7, "unheard-of", ""])
def test_g13_architecture(tmp_path: Path, arch: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"general\.architecture"):
        cutaway.load(write(tmp_path / "m.gguf", arch=arch))


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("block_count", ("u32", 10**9), ConfigError),
        ("block_count", ("f32", 2.0), ConfigError),
        ("block_count", ("i32", -1), ConfigError),
        ("block_count", ("u32", 3), ConfigError),
        ("block_count", ("u32", 0), ConfigError),
        ("block_count", ("str", "two"), ConfigError),
        ("block_count", None, ConfigError),
        ("embedding_length", ("u32", 0), ConfigError),
        ("embedding_length", ("u32", 1 << 31), ConfigError),
        ("embedding_length", None, ConfigError),
        ("vocab_size", ("u32", ROWS + 1), ConfigError),
        ("attention.head_count", ("u32", 0), ConfigError),
        ("attention.head_count", ("u32", 5), ConfigError),
        ("attention.head_count_kv", ("u32", 3), ConfigError),
        ("attention.head_count_kv", ("arr", [2, 2, 2]), ConfigError),
        ("attention.head_count_kv", ("arr", [2, 4]), ConfigError),
        ("attention.key_length", ("u32", 7), ConfigError),
        ("attention.layer_norm_rms_epsilon", ("f32", 0.0), ConfigError),
        ("attention.layer_norm_rms_epsilon", ("f32", float("nan")), ConfigError),
        ("rope.freq_base", ("f32", 0.0), ConfigError),
        ("rope.freq_base", ("f32", float("nan")), ConfigError),
        ("rope.freq_base", ("f32", -1.0), ConfigError),
        ("rope.dimension_count", ("u32", 2), ConfigError),
        ("rope.scaling.type", ("str", "unheard-of"), ConfigError),
        ("context_length", ("u32", 0), ConfigError),
        ("expert_count", ("u32", 8), ConfigError),
    ],
)
def test_g14_g15_settings(tmp_path: Path, key: str, value: Any, error: type[CutawayError]) -> None:
    """Each names the file and the key, and nothing is built for it."""
    path = write(tmp_path / "m.gguf", {key: value})
    with pytest.raises((error, LimitExceeded)) as caught:
        cutaway.load(path)
    assert caught.value.path == str(path)
    assert "llama." in (caught.value.field or "") or "head" in (caught.value.field or "")


def test_per_layer_list_that_agrees(tmp_path: Path) -> None:
    cutaway.load(write(tmp_path / "m.gguf", {"attention.head_count_kv": ("arr", [KV, KV])}))


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"blk.1.ffn_up.weight": None}, "blk.1.ffn_up.weight"),
        ({"token_embd.weight": None}, "token_embd.weight"),
        ({"blk.0.attn_q.bias": (D,)}, "blk.0.attn_q.bias"),
        ({"blk.0.ffn_up.weight": (D, FF)}, "blk.0.ffn_up.weight"),
        ({"blk.0.attn_norm.weight": (1, D)}, "blk.0.attn_norm.weight"),
    ],
)
def test_tensors(tmp_path: Path, tensors: dict[str, Any], named: str) -> None:
    with pytest.raises(ShapeMismatch, match=named.replace(".", r"\.")):
        cutaway.load(write(tmp_path / "m.gguf", tensors=tensors))


@pytest.mark.parametrize("factors", [[1.0], [1.0, 0.0], [1.0, float("nan")], [1.0, -2.0]])
def test_rope_factors(tmp_path: Path, factors: list[float]) -> None:
    path = write(tmp_path / "m.gguf", tensors={"rope_freqs.weight": (len(factors),)})
    data = bytearray(path.read_bytes())
    reader = gguf.GGUFReader(path)
    place = next(t for t in reader.tensors if t.name == "rope_freqs.weight")
    data[place.data_offset : place.data_offset + 4 * len(factors)] = struct.pack(f"<{len(factors)}f", *factors)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        cutaway.load(path)


def test_flipped_bytes(tmp_path: Path) -> None:
    """One byte of the header changed: a typed error or a model that runs; never another exception."""
    good = write(tmp_path / "m.gguf").read_bytes()
    end = good.index(b"rope.freq_base")
    rng = random.Random(0)
    path, loaded = tmp_path / "bad.gguf", 0
    for _ in range(150):
        data = bytearray(good)
        data[rng.randrange(end + 200)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            cutaway.load(path).logits([1, 2])
            loaded += 1
        except CutawayError:
            pass
    assert loaded < 150


@pytest.mark.filterwarnings("ignore:.*stay as numbers")  # its rows are too short for blocks
@pytest.mark.parametrize(
    ("options", "ahead"), [({}, True), ({"dtype": "float32"}, False), ({"quantize": "q8_0"}, False)]
)
def test_weights_come_while_the_vocabulary_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], ahead: bool
) -> None:
    """Where they stay as they are stored; and the numbers are those of a load that reads nothing ahead."""
    path, order = write(tmp_path / "m.gguf"), list[str]()
    begin, words, take = GgufFile.read_ahead, store._vocabulary_of, Ahead.take

    def watched(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            order.append(name)
            return function(*arguments)

        return call

    monkeypatch.setattr(GgufFile, "read_ahead", watched("begin", begin))
    monkeypatch.setattr(Ahead, "take", watched("take", take))
    monkeypatch.setattr(store, "_vocabulary_of", watched("words", words))
    found = cutaway.load(path, **options).logits([1, 2, 3])
    assert order[: 2 if ahead else 1] == (["begin", "words"] if ahead else ["words"])
    assert ("take" in order) is ahead
    monkeypatch.setattr(GgufFile, "read_ahead", lambda *_: None)
    assert torch.equal(cutaway.load(path, **options).logits([1, 2, 3]), found)
