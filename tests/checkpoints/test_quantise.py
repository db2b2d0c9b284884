"""Quantized models in files: the bytes of the format's own package, blocks kept as they are, in both formats.

What llama.cpp makes of such files is in tests/reference/test_llama_cpp_quantised.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import gguf_models
from tests.reference import tiny

import cutaway
from cutaway.checkpoints.quantised import Losses, Target, planned
from cutaway.checkpoints.resolve import resolve
from cutaway.cli.anatomy import open_source
from cutaway.errors import CutawayError, DtypeError, FormatError, RequestError, StorageError, UnsupportedModelError
from cutaway.formats.gguf import GgufFile
from cutaway.formats.mixes import mix_named
from cutaway.formats.packed import KEY
from cutaway.formats.quantise import QUANTISED
from cutaway.formats.quants import BLOCK_TYPES
from cutaway.formats.rules import Rename, Transpose
from cutaway.formats.safetensors import SafetensorsFile, save_safetensors
from cutaway.kernels import Stored, library
from cutaway.model import Model

REPOSITORY = Path(__file__).parents[2]
FIVE = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
THREE = ("q4_k", "q5_k", "q6_k")
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
needs_kernels = pytest.mark.skipif(library() is None, reason="stored weights need the native library")


def wide(**changes: Any) -> Model:
    """A model whose rows are whole blocks of 256."""
    config = {**tiny.config("llama"), **WIDE, "vocab_size": 300, **changes}
    config.pop("head_dim", None)
    return Model(tiny.transformer(config))


def raws(path: Path) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    with GgufFile(path) as file:
        return {name: (file.info(name).type.name, file.raw(name)) for name in file.names()}


def plain(path: Path) -> dict[str, torch.Tensor]:
    with GgufFile(path) as file:
        return {name: file.read(name) for name in file.names()}


@pytest.mark.parametrize("kind", FIVE)
@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "gemma3-local", "gpt2"])
def test_the_bytes_of_the_formats_own_package(name: str, kind: str, tmp_path: Path) -> None:
    """gguf-py quantizes what a plain file holds to the same bytes, reads our file, and all but matrices are fp32."""
    model = gguf_models.model(name, exact=False)
    cutaway.save(model, tmp_path / "plain.gguf", format="gguf")
    cutaway.save(model, tmp_path / "m.gguf", format="gguf", quantize=kind)
    found = {str(tensor.name): tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    numbers = plain(tmp_path / "plain.gguf")
    assert found.keys() == numbers.keys()
    assert ("output.weight" in found) != model.spec.lm.tied
    matrices = 0
    for key, tensor in found.items():
        if numbers[key].dim() < 2 or key == "position_embd.weight" or numbers[key].shape[1] % 32:
            assert tensor.tensor_type.name == "F32"
            assert np.array_equal(tensor.data.reshape(numbers[key].shape), numbers[key].numpy())
            continue
        matrices += 1
        assert tensor.tensor_type.name == kind.upper()
        wanted = gguf.quantize(numbers[key].numpy(), gguf.GGMLQuantizationType[kind.upper()])
        assert np.array_equal(tensor.data, wanted), key
    assert matrices >= 2 * model.spec.n_layers
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["general.quantization_version"].contents() == 2
    assert fields["general.file_type"].contents() == gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"]


@needs_kernels
@pytest.mark.parametrize("kind", [*FIVE, *THREE])
def test_loaded_saved_and_quantized_are_the_same_bytes(kind: str, tmp_path: Path) -> None:
    """``load(quantize=…)`` then ``save``, or ``save(quantize=…)``; read again, the same bytes and logits."""
    model = wide()
    cutaway.save(model, tmp_path / "folder")
    cutaway.save(model, tmp_path / "one.gguf", format="gguf", quantize=kind)
    loaded = cutaway.load(tmp_path / "folder", quantize=kind)
    cutaway.save(loaded, tmp_path / "two.gguf", format="gguf")
    one, two = raws(tmp_path / "one.gguf"), raws(tmp_path / "two.gguf")
    assert one.keys() == two.keys()
    for key, (type_one, bytes_one) in one.items():
        assert type_one == two[key][0]
        assert np.array_equal(bytes_one, two[key][1]), key
    again = cutaway.load(tmp_path / "two.gguf")
    assert {type(w) for n, w in again.transformer.state_dict().items() if "norm" not in n} == {Stored}
    ids = list(range(3, 30))
    assert torch.equal(again.logits(ids), loaded.logits(ids))  # type: ignore[arg-type]


@needs_kernels
def test_a_file_that_is_read_and_written_again_is_the_same(tmp_path: Path) -> None:
    """A mix with tied head, one of each type: nothing is taken apart, whatever the type of a file's matrices."""
    for kind in ("q4_k_m", "f16", "bf16", "q5_1"):
        model = wide(tie_word_embeddings=True, num_hidden_layers=4)
        cutaway.save(model, tmp_path / "one.gguf", format="gguf", quantize=kind)
        losses = Losses()
        cutaway.save(cutaway.load(tmp_path / "one.gguf"), tmp_path / "two.gguf", format="gguf", losses=losses)
        one, two = raws(tmp_path / "one.gguf"), raws(tmp_path / "two.gguf")
        assert {n: t for n, (t, _) in one.items()} == {n: t for n, (t, _) in two.items()}
        assert all(np.array_equal(data, two[name][1]) for name, (_, data) in one.items())
        assert not any(loss.measured for loss in losses.types.values())
        assert {t for t, _ in one.values()} == {*losses.types, "F32"}


@needs_kernels
def test_fused_parts_of_two_types_are_numbers_again(tmp_path: Path) -> None:
    """GPT-2's q, k and v are one matrix in GGUF: what is not of one type there keeps its numbers, in fp32."""
    model = Model(gguf_models.model("gpt2", exact=False).transformer)
    cutaway.save(model, tmp_path / "folder", format="cutaway")
    loaded = cutaway.load(tmp_path / "folder", quantize="q8_0")
    other = cutaway.load(tmp_path / "folder", quantize="q5_0")
    own = dict(loaded.transformer.named_parameters())
    name = "decoder.layers.0.branches.attn.body.v.weight"
    weight = dict(other.transformer.named_parameters())[name]
    loaded.transformer.get_submodule(name.removesuffix(".weight")).weight = weight
    cutaway.save(loaded, tmp_path / "m.gguf", format="gguf")
    kinds = {key: kind for key, (kind, _) in raws(tmp_path / "m.gguf").items()}
    assert (kinds["blk.0.attn_qkv.weight"], kinds["blk.1.attn_qkv.weight"]) == ("F32", "Q8_0")
    stored = plain(tmp_path / "m.gguf")["blk.0.attn_qkv.weight"]
    q = own["decoder.layers.0.branches.attn.body.q.weight"]
    assert torch.equal(stored, torch.cat([q.dense(), own[name.replace(".v.", ".k.")].dense(), weight.dense()]))  # type: ignore[operator]


def test_stated_numbers_win(tmp_path: Path) -> None:
    """dtype= takes blocks apart, as it did; with quantize= it is a contradiction."""
    cutaway.save(wide(), tmp_path / "one.gguf", format="gguf", quantize="q8_0")
    model = cutaway.load(tmp_path / "one.gguf")
    cutaway.save(model, tmp_path / "two.gguf", format="gguf", dtype="fp32")
    assert {kind for kind, _ in raws(tmp_path / "two.gguf").values()} == {"F32"}
    numbers = plain(tmp_path / "one.gguf")
    assert all(torch.equal(x, numbers[key]) for key, x in plain(tmp_path / "two.gguf").items())
    with pytest.raises(RequestError) as caught:
        cutaway.save(model, tmp_path / "no.gguf", format="gguf", dtype="fp32", quantize="q8_0")
    assert caught.value.field == "dtype"


# ---- types --------------------------------------------------------------------------------------------------


def test_rows_that_are_not_whole_blocks(tmp_path: Path) -> None:
    """256 → 32 → none at all; each said by name."""
    config = {**tiny.config("llama"), "hidden_size": 64, "intermediate_size": 80, "vocab_size": 300}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
    model, losses = Model(tiny.transformer(config)), Losses()
    cutaway.save(model, tmp_path / "m.gguf", format="gguf", quantize="q4_k", losses=losses)
    kinds = {key: kind for key, (kind, _) in raws(tmp_path / "m.gguf").items()}
    assert kinds["blk.0.attn_q.weight"] == "Q5_0"
    assert kinds["blk.0.ffn_down.weight"] == "F32"  # 80 numbers
    assert ("blk.1.ffn_down.weight", "Q4_K", "F32", 80) in losses.others
    assert ("token_embd.weight", "Q4_K", "Q5_0", 64) in losses.others
    assert len(losses.others) == 2 * 7 + 2
    again = plain(tmp_path / "m.gguf")["blk.0.ffn_down.weight"]
    assert torch.equal(again, model.transformer.state_dict()["decoder.layers.0.branches.mlp.body.down.weight"])


def test_a_mix(tmp_path: Path) -> None:
    """By hand: Q4_K_M of 16 layers. Output, v and down get more bits in the first and last eighth and every third."""
    more = {0, 1, 4, 7, 10, 13, 14, 15}
    spec = wide(num_hidden_layers=16, tie_word_embeddings=False).spec
    mix = mix_named("Q4_K_M")
    at = "decoder.layers.{}.branches.{}.weight"
    for word in ("attn.body.v", "mlp.body.down"):
        found = {i for i in range(16) if mix.type_of([at.format(i, word)], spec).name == "Q6_K"}
        assert found == more
    assert mix.type_of(["head.weight"], spec).name == "Q6_K"
    assert mix.type_of(["embed.tokens"], spec).name == "Q4_K"
    assert mix.type_of([at.format(0, f"attn.body.{x}") for x in "qkv"], spec).name == "Q6_K"
    assert mix.type_of([at.format(0, "attn.body.q")], spec).name == "Q4_K"
    small = mix_named("q4_k_s")
    assert [small.type_of([at.format(i, "attn.body.v")], spec).name for i in (0, 3, 4)] == ["Q5_K", "Q5_K", "Q4_K"]
    assert [small.type_of([at.format(i, "mlp.body.down")], spec).name for i in (1, 2)] == ["Q5_K", "Q4_K"]


def test_names() -> None:
    for given, name in {
        "q8": "Q8_0",
        "Q4_K_M": "Q4_K_M",
        "q4-k-m": "Q4_K_M",
        "fp16": "F16",
        "bfloat16": "BF16",
    }.items():
        assert mix_named(given).name == name
    assert {mix_named(name).base for name in QUANTISED} == {BLOCK_TYPES[name] for name in QUANTISED}
    for wrong in ("q4_k_l", "iq4_xs", "q3_k_m", "int8", "", 4, None, ["q8_0"]):
        with pytest.raises(RequestError) as caught:
            mix_named(wrong)
        assert caught.value.field == "quantize"
    with pytest.raises(RequestError) as caught:
        mix_named("q4_k_l")
    assert "q4_k_" in (caught.value.hint or "")


def test_what_it_costs(tmp_path: Path) -> None:
    """Counts and errors of a type, against both files' numbers."""
    model, losses = wide(), Losses()
    cutaway.save(model, tmp_path / "one.gguf", format="gguf")
    cutaway.save(model, tmp_path / "two.gguf", format="gguf", quantize="q4_k_m", losses=losses)
    a, b = plain(tmp_path / "one.gguf"), plain(tmp_path / "two.gguf")
    kinds = {key: kind for key, (kind, _) in raws(tmp_path / "two.gguf").items() if kind != "F32"}
    assert {*kinds.values()} == {*losses.types} == {"Q4_K", "Q6_K"}
    for kind, loss in losses.types.items():
        names = [name for name, other in kinds.items() if other == kind]
        error = torch.cat([(a[name].double() - b[name].double()).flatten() for name in names]).abs()
        assert (loss.tensors, loss.numbers, loss.measured) == (len(names), error.numel(), error.numel())
        assert loss.nbytes == error.numel() // 256 * BLOCK_TYPES[kind].nbytes
        assert loss.largest == float(error.max())
        assert loss.mean == pytest.approx(float(error.mean()), rel=1e-9)
        size = torch.cat([a[name].double().flatten() for name in names]).square().mean().sqrt()
        assert loss.relative == pytest.approx(float(error.square().mean().sqrt() / size), rel=1e-9)


@needs_kernels
def test_matrices_of_the_type_keep_their_bytes(tmp_path: Path) -> None:
    """Quantizing twice does not round twice where the type is the same."""
    cutaway.save(wide(), tmp_path / "one.gguf", format="gguf", quantize="q4_k_s")
    losses = Losses()
    cutaway.save(
        cutaway.load(tmp_path / "one.gguf"), tmp_path / "two.gguf", format="gguf", quantize="q4_k", losses=losses
    )
    one, two = raws(tmp_path / "one.gguf"), raws(tmp_path / "two.gguf")
    same = [name for name, (kind, _) in one.items() if kind == "Q4_K"]
    assert same
    assert all(np.array_equal(one[name][1], two[name][1]) for name in same)
    assert losses.types["Q4_K"].tensors - len(same) == len([k for k, _ in one.values() if k in ("Q5_K", "Q6_K")])
    assert 0 < losses.types["Q4_K"].measured < losses.types["Q4_K"].numbers


@needs_kernels
def test_only_whole_rows_are_moved(tmp_path: Path) -> None:
    """What a rule would turn round is taken apart."""
    cutaway.save(wide(), tmp_path / "m.gguf", format="gguf", quantize="q8_0")
    own = cutaway.load(tmp_path / "m.gguf").transformer
    name = "decoder.layers.0.branches.attn.body.q.weight"
    weight, to = own.get_parameter(name), Target(None, BLOCK_TYPES["F32"])
    found = [
        planned(kind((name,), ("x",)), 0, "x", (256, 256), (weight,), own.spec, to) for kind in (Rename, Transpose)
    ]
    assert [(one.type.name, one.kept) for one in found] == [("Q8_0", True), ("F32", False)]
    turned = found[1].make((weight,)).numpy().view(np.float32)
    assert np.array_equal(turned, weight.dense().t().numpy())  # type: ignore[operator]


# ---- our own format -----------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m", "f16"])
@pytest.mark.parametrize("family", ["granite", "gpt_neox", "mixtral"])
def test_own_format_holds_blocks_of_any_family(family: str, kind: str, tmp_path: Path) -> None:
    """Read again: stored as they are, the numbers that the blocks stand for; saved again, the same bytes."""
    name = next(case for case in tiny.CASES if tiny.config(case)["model_type"] == family)
    model = Model(tiny.transformer(name))
    losses = Losses()
    cutaway.save(model, tmp_path / "one", format="cutaway", quantize=kind, losses=losses)
    again = cutaway.load(tmp_path / "one")
    own, read = model.transformer.state_dict(), again.transformer.state_dict()
    stored = {name for name, tensor in read.items() if isinstance(tensor, Stored)}
    assert len(stored) == sum(loss.tensors for loss in losses.types.values()) > 0
    for key, tensor in read.items():
        if key not in stored:
            assert torch.equal(tensor, own[key])
    size = sum(t.nbytes if n not in stored else t.raw.nbytes for n, t in read.items())  # type: ignore[attr-defined]
    with SafetensorsFile(tmp_path / "one" / "model.safetensors") as file:
        assert sum(file.info(n).nbytes for n in file.names()) == size
    dense = cutaway.load(tmp_path / "one", dtype="float32")
    for key, tensor in dense.transformer.state_dict().items():
        assert not isinstance(tensor, Stored)
        assert torch.equal(tensor, read[key].dense() if key in stored else read[key])  # type: ignore[operator]
        if key in stored and read[key].format == 8:  # type: ignore[attr-defined]
            rows = gguf.quantize(own[key].numpy(), gguf.GGMLQuantizationType.Q8_0)
            assert np.array_equal(read[key].raw.numpy(), rows)  # type: ignore[attr-defined]
    cutaway.save(again, tmp_path / "two", format="cutaway")
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("one", "two")]
    assert weights[0] == weights[1]


def test_own_format_shows_its_types(tmp_path: Path) -> None:
    model = Model(tiny.transformer("granite"))
    cutaway.save(model, tmp_path / "m", format="cutaway", quantize="q5_0")
    with open_source(resolve(str(tmp_path / "m"))) as source:
        part = source.part("decoder.layers.0.attn.q")
        assert (part.type, part.shape) == ("Q5_0", tuple(model.transformer.state_dict()[part.full].shape))
        assert source.tensor(part).dtype is torch.float32
        assert source.tensor(part).shape == part.shape


def entry(value: Any, name: str = "decoder.norm.weight") -> str:
    return json.dumps({name: value})


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"x": ["Q8_0", 32]}', entry(["Q8_0"]), entry(["Q9", 32]), entry(["Q8_0", 0]), entry(["Q8_0", True]),
     entry(["Q8_0", 64]), entry("Q8_0"), entry(["Q4_K", 32]), entry(["F32", 32.0]),
     entry(["Q8_0", 64], "embed.tokens"), entry(["Q4_0", 32], "embed.tokens"), entry(["Q8_0", 33], "embed.tokens")],
)  # fmt: skip
def test_headers_that_lie(text: str, tmp_path: Path) -> None:
    """About tensors that are not there, types, widths, or what is no bytes: an error before anything is built."""
    cutaway.save(Model(tiny.transformer("granite")), tmp_path / "m", format="cutaway", quantize="q8_0")
    path = tmp_path / "m" / "model.safetensors"
    with SafetensorsFile(path) as file:
        tensors = {name: file.read(name) for name in file.names()}
    save_safetensors(path, tensors, {"format": "pt", KEY: text})
    with pytest.raises(FormatError):
        cutaway.load(tmp_path / "m")


# ---- refused, or whole or not at all ------------------------------------------------------------------------


def test_refused(tmp_path: Path) -> None:
    model = wide()
    cases: list[tuple[type[CutawayError], str, dict[str, Any]]] = [
        (RequestError, "quantize", {"format": "hf", "quantize": "q8_0"}),
        (RequestError, "quantize", {"format": "gguf", "quantize": "q2_k"}),
        (RequestError, "quantize", {"format": "cutaway", "quantize": 8}),
    ]
    for error, field, how in cases:
        with pytest.raises(error) as caught:
            cutaway.save(model, tmp_path / "x", **how)
        assert caught.value.field == field
    with pytest.raises(UnsupportedModelError) as unsupported:
        cutaway.save(Model(tiny.transformer("granite")), tmp_path / "x", format="gguf", quantize="q8_0")
    assert "cutaway" in str(unsupported.value)
    for value in (float("nan"), float("inf"), 1e6):
        with torch.no_grad():
            model.transformer.get_parameter("decoder.layers.1.branches.mlp.body.up.weight")[3, 4] = value
        for how, field in (
            ("gguf", "blk.1.ffn_up.weight"),
            ("cutaway", "decoder.layers.1.branches.mlp.body.up.weight"),
        ):
            with pytest.raises(DtypeError) as found:
                cutaway.save(model, tmp_path / how, format=how, quantize="q5_1")
            assert found.value.field == field
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert left == []


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file stays."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError):
        cutaway.save(wide(), path, format="gguf", quantize="q4_0")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("place", [0.1, 0.5, 0.95])
def test_a_bit_that_fell_over(place: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a block, on the way to the disk: seen before the file takes its name."""
    import cutaway.formats.gguf_write as module

    real = module._compare

    def damaging(written: str, *arguments: Any) -> None:
        with open(written, "r+b") as file:
            at = int(os.path.getsize(written) * place)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        real(written, *arguments)

    monkeypatch.setattr(module, "_compare", damaging)
    with pytest.raises(CutawayError):
        cutaway.save(wide(), tmp_path / "m.gguf", format="gguf", quantize="q8_0")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_killed_in_the_middle(tmp_path: Path) -> None:
    """While a later tensor is being quantized, and at the last system calls: the old file, whole."""
    path = tmp_path / "m.gguf"
    cutaway.save(gguf_models.model("llama"), path, format="gguf")
    old = path.read_bytes()
    program = f"""
        import os, signal, sys
        sys.path.insert(0, {str(REPOSITORY)!r})
        import cutaway
        from cutaway.checkpoints import quantised
        from tests.checkpoints import gguf_models
        model, left = gguf_models.model("qwen2"), 0
        def counted(real):
            def call(*args, **kwargs):
                global left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)
            return call
        quantised.quantise = counted(quantised.quantise)
        os.replace = counted(os.replace)
        for n in (0, 5, 1000):
            pid = os.fork()
            if pid == 0:
                left = n
                cutaway.save(model, {str(path)!r}, format="gguf", quantize="q4_1")
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
            died = line.split()[1] == str(int(signal.SIGKILL))
            killed += died
            assert (path.read_bytes() == old) is died
            run.stdin.write("\n")
            run.stdin.flush()
    assert (run.returncode, killed) == (0, 2)
    assert cutaway.load(path).spec.family == "qwen2"


def test_a_number_that_no_block_holds_is_named(tmp_path: Path) -> None:
    """By the tensor and the file; and a type by any case."""
    folder = tiny.write(tiny.config("llama"), tmp_path / "m")
    assert cutaway.load(folder, quantize="INT8").transformer.get_submodule("decoder.layers.0").branches is not None
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DtypeError) as caught:
        cutaway.load(folder, quantize="q8_0")
    assert caught.value.field == "decoder.layers.1.branches.mlp.body.up.weight"


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3"])
def test_what_stays_as_numbers_is_said(tmp_path: Path, name: str) -> None:
    """Rows that are not whole blocks of 32, experts' too: nobody counts on memory that is not saved."""
    folder = tiny.write(tiny.config(name), tmp_path / "m")
    with pytest.warns(UserWarning, match=r"matrices of .* MiB stay as numbers beside Q4_0") as said:
        model = cutaway.load(folder, quantize="q4_0").transformer
    numbers = [key for key, x in model.named_parameters() if x.dim() > 1 and not isinstance(x, Stored)]
    numbers = [key for key in numbers if ".router." not in key]  # which are left on purpose
    assert numbers
    assert f": {len(numbers)} matrices" in str(said[0].message)


def test_a_file_does_not_hold_the_rounding_of_products(tmp_path: Path) -> None:
    folder = tiny.write(tiny.config("llama"), tmp_path / "m")
    model = cutaway.load(folder, quantize="int8")
    with pytest.warns(UserWarning, match="load it with quantize='int8'"):
        cutaway.save(model, tmp_path / "again.gguf", format="gguf")
    twice = cutaway.load(tmp_path / "again.gguf", quantize="int8")
    assert any(isinstance(x, Stored) and x.rounds for x in twice.transformer.parameters())
    ids = [3, 1, 4, 1, 5]
    assert torch.equal(model.logits(ids), twice.logits(ids))
