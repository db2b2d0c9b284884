"""Experts as a file has them: held in blocks, computed from blocks, written again as they are.

What transformers and llama.cpp make of them is in tests/reference/test_stored_experts.py.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoints.test_quantise import raws
from tests.reference import tiny

import cutaway
from cutaway.checkpoints.quantised import Losses
from cutaway.errors import ConfigError, DtypeError, RequestError
from cutaway.formats.gguf_write import write_gguf
from cutaway.formats.mixes import mix_named
from cutaway.formats.quantise import QUANTISED, quantise
from cutaway.formats.quants import BLOCK_TYPES
from cutaway.kernels import Stored, library
from cutaway.kernels.stored import FORMATS
from cutaway.measure import step_bytes, weight_bytes
from cutaway.model import Model
from cutaway.modules.moe import Moe

pytestmark = pytest.mark.skipif(library() is None, reason="stored weights need the native library")
FAMILIES = ("mixtral", "qwen3-moe-normalised")
NAMES = ("gate", "up", "down")
IDS = list(range(3, 40))


def experts(name: str = "mixtral", wide: int = 64, **changes: Any) -> Model:
    """A mixture whose rows are whole blocks, of the kind that a GGUF can hold."""
    values = {**tiny.config(name), "hidden_size": wide, "intermediate_size": 2 * wide, "vocab_size": 320}
    if name.startswith("qwen3"):
        values |= {"moe_intermediate_size": 2 * wide, "attention_bias": False}
    return Model(tiny.transformer({**values, **changes}))


def held(model: Model) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.transformer.named_parameters() if p.dim() == 3}


LONG = {"Q5_K", "Q6_K"}  # to be found, as Q4_K is


def all_stored(model: Model) -> bool:
    return all(isinstance(weight, Stored) for weight in held(model).values())


# ---- held ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*QUANTISED, "f16", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_gguf_s_experts_stay_in_blocks(name: str, kind: str, tmp_path: Path) -> None:
    """The file's bytes and no floats beside them, before a pass and after; the logits of the numbers."""
    model = experts(name, 256 if kind.endswith("K") else 64)
    cutaway.save(model, tmp_path / "m.gguf", format="gguf", quantize=kind)
    loaded = cutaway.load(tmp_path / "m.gguf")
    at = "decoder.layers.0.branches.moe.body"
    for _ in range(2):
        assert len(held(loaded)) == 3 * model.spec.n_layers
        for full, weight in held(loaded).items():
            assert isinstance(weight, Stored)
            own = model.transformer.get_parameter(full)
            assert weight.shape == own.shape
            size, nbytes = FORMATS[weight.format]
            assert weight.raw.nbytes == own.numel() // size * nbytes
            for one, raw in zip(weight.each(), weight.raw, strict=True):
                assert one.raw.data_ptr() == raw.data_ptr()  # where it lies, no copy
        stored = sum(w.raw.nbytes for w in loaded.transformer.parameters() if isinstance(w, Stored))
        plain = sum(w.nbytes for w in loaded.transformer.parameters() if not isinstance(w, Stored))
        assert weight_bytes(loaded.transformer) == stored + plain
        assert plain == sum(w.nbytes for n, w in loaded.transformer.named_parameters() if "norm" in n or "router" in n)
        logits = loaded.logits(IDS)
    found = raws(tmp_path / "m.gguf")
    for part in NAMES:
        type_, bytes_ = found[f"blk.0.ffn_{part}_exps.weight"]
        assert type_ == kind.upper()
        assert np.array_equal(loaded.transformer.get_parameter(f"{at}.{part}").raw.flatten(0, 1).numpy(), bytes_)  # type: ignore[operator]
    assert found["blk.0.ffn_gate_inp.weight"][0] == "F32"
    dense = cutaway.load(tmp_path / "m.gguf", dtype="float32")
    assert not any(isinstance(w, Stored) for w in dense.transformer.parameters())
    torch.testing.assert_close(logits, dense.logits(IDS), rtol=1e-4, atol=1e-4)


def test_no_floats_of_the_experts_are_made_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when a file is read nor when it answers: nothing asks for the numbers."""
    cutaway.save(experts(), tmp_path / "m.gguf", format="gguf", quantize="q8_0")

    def refuse(self: Stored) -> torch.Tensor:
        raise AssertionError(f"the numbers of {self} were made")

    monkeypatch.setattr(Stored, "dense", refuse)
    model = cutaway.load(tmp_path / "m.gguf")
    model.generate(IDS, max_tokens=3)
    model.trace(IDS, "*.router_weights", "*.experts", max_tokens=2)


@pytest.mark.parametrize(
    "kind", [*(pytest.param(k, marks=pytest.mark.slow) if k in LONG else k for k in QUANTISED), "int8"]
)
def test_quantize_when_loading(kind: str, tmp_path: Path) -> None:
    """From numbers in a folder, without a warning; routers, which choose, keep theirs."""
    model = experts(wide=256)
    cutaway.save(model, tmp_path / "m")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = cutaway.load(tmp_path / "m", quantize=kind)
    assert all_stored(loaded)
    cutaway.save(model, tmp_path / "m.gguf", format="gguf")
    again = held(cutaway.load(tmp_path / "m.gguf", quantize=kind))  # from numbers in a GGUF, the same
    assert all(torch.equal(weight.raw, again[full].raw) for full, weight in held(loaded).items())  # type: ignore[attr-defined]
    own = dict(model.transformer.named_parameters())
    for full, weight in loaded.transformer.named_parameters():
        if "norm" in full or "router" in full:
            assert torch.equal(weight, own[full])
            continue
        assert isinstance(weight, Stored)
        assert weight.rounds == (kind == "int8")
        raw, number = weight.blocks()
        assert raw.shape[:-1] == own[full].shape[:-1]
        if kind in ("int8", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"):
            wanted = gguf.quantize(own[full].detach().numpy(), gguf.GGMLQuantizationType(number))
            assert np.array_equal(raw.numpy(), wanted)


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, and the answers of blocks; blocks that are asked for are refused with the reason."""
    cutaway.save(experts(), tmp_path / "m.gguf", format="gguf", quantize="q4_1")
    stored = cutaway.load(tmp_path / "m.gguf")
    monkeypatch.setattr("cutaway.checkpoints.load.library", lambda: None)
    monkeypatch.setattr("cutaway.checkpoints.load.missing", lambda: "switched off")
    plain = cutaway.load(tmp_path / "m.gguf")
    plain.transformer.use_kernels(False)
    assert not any(isinstance(weight, Stored) for weight in plain.transformer.parameters())
    torch.testing.assert_close(plain.logits(IDS), stored.logits(IDS), rtol=1e-4, atol=1e-4)
    assert plain.generate(IDS, max_tokens=8).tokens == stored.generate(IDS, max_tokens=8).tokens
    with pytest.raises(RequestError) as caught:
        cutaway.load(tmp_path / "m.gguf", quantize="q8_0")
    assert caught.value.hint == "switched off"


def test_a_step_reads_the_blocks_that_are_chosen(tmp_path: Path) -> None:
    cutaway.save(experts(), tmp_path / "m.gguf", format="gguf", quantize="q8_0")
    model = cutaway.load(tmp_path / "m.gguf").transformer
    blocks = sum(w.raw.nbytes for w in held(Model(model)).values())  # type: ignore[attr-defined]
    rest = weight_bytes(model) - model.embed.table.raw.nbytes - blocks  # type: ignore[operator]
    assert step_bytes(model) == rest + blocks * 2 // 5


def test_several_matrices_as_one_tensor() -> None:
    """Copied, sent to another process, or taken apart."""
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 9, (3, 32, 68), dtype=np.uint8))
    stored = Stored(raw, 8, 64)
    make, given = stored.__reduce_ex__(4)  # what pickle asks for
    for twin in (copy.deepcopy(stored), make(*given), stored.detach()):
        assert isinstance(twin, Stored)
        assert twin.shape == (3, 32, 64)
        assert torch.equal(twin.dense(), stored.dense())
    for one, other in zip(stored.unbind(), stored.dense(), strict=True):
        assert isinstance(one, Stored)
        assert torch.equal(one.dense(), other)
    assert isinstance(stored[-1], Stored)
    assert torch.equal(stored[1].dense(), stored.dense()[1])  # type: ignore[operator]
    assert torch.equal(stored[1, 3], stored.dense()[1, 3])
    with pytest.raises(IndexError):
        stored[3]
    with pytest.raises(RuntimeError):  # as PyTorch has it for three axes of numbers
        torch.nn.functional.linear(torch.ones(2, 64), stored)
    with pytest.raises(ValueError, match="not rows"):
        Stored(raw[None], 8, 64)


# ---- written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_bytes_of_the_formats_own_package(name: str, kind: str, tmp_path: Path) -> None:
    """Every tensor, by its name in llama.cpp; and the same bytes when it is loaded so and then saved."""
    model, losses = experts(name), Losses()
    cutaway.save(model, tmp_path / "folder")
    cutaway.save(model, tmp_path / "plain.gguf", format="gguf")
    cutaway.save(model, tmp_path / "m.gguf", format="gguf", quantize=kind, losses=losses)
    numbers = {str(t.name): t.data for t in gguf.GGUFReader(tmp_path / "plain.gguf").tensors}
    found = {str(t.name): t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert found.keys() == numbers.keys()
    n, d, d_ff = 5 if name == "mixtral" else 6, 64, 128
    for i in range(model.spec.n_layers):
        for part, shape in (("gate", (n, d_ff, d)), ("up", (n, d_ff, d)), ("down", (n, d, d_ff))):
            key = f"blk.{i}.ffn_{part}_exps.weight"
            assert numbers[key].shape == shape
            assert found[key].tensor_type.name == kind.upper()
            assert np.array_equal(found[key].data, gguf.quantize(numbers[key], gguf.GGMLQuantizationType[kind.upper()]))
        assert np.array_equal(found[f"blk.{i}.ffn_gate_inp.weight"].data, numbers[f"blk.{i}.ffn_gate_inp.weight"])
    (loss,) = losses.types.values()
    assert loss.measured == loss.numbers == sum(t.n_elements for t in found.values() if t.tensor_type.name != "F32")
    cutaway.save(cutaway.load(tmp_path / "folder", quantize=kind), tmp_path / "two.gguf", format="gguf")
    assert (tmp_path / "two.gguf").read_bytes().endswith((tmp_path / "m.gguf").read_bytes()[-loss.nbytes // 2 :])
    one, two = raws(tmp_path / "m.gguf"), raws(tmp_path / "two.gguf")
    assert all(one[key][0] == two[key][0] and np.array_equal(one[key][1], two[key][1]) for key in one)


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m", "f16", "int8"])
def test_saved_again(kind: str, tmp_path: Path) -> None:
    """To GGUF and our own format bit for bit; to a Hugging Face folder the numbers that the blocks stand for."""
    model = experts(wide=256)
    if kind == "int8":
        cutaway.save(model, tmp_path / "plain")
        one = cutaway.load(tmp_path / "plain", quantize=kind)
        warnings.simplefilter("ignore")
    else:
        cutaway.save(model, tmp_path / "one.gguf", format="gguf", quantize=kind)
        one = cutaway.load(tmp_path / "one.gguf")
    assert all_stored(one)
    cutaway.save(one, tmp_path / "two.gguf", format="gguf")
    cutaway.save(one, tmp_path / "own", format="cutaway")
    cutaway.save(one, tmp_path / "hf")
    if kind != "int8":
        assert (tmp_path / "two.gguf").read_bytes() == (tmp_path / "one.gguf").read_bytes()
    again, own = cutaway.load(tmp_path / "two.gguf"), cutaway.load(tmp_path / "own")
    for full, weight in held(one).items():
        for other in (again, own):
            twin = other.transformer.get_parameter(full)
            assert isinstance(weight, Stored)
            assert isinstance(twin, Stored)
            assert all(torch.equal(torch.tensor(a), torch.tensor(b)) if isinstance(a, int) else torch.equal(a, b)
                       for a, b in zip(weight.blocks(), twin.blocks(), strict=True))  # fmt: skip
    folder = load_file(tmp_path / "hf" / "model.safetensors")
    for e in range(5):
        stored = one.transformer.get_parameter("decoder.layers.1.branches.moe.body.down")
        wanted = again.transformer.get_parameter("decoder.layers.1.branches.moe.body.down").dense()[e]  # type: ignore[operator]
        assert isinstance(stored, Stored)
        assert torch.equal(folder[f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight"], wanted)


def test_a_mix() -> None:
    """By hand, as llama.cpp has it: where there are eight experts attention gets more bits, ``down`` as elsewhere."""
    at = "decoder.layers.{}.branches.{}".format
    for n in (5, 8):
        spec = experts(num_hidden_layers=8, num_local_experts=n).spec
        mix, small, five = (mix_named(name) for name in ("q4_k_m", "q4_k_s", "q5_k_m"))
        more = {i for i in range(8) if mix.type_of([at(i, "moe.body.down")], spec).name == "Q6_K"}
        assert more == {0, 3, 6, 7}
        assert [mix.type_of([at(1, f"moe.body.{part}")], spec).name for part in NAMES] == ["Q4_K"] * 3
        assert small.type_of([at(0, "moe.body.down")], spec).name == "Q5_K"
        found = [
            [m.type_of([at(1, f"attn.body.{part}.weight")], spec).name for part in ("q", "k", "v", "out")]
            for m in (mix, small, five)
        ]
        if n == 8:
            assert found == [["Q4_K", "Q8_0", "Q8_0", "Q5_K"]] * 2 + [["Q5_K", "Q8_0", "Q8_0", "Q5_K"]]
        else:
            assert found == [["Q4_K"] * 4, ["Q4_K", "Q4_K", "Q5_K", "Q4_K"], ["Q5_K"] * 4]


def test_a_router_that_a_file_has_in_blocks(tmp_path: Path) -> None:
    """Other programs write such: it stays so, and is numbers again where matrices are quantized anew."""
    model = experts()
    cutaway.save(model, tmp_path / "m", format="cutaway")
    loaded = cutaway.load(tmp_path / "m", quantize="q8_0")
    module = loaded.transformer.get_submodule("decoder.layers.0.branches.moe.body.router")
    numbers = model.transformer.get_submodule("decoder.layers.0.branches.moe.body.router").weight.detach()
    router = Stored(quantise(numbers, BLOCK_TYPES["Q8_0"]), 8, 64)
    module.weight = torch.nn.Parameter(router, requires_grad=False)
    full = "decoder.layers.0.branches.moe.body.router.weight"
    cutaway.save(loaded, tmp_path / "own", format="cutaway")
    assert isinstance(cutaway.load(tmp_path / "own").transformer.get_parameter(full), Stored)
    cutaway.save(loaded, tmp_path / "anew", format="cutaway", quantize="q4_0")
    cutaway.save(loaded, tmp_path / "m.gguf", format="gguf")
    for path in (tmp_path / "anew", tmp_path / "m.gguf"):
        assert torch.equal(cutaway.load(path).transformer.get_parameter(full), router.dense())


def test_an_expert_that_no_block_holds_is_named(tmp_path: Path) -> None:
    model = experts()
    with torch.no_grad():
        model.transformer.get_parameter("decoder.layers.1.branches.moe.body.up")[3, 4, 5] = float("nan")
    with pytest.raises(DtypeError) as caught:
        cutaway.save(model, tmp_path / "m.gguf", format="gguf", quantize="q8_0")
    assert caught.value.field == "blk.1.ffn_up_exps.weight"


def test_what_a_gguf_cannot_say_of_experts(tmp_path: Path) -> None:
    """What llama.cpp would compute otherwise is refused by name."""
    for model, field in (
        (experts(sliding_window=8), "sliding_window"),
        (experts(hidden_act="gelu"), "activation"),
        (experts("qwen3-moe"), "normalised"),
        (experts("qwen3-moe-normalised", attention_bias=True), "bias"),
        (experts("qwen3-moe-normalised", mlp_only_layers=[1]), "branches"),
    ):
        with pytest.raises(ConfigError) as caught:
            cutaway.save(model, tmp_path / "m.gguf", format="gguf")
        assert field in (caught.value.field or "")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_that_are_missing_or_wrong(name: str, tmp_path: Path) -> None:
    """A file that leaves out how many experts a token goes to, or has other experts than it says."""
    import cutaway.checkpoints.gguf_save as module

    model = experts(name)
    real = module.write_gguf
    arch = "llama" if name == "mixtral" else "qwen3moe"
    for word, value in (
        ("expert_used_count", None),
        ("expert_used_count", 0),
        ("expert_used_count", 9),
        ("expert_count", 3),
        *([("expert_feed_forward_length", None)] if name != "mixtral" else []),
    ):

        def writing(path: Path, metadata: Any, tensors: Any, key=f"{arch}.{word}", value=value, **how: Any) -> None:  # type: ignore[no-untyped-def]
            metadata = {**metadata, key: ("u32", value)}
            write_gguf(path, {k: v for k, v in metadata.items() if v[1] is not None}, tensors, **how)

        module.write_gguf = writing  # type: ignore[assignment]
        try:
            cutaway.save(model, tmp_path / "m.gguf", format="gguf")
        finally:
            module.write_gguf = real
        with pytest.raises(cutaway.CutawayError) as caught:
            cutaway.load(tmp_path / "m.gguf")
        assert caught.value.path == str(tmp_path / "m.gguf")
        assert "exp" in (caught.value.field or "") or "ffn_gate_inp" in (caught.value.field or "")


# ---- gradients ----------------------------------------------------------------------------------------------


def test_gradients_pass_through_and_blocks_do_not_learn(tmp_path: Path) -> None:
    """Those of norms, routers and tokens are those of the numbers; experts are asked for none."""
    cutaway.save(experts(), tmp_path / "m.gguf", format="gguf", quantize="q8_0")
    stored, dense = cutaway.load(tmp_path / "m.gguf"), cutaway.load(tmp_path / "m.gguf", dtype="float32")
    ids, positions = cutaway.pad([IDS, IDS[:9]])
    grads = []
    for model in (stored, dense):
        (model.transformer.train()(ids, positions) ** 2).mean().backward()
        grads.append({n: p.grad for n, p in model.transformer.named_parameters() if not n.endswith(NAMES)})
    learnt = [name for name, grad in grads[0].items() if grad is not None]
    assert sum("router" in name for name in learnt) == stored.spec.n_layers
    for name in learnt:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-3, atol=1e-5)
    for weight in held(stored).values():
        assert weight.grad is None
        with pytest.raises(RequestError, match="dtype='float32'"):
            weight.requires_grad_()
    for module in stored.transformer.modules():
        if isinstance(module, Moe):
            with pytest.raises(RequestError, match="no gradient of their own"):
                module.requires_grad_()
