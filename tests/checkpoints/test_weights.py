"""Names and shapes: nothing missing, nothing left over, nothing of another shape (cases C08 and C09)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.reference import tiny
from torch import Tensor

from cutaway.checkpoints.load import load_checkpoint
from cutaway.checkpoints.resolve import Resolved
from cutaway.checkpoints.save import save_folder
from cutaway.errors import CutawayError, ShapeMismatch
from cutaway.families import family_of
from cutaway.models import Transformer

Tensors = dict[str, Tensor]


def load(folder: Path, **options: object) -> Transformer:
    return load_checkpoint(Resolved("folder", folder, ""), **options).transformer  # type: ignore[arg-type]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], Path]:
    def save(name: str) -> Path:
        save_folder(tiny.transformer(name), tmp_path / name)
        return tmp_path / name

    return save


def rewrite(folder: Path, change: Callable[[Tensors], Tensors | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, folder / "model.safetensors", {"format": "pt"})


def loss(model: Transformer) -> float:
    ids = tiny.ids(2, 20)
    with torch.no_grad():
        logits = model(ids)
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma3", "gpt2", "gpt2-untied"])
def test_prefixes_of_wrappers(name: str, saved: Callable[[str], Path]) -> None:
    """torch.compile and data-parallel training put a word before every name; both is known too."""
    folder = saved(name)
    before = loss(load(folder))
    plain = load_file(folder / "model.safetensors")
    for prefix in ("_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."):
        rewrite(folder, lambda _, prefix=prefix: {prefix + key: tensor for key, tensor in plain.items()})  # type: ignore[misc]
        assert loss(load(folder)) == before
    assert abs(before - math.log(64)) > 0.01  # the loss of a model that knows nothing


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "gpt-neox-sequential", "gptj"])
def test_a_body_without_its_prefix(name: str, saved: Callable[[str], Path]) -> None:
    folder = saved(name)
    before = loss(load(folder))
    base = family_of(tiny.CASES[name]["model_type"]).base_prefix
    rewrite(folder, lambda tensors: {key.removeprefix(base): tensor for key, tensor in tensors.items()})
    assert loss(load(folder)) == before


def test_an_unknown_prefix_is_refused(saved: Callable[[str], Path]) -> None:
    folder = saved("llama")
    plain = load_file(folder / "model.safetensors")
    for prefix in ("model.", "net.", "transformer."):
        rewrite(folder, lambda _, prefix=prefix: {prefix + key: tensor for key, tensor in plain.items()})  # type: ignore[misc]
        with pytest.raises(ShapeMismatch, match=r"tensors missing: .*; .* tensors unexpected: ") as caught:
            load(folder)
        assert "Nothing was loaded" in str(caught.value.hint)
    # One name that lacks the wrapper: then it is none.
    rewrite(folder, lambda _: {("module." if "norm" not in key else "") + key: t for key, t in plain.items()})
    with pytest.raises(ShapeMismatch):
        load(folder)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_one_too_many_or_too_few(name: str, saved: Callable[[str], Path]) -> None:
    """Each tensor in turn, of every family."""
    folder = saved(name)
    plain = load_file(folder / "model.safetensors")
    for key in plain:
        rewrite(folder, lambda _, key=key: {k: t for k, t in plain.items() if k != key})  # type: ignore[misc]
        with pytest.raises(ShapeMismatch) as caught:
            load(folder)
        assert caught.value.field == key
        assert f"1 tensor missing: {key}" in str(caught.value)
    rewrite(folder, lambda _: {**plain, "extra.weight": torch.ones(1)})
    with pytest.raises(ShapeMismatch, match=r"1 tensor unexpected: extra\.weight"):
        load(folder)


def test_wrong_shapes(saved: Callable[[str], Path]) -> None:
    """Too few rows; a [1, d] norm, although it would broadcast; a [d, 1] bias."""
    folder = saved("llama-biases")
    plain = load_file(folder / "model.safetensors")
    for key, shape in (
        ("model.embed_tokens.weight", (60, 32)),
        ("model.norm.weight", (1, 32)),
        ("model.norm.weight", (1,)),
        ("model.norm.weight", ()),
        ("model.layers.0.self_attn.q_proj.bias", (32, 1)),
        ("model.layers.0.self_attn.k_proj.weight", (32, 32)),
        ("lm_head.weight", (64, 32, 1)),
    ):
        rewrite(folder, lambda _, key=key, shape=shape: {**plain, key: torch.ones(shape)})  # type: ignore[misc]
        with pytest.raises(ShapeMismatch, match="wrong shape") as caught:
            load(folder)
        assert caught.value.field == key
        assert caught.value.expected == str(list(plain[key].shape))
        assert caught.value.got == str(list(shape))


def test_wrong_shapes_of_joined_and_turned_tensors(saved: Callable[[str], Path]) -> None:
    folder = saved("gpt2")
    plain = load_file(folder / "model.safetensors")
    for key, shape in (
        ("transformer.h.0.attn.c_attn.weight", (96, 32)),
        ("transformer.h.0.attn.c_attn.weight", (32, 95)),
        ("transformer.h.0.attn.c_attn.weight", (32,)),
        ("transformer.h.0.attn.c_attn.bias", (1, 96)),
        ("transformer.h.0.mlp.c_fc.weight", (128, 32)),
        ("transformer.h.0.mlp.c_fc.weight", (2, 3, 4)),
    ):
        rewrite(folder, lambda _, key=key, shape=shape: {**plain, key: torch.ones(shape)})  # type: ignore[misc]
        with pytest.raises(ShapeMismatch) as caught:
            load(folder)
        assert caught.value.field == key
        assert caught.value.expected == str(list(plain[key].shape))


def test_a_wrong_expert_is_named(saved: Callable[[str], Path]) -> None:
    folder = saved("mixtral-window")
    plain = load_file(folder / "model.safetensors")
    at = "model.layers.1.block_sparse_moe"
    for key, shape in (
        (f"{at}.experts.3.w2.weight", (64, 32)),
        (f"{at}.experts.0.w1.weight", (64,)),
        (f"{at}.gate.weight", (4, 32)),
    ):
        rewrite(folder, lambda _, key=key, shape=shape: {**plain, key: torch.ones(shape)})  # type: ignore[misc]
        with pytest.raises(ShapeMismatch, match="wrong shape") as caught:
            load(folder)
        assert caught.value.field == key
        assert caught.value.expected == str(list(plain[key].shape))
        assert caught.value.got == str(list(shape))


def test_a_square_matrix_turned_is_another_model(saved: Callable[[str], Path]) -> None:
    """Shapes cannot tell; logits do: why every family is compared with its reference."""
    folder, key = saved("gpt2"), "transformer.h.0.attn.c_proj.weight"
    before = loss(load(folder))
    rewrite(folder, lambda tensors: {**tensors, key: tensors[key].t().contiguous()})
    assert abs(loss(load(folder)) - before) > 1e-3


def test_nothing_is_half_loaded(saved: Callable[[str], Path]) -> None:
    """Names and shapes are compared before the first tensor is read."""
    from cutaway.checkpoints.folder import FolderSource
    from cutaway.checkpoints.weights import fill

    class Counting(FolderSource):
        reads = 0

        def read(self, name: str) -> Tensor:
            self.reads += 1
            return super().read(name)

    folder = saved("llama")
    rewrite(folder, lambda tensors: {**tensors, "model.norm.weight": torch.ones(3)})
    spec = tiny.spec_of(tiny.config("llama"))
    source = Counting(folder, mmap=False)
    with torch.device("meta"):
        model = Transformer(spec)
    with pytest.raises(CutawayError):
        fill(
            model,
            family_of("llama").rules(spec),
            source,
            path=str(folder),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
    assert source.reads == 0
    assert all(parameter.is_meta for parameter in model.parameters())
    source.close()


def test_dtype_progress_and_map(saved: Callable[[str], Path]) -> None:
    folder = saved("qwen3")
    steps: list[tuple[int, int]] = []
    model = load(folder, dtype="bf16", progress=lambda done, total: steps.append((done, total)))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    mapped = load(folder, mmap=True)
    with torch.no_grad():
        assert torch.equal(mapped(tiny.ids(1, 9)), load(folder)(tiny.ids(1, 9)))


def test_older_files_carry_masks_and_tables(saved: Callable[[str], Path]) -> None:
    """Tensors that are known and of no use are left behind."""
    for name, extra in (
        (
            "gpt2",
            {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64), "transformer.h.1.attn.masked_bias": torch.ones(())},
        ),
        ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        (
            "gpt-neox",
            {
                "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 64, 64).bool(),
                "gpt_neox.layers.1.attention.masked_bias": torch.ones(()),
                "gpt_neox.layers.2.attention.rotary_emb.inv_freq": torch.ones(2),
            },
        ),
        (
            "gptj",
            {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64), "transformer.h.1.attn.masked_bias": torch.ones(())},
        ),
        ("phi", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}),
    ):
        folder = saved(name)
        before = loss(load(folder))
        rewrite(folder, lambda tensors, extra=extra: {**tensors, **extra})  # type: ignore[misc]
        assert loss(load(folder)) == before
