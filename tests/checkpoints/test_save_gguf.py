"""Writing GGUF: the same model and vocabulary for our own reader and for the format's own package; whole or not at all.

What llama.cpp makes of the files is in tests/reference/test_llama_cpp.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.checkpoints import gguf_models
from tests.checkpoints.gguf_models import CASES, gemma3
from tests.reference import tiny
from tests.tokenizers.texts import random_texts

import cutaway
from cutaway.errors import (
    ConfigError,
    CutawayError,
    RequestError,
    StorageError,
    UnsupportedModelError,
)
from cutaway.formats.gguf import GgufFile
from cutaway.formats.gguf_write import FileTensor, write_gguf
from cutaway.formats.quants import BLOCK_TYPES
from cutaway.model import Model
from cutaway.spec import FactorScaling, GenerationSettings, Llama3Scaling

REPOSITORY = Path(__file__).parents[2]


def differing(one: Model, two: Model) -> list[str]:
    a, b = one.transformer.state_dict(), two.transformer.state_dict()
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("dtype", [None, "bf16", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str, dtype: str | None, tmp_path: Path) -> None:
    """Weights bit by bit (such as every type here holds), spec, ids and settings."""
    model = gguf_models.model(name)
    if dtype == "fp16":
        with torch.no_grad():
            for parameter in model.transformer.parameters():
                parameter.copy_(parameter.half())
    cutaway.save(model, tmp_path / "m.gguf", format="gguf", dtype=dtype)
    again = cutaway.load(tmp_path / "m.gguf")
    assert differing(model, again) == []
    ours, theirs = model.spec, again.spec
    assert (ours.d_model, ours.vocab_size, ours.max_positions) == (
        theirs.d_model,
        theirs.vocab_size,
        theirs.max_positions,
    )
    ids = list(range(5, 35))
    apart = model.logits(ids) - again.logits(ids)  # type: ignore[operator]
    assert float(apart.abs().max()) <= (2e-4 if "llama3" in name else 0.0)  # factors are fp32
    assert again.settings.eos_ids == model.settings.eos_ids
    texts = random_texts(60, seed=1)
    assert again.tokenizer is not None
    assert model.tokenizer is not None
    assert again.tokenizer.encode_batch(texts) == model.tokenizer.encode_batch(texts)
    talk = [{"role": "user", "content": "hello <|im_end|> there"}]
    assert again.tokenizer.chat(talk) == model.tokenizer.chat(talk)


@pytest.mark.parametrize("name", CASES)
def test_any_weights(name: str, tmp_path: Path) -> None:
    """fp32 as it comes. Gemma's norms are stored plus one, which rounds them once, and never again."""
    model = gguf_models.model(name, exact=False)
    cutaway.save(model, tmp_path / "one.gguf", format="gguf")
    again = cutaway.load(tmp_path / "one.gguf")
    if not name.startswith("gemma"):
        assert differing(model, again) == []
    for key, tensor in model.transformer.state_dict().items():
        apart = (tensor - again.transformer.state_dict()[key]).abs().max()
        assert float(apart) <= (2.0**-23 if key.endswith("norm.weight") else 0.0), key
    cutaway.save(again, tmp_path / "two.gguf", format="gguf")
    if "llama3" not in name:
        assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


def stored(reader: gguf.GGUFReader) -> dict[str, np.ndarray[Any, Any]]:
    return {str(tensor.name): gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2"])
def test_the_format_s_own_reader(name: str, dtype: str, tmp_path: Path) -> None:
    """gguf-py reads every key and tensor; shapes, types, order of dims and the numbers are right."""
    model = gguf_models.model(name)
    cutaway.save(model, tmp_path / "m.gguf", format="gguf", dtype=dtype)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    arch = {"gemma3_text": "gemma3"}.get(model.spec.family, model.spec.family)

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    assert value("general.architecture") == arch
    assert value(f"{arch}.block_count") == model.spec.n_layers
    assert value(f"{arch}.vocab_size") == model.spec.vocab_size
    tokens = value("tokenizer.ggml.tokens")
    assert len(tokens) == len(value("tokenizer.ggml.token_type")) == model.spec.vocab_size
    assert tokens[-1] == f"[PAD{model.spec.vocab_size - 1}]"
    numbers = stored(reader)
    table = model.transformer.embed.tokens.detach()
    wanted = {"fp16": table.half().float(), "bf16": table}.get(dtype, table)
    assert np.array_equal(numbers["token_embd.weight"], wanted.numpy())
    kinds = {str(tensor.name): tensor.tensor_type.name for tensor in reader.tensors}
    assert {kinds[key] for key, data in numbers.items() if data.ndim == 1} == {"F32"}
    matrices = {kinds[key] for key, data in numbers.items() if data.ndim == 2 and key != "position_embd.weight"}
    assert matrices == {{"fp32": "F32", "fp16": "F16", "bf16": "BF16"}[dtype]}
    assert ("output.weight" in numbers) != model.spec.lm.tied
    if name == "gemma3":
        own = model.transformer.state_dict()["decoder.norm.weight"]
        assert np.array_equal(numbers["output_norm.weight"], (own + 1).numpy())
        assert value("gemma3.attention.sliding_window_pattern") == 6
    if name == "gpt2":
        assert numbers["blk.0.attn_qkv.weight"].shape == (96, 32)
        assert kinds["position_embd.weight"] == "F32"


def test_llama_3_s_factors(tmp_path: Path) -> None:
    """A slowed frequency becomes what it is divided by; read again, the list is kept as it is."""
    model = gguf_models.model("llama3-factor-8")
    cutaway.save(model, tmp_path / "one.gguf", format="gguf")
    again = cutaway.load(tmp_path / "one.gguf")
    before, after = (m.spec.decoder.layers[0].attention.rotary for m in (model, again))
    assert before is not None
    assert after is not None
    assert isinstance(before.scaling, Llama3Scaling)
    assert isinstance(after.scaling, FactorScaling)
    assert sorted(after.scaling.factors) == list(after.scaling.factors)
    assert after.scaling.factors[-1] == pytest.approx(8.0)
    cutaway.save(again, tmp_path / "two.gguf", format="gguf")
    assert cutaway.load(tmp_path / "two.gguf").spec == again.spec


def test_dtype_is_the_model_s_own(tmp_path: Path) -> None:
    model = gguf_models.model("gemma3")
    model.transformer.bfloat16()
    cutaway.save(model, tmp_path / "m.gguf", format="gguf")
    with GgufFile(tmp_path / "m.gguf") as file:
        assert file.info("token_embd.weight").type.name == "BF16"
        assert file.metadata["general.file_type"] == 32
        # Plus one in fp32: bf16 would have lost half of the norms' digits.
        wanted = model.transformer.state_dict()["decoder.norm.weight"].float() + 1
        assert torch.equal(file.read("output_norm.weight"), wanted)


def test_without_a_vocabulary(tmp_path: Path) -> None:
    model = Model(tiny.transformer("llama"), settings=GenerationSettings(eos_ids=(2, 5)))
    cutaway.save(model, tmp_path / "m.gguf", format="gguf")
    again = cutaway.load(tmp_path / "m.gguf")
    assert again.tokenizer is None
    assert again.settings.eos_ids == (2, 5)
    assert differing(model, again) == []


# ---- refused by name ----------------------------------------------------------------------------------------

_LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16, "factor": 4.0}
REFUSED: dict[str, tuple[type[CutawayError], str, Callable[[], dict[str, Any]]]] = {
    "a family without a form": (UnsupportedModelError, "format", lambda: tiny.config("granite")),
    "llama's biases": (ConfigError, "qkv_bias", lambda: {**tiny.config("llama"), "attention_bias": True}),
    "llama's mlp biases": (ConfigError, "bias", lambda: {**tiny.config("llama"), "mlp_bias": True}),
    "another activation": (ConfigError, "activation", lambda: {**tiny.config("llama"), "hidden_act": "gelu"}),
    "dynamic": (ConfigError, "rope_type", lambda: gguf_models.scaled("llama", "dynamic", factor=2.0)),
    "longrope": (ConfigError, "rope_type", lambda: gguf_models.scaled("llama", "longrope", **_LONG)),
    "yarn's betas": (ConfigError, "beta_fast", lambda: tiny.config("llama-yarn-betas")),
    "yarn's magnitude": (ConfigError, "attention_factor", lambda: tiny.config("llama-yarn-attention-factor")),
    "yarn's mscale": (ConfigError, "mscale", lambda: tiny.config("llama-yarn-mscale")),
    "llama 3's scaling elsewhere": (
        ConfigError,
        "rope_type",
        lambda: {**tiny.config("qwen2"), "rope_parameters": tiny.config("llama3-factor-8")["rope_parameters"]},
    ),
    "qwen's windows": (ConfigError, "window", lambda: tiny.config("qwen2-sliding")),
    "qwen3's biases": (ConfigError, "qkv_bias", lambda: tiny.config("qwen3-biases")),
    "gemma's own scale": (ConfigError, "scale", lambda: gemma3([*gguf_models.SIX], query_pre_attn_scalar=24)),
    "gemma's caps": (
        ConfigError,
        "attn_logit_softcapping",
        lambda: gemma3([*gguf_models.SIX], attn_logit_softcapping=1.0),
    ),
    "gemma's layers in no rhythm": (
        ConfigError,
        "window",
        lambda: gemma3([tiny.NEAR, tiny.FAR, tiny.FAR, tiny.NEAR]),
    ),
    "gemma without local layers": (ConfigError, "layer_types", lambda: gemma3([tiny.FAR] * 3)),
    "gpt-2's scale by layer": (
        ConfigError,
        "scale",
        lambda: {**tiny.config("gpt2"), "scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt-2 without scale": (ConfigError, "scale", lambda: {**tiny.config("gpt2"), "scale_attn_weights": False}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    error, field, config = REFUSED[case]
    with pytest.raises(error) as caught:
        cutaway.save(Model(tiny.transformer(config())), tmp_path / "m.gguf", format="gguf")
    assert (caught.value.field or "").rsplit("/", 1)[-1] == field
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_no_family(tmp_path: Path) -> None:
    model = cutaway.build({"d_model": 16, "n_heads": 2, "layers": 2, "vocab_size": 32})
    with pytest.raises(UnsupportedModelError):
        cutaway.save(model, tmp_path / "m.gguf", format="gguf")


def test_numbers_that_fp16_does_not_reach(tmp_path: Path) -> None:
    model = gguf_models.model("llama")
    with torch.no_grad():
        model.transformer.embed.tokens[3, 4] = 1e6
    with pytest.raises(RequestError, match="too large for F16") as caught:
        cutaway.save(model, tmp_path / "m.gguf", format="gguf", dtype="fp16")
    assert caught.value.field == "token_embd.weight"
    assert list(tmp_path.iterdir()) == []
    with torch.no_grad():
        model.transformer.embed.tokens[3, 4] = float("inf")  # what is infinite already stays so
    cutaway.save(model, tmp_path / "m.gguf", format="gguf", dtype="fp16")
    again = cutaway.load(tmp_path / "m.gguf").transformer.embed.tokens
    assert bool(again[3, 4].isinf())


def test_arguments(tmp_path: Path) -> None:
    model = gguf_models.model("llama")
    with pytest.raises(RequestError):
        cutaway.save(model, tmp_path / "m.gguf", format="gguf", dtype="int8")
    for place in (tmp_path, tmp_path / "no" / "such" / "m.gguf", "a\0b"):
        with pytest.raises(StorageError):
            cutaway.save(model, place, format="gguf")


# ---- the container ------------------------------------------------------------------------------------------


def plain(name: str, tensor: torch.Tensor, kind: str = "F32") -> FileTensor:
    return FileTensor(name, tuple(tensor.shape), BLOCK_TYPES[kind], lambda: tensor)


def test_every_type_of_value(tmp_path: Path) -> None:
    metadata = {
        "a.u8": ("u8", 255),
        "a.i8": ("i8", -128),
        "a.u16": ("u16", 65_535),
        "a.i16": ("i16", -5),
        "a.u32": ("u32", 2**32 - 1),
        "a.i32": ("i32", -(2**31)),
        "a.f32": ("f32", 0.1),
        "a.bool": ("bool", True),
        "a.str": ("str", "é🙂"),
        "a.u64": ("u64", 2**64 - 1),
        "a.i64": ("i64", -(2**63)),
        "a.f64": ("f64", 0.1),
        "a.words": ("arr[str]", ["a", "", "é"]),
        "a.none": ("arr[str]", []),
        "a.scores": ("arr[f32]", [0.1, -2.0]),
        "a.flags": ("arr[bool]", [True, False]),
    }
    tensors = [plain("x", torch.randn(3, 5)), plain("y", torch.randn(7)), plain("z", torch.randn(2, 3, 4), "BF16")]
    write_gguf(tmp_path / "m.gguf", metadata, tensors)
    with GgufFile(tmp_path / "m.gguf") as file:
        assert {key: file.type_of(key) for key in file.metadata} == {key: kind for key, (kind, _) in metadata.items()}
        assert file.names() == ["x", "y", "z"]
        assert torch.equal(file.read("x"), tensors[0].make())
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["a.str"].contents() == "é🙂"
    assert [int(n) for n in reader.tensors[2].shape] == [4, 3, 2]


@pytest.mark.parametrize(
    ("metadata", "tensors"),
    [
        ({"a": ("u8", 256)}, []),
        ({"a": ("u32", -1)}, []),
        ({"a": ("u32", "x")}, []),
        ({"a": ("f32", 1e300)}, []),
        ({"a": ("f33", 1.0)}, []),
        ({"a": ("arr[i32]", [2**31])}, []),
        ({"a": ("str", "\ud800")}, []),
        ({"a": ("arr[str]", ["\ud800"])}, []),
        ({}, [plain("x" * 64, torch.zeros(2))]),
        ({}, [plain("x", torch.zeros(2)), plain("x", torch.zeros(2))]),
        ({}, [plain("x", torch.tensor(1.0))]),
        ({}, [plain("x", torch.zeros(1, 1, 1, 1, 1))]),
        ({}, [FileTensor("x", (3,), BLOCK_TYPES["F32"], lambda: torch.zeros(2))]),
    ],
)
def test_what_the_container_cannot_hold(metadata: Any, tensors: list[FileTensor], tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        write_gguf(tmp_path / "m.gguf", metadata, tensors)
    assert list(tmp_path.iterdir()) == []


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    """No tensor is made before its turn, nor kept after it."""
    alive = most = 0

    class Held(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def make() -> torch.Tensor:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        return torch.zeros(4, 4).as_subclass(Held)

    tensors = [FileTensor(f"t{i}", (4, 4), BLOCK_TYPES["F16"], make) for i in range(9)]
    write_gguf(tmp_path / "m.gguf", {}, tensors)
    assert most <= 4  # views of one count as well


# ---- faults (F17 to F19) ------------------------------------------------------------------------------------


def test_over_the_file_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    cutaway.save(gguf_models.model("qwen3"), path, format="gguf")
    model = cutaway.load(path, mmap=True)
    cutaway.save(model, path, format="gguf", dtype="bf16")
    assert differing(model, cutaway.load(path)) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("call", ["replace", "fsync", "chmod"])
def test_a_disk_that_refuses(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    cutaway.save(gguf_models.model("llama"), path, format="gguf")
    before, real, left = path.read_bytes(), getattr(os, call), 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(28, "No space left on device")
        return real(*arguments, **options)

    failures = 0
    for n in range(1, 5):
        left = n
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                cutaway.save(gguf_models.model("qwen2"), path, format="gguf")
            except StorageError:
                failures += 1
        whole = cutaway.load(path)
        assert path.read_bytes() == before or whole.spec.family == "qwen2"
        assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]
        path.write_bytes(before)
    assert failures >= 1


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before the first byte."""
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StorageError, match="too full"):
        cutaway.save(gguf_models.model("llama"), tmp_path / "m.gguf", format="gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", [0.02, 0.3, 0.7, 1.0])
def test_a_bit_that_fell_over_on_the_way(place: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the header, the vocabulary or the tensors: the self-check sees it, unless it is told not to look."""
    import cutaway.formats.gguf_write as module

    model, real = gguf_models.model("llama"), module._compare

    def damaging(written: str, *arguments: Any) -> None:
        with open(written, "r+b") as file:
            at = min(int(os.path.getsize(written) * place), os.path.getsize(written) - 40)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 64]))
        real(written, *arguments)

    monkeypatch.setattr(module, "_compare", damaging)
    with pytest.raises(CutawayError):
        cutaway.save(model, tmp_path / "m.gguf", format="gguf")
    assert list(tmp_path.iterdir()) == []
    cutaway.save(model, tmp_path / "m.gguf", format="gguf", verify=False)  # then nobody compares


def test_killed_in_the_middle(tmp_path: Path) -> None:
    """At any system call of the save: the old file or the new one."""
    path = tmp_path / "m.gguf"
    cutaway.save(gguf_models.model("llama"), path, format="gguf")
    old = path.read_bytes()
    cutaway.save(gguf_models.model("qwen2"), tmp_path / "new", format="gguf")
    new = (tmp_path / "new").read_bytes()
    program = f"""
        import os, signal, sys
        sys.path.insert(0, {str(REPOSITORY)!r})
        import cutaway
        from tests.checkpoints import gguf_models
        model = gguf_models.model("qwen2")
        left = 0
        def counted(real):
            def call(*args, **kwargs):
                global left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)
            return call
        for name in ("replace", "fsync", "chmod"):
            setattr(os, name, counted(getattr(os, name)))
        for n in range(5, -1, -1):
            pid = os.fork()
            if pid == 0:
                left = n
                cutaway.save(model, {str(path)!r}, format="gguf")
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            print(n, os.WTERMSIG(status), flush=True)
            sys.stdin.readline()
    """
    killed = 0
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        for line in run.stdout:
            killed += line.split()[1] == str(int(signal.SIGKILL))
            assert path.read_bytes() in (old, new)
            path.write_bytes(old)
            run.stdin.write("\n")
            run.stdin.flush()
    assert run.returncode == 0
    assert killed >= 3


def test_settings_name_further_ends(tmp_path: Path) -> None:
    model = gguf_models.model("llama")
    model.settings = replace(model.settings, eos_ids=(2, 7, 9))
    cutaway.save(model, tmp_path / "m.gguf", format="gguf")
    assert cutaway.load(tmp_path / "m.gguf").settings.eos_ids == (2, 4, 7, 9)  # 4 is <|im_end|>, an end by its name
