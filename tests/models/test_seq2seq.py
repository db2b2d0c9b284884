"""Encoder–decoders: what can be seen of them, the encoder's work done once, and the Transformer of 2017."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.reference import tiny_seq2seq as tiny
from torch import Tensor, nn

from cutaway.errors import ContextExceeded, RequestError
from cutaway.inspection import Recorder
from cutaway.models import Transformer
from cutaway.models.init import built
from cutaway.spec.names import axis_sizes, tap_names
from cutaway.spec.recipe import expand

SIZES = {"batch": 2, "query": 5, "key": 5, "source": 7, "source_key": 7}


def seen(model: Transformer, names: list[str], edits: dict[str, list[Callable[[Tensor], Tensor]]] | None = None):  # type: ignore[no-untyped-def]
    """A source of 7 and a target of 5, watched: what was kept, and the logits."""
    tap = Recorder(names, edits)
    logits = model(tiny.ids(2, 5, seed=2), source=model.read(tiny.ids(2, 7), tap=tap), tap=tap)
    return tap.kept, logits


@pytest.mark.parametrize("how", ["fused", "explicit", "blockwise"])
@pytest.mark.parametrize("name", tiny.FAMILIES)
@torch.no_grad()
def test_attention_of_all_three_kinds(name: str, how: str) -> None:
    """Case I08: encoder [B,h,7,7], decoder [B,h,5,5], cross [B,h,5,7]; rows sum to one."""
    model = tiny.transformer(name)
    model.attention = how  # type: ignore[assignment]
    wanted = {"encoder.layers.{}.attn": (7, 7), "decoder.layers.{}.attn": (5, 5), "decoder.layers.{}.cross": (5, 7)}
    names = {
        f"{at.format(i)}.weights": shape
        for at, shape in wanted.items()
        for i in range(len(model.spec.stacks[at.partition(".")[0]].layers))
    }
    kept, _ = seen(model, [*names])
    for key, shape in names.items():
        [weights] = kept[key]
        assert weights.shape == (2, axis_sizes(model.spec, key)["head"], *shape)
        assert float((weights.sum(-1) - 1).abs().max()) <= 1e-5
        assert float(weights.std()) > 1e-3
    for key in (key for key in names if key.startswith("decoder") and ".attn." in key):
        assert not kept[key][0].triu(1).any()


@pytest.mark.parametrize("name", tiny.FAMILIES)
@torch.no_grad()
def test_every_quantity_by_name(name: str) -> None:
    """Each is there once and has the shape that its axes say; editing it to itself changes nothing."""
    model = tiny.transformer(name)
    axes = tap_names(model.spec)
    kept, logits = seen(model, [*axes])
    for key, words in axes.items():
        sizes = SIZES | axis_sizes(model.spec, key)
        assert [tuple(value.shape) for value in kept[key]] == [tuple(sizes[word] for word in words)], key
    model.attention = "explicit"
    alone = [key for key in axes if ".layers." not in key or key.split(".")[2] == "0"]
    for edits in ({}, {key: [lambda x: x.clone()] for key in axes}, *({key: [lambda x: x.clone()]} for key in alone)):
        # Some are computed another way when they are asked for.
        assert float((seen(model, [], edits)[1] - logits).abs().max()) <= 1e-4, edits


@torch.no_grad()
def test_edits_reach_the_decoder() -> None:
    """An edit of the encoder, of the source's values, of a cross pattern: each changes what comes out."""
    model = tiny.transformer("bart")
    _, plain = seen(model, [])
    for key in (
        "source_embed.out",
        "encoder.layers.1.mlp.out",
        "decoder.layers.0.cross.v",
        "decoder.layers.2.cross.scores",
    ):
        _, edited = seen(model, [], {key: [lambda x: x * 0.5]})
        assert float((edited - plain).abs().max()) > 1e-3, key


@pytest.mark.parametrize("name", tiny.FAMILIES)
@torch.no_grad()
def test_recorded_steps_are_rows_of_one_pass(name: str) -> None:
    model = tiny.transformer(name)
    names = [key for key in tap_names(model.spec) if key.startswith(("embed", "decoder", "logits"))]
    names = [key for key in names if not key.endswith(("cross.k", "cross.v"))]
    whole, _ = seen(model, names)
    target, tap = tiny.ids(2, 5, seed=2), Recorder(names)
    cache = model.new_cache(2, source=model.read(tiny.ids(2, 7)))
    for i in range(5):
        model(target[:, i : i + 1], cache=cache, tap=tap)
    for key, axes in ((key, tap_names(model.spec)[key]) for key in names):
        at = axes.index("query")
        for i, step in enumerate(tap.kept[key]):
            row = whole[key][0].narrow(at, i, 1)
            row = row[..., : i + 1] if axes[-1] == "key" else row
            finite = row.isfinite()
            assert float((step - row)[finite].abs().max()) <= 1e-4, key


class Count:
    """A tap that counts what it is shown."""

    def __init__(self, at: str = "", names: dict[str, int] | None = None) -> None:
        self._at, self.names = at, {} if names is None else names

    def begin(self, positions: Tensor, of_source: bool = False) -> None:
        pass

    def at(self, scope: str) -> Count:
        return Count(f"{self._at}{scope}.", self.names)

    def wants(self, name: str) -> bool:
        return name not in ("scores", "weights", "head_out")  # which would be computed in another way

    def __call__(self, name: str, value: Tensor) -> Tensor:
        self.names[self._at + name] = self.names.get(self._at + name, 0) + 1
        return value


@torch.no_grad()
def test_the_source_is_read_once() -> None:
    """In cached decoding, and for all that select from it; nothing of the encoder or of its keys is computed again."""
    model, calls = tiny.transformer("t5"), []
    model.encoder.register_forward_hook(lambda *args: calls.append(args))
    tap = Count()
    source = model.read(tiny.ids(2, 7), tap=tap)
    caches = [model.new_cache(2, source=source) for _ in range(2)]
    before = caches[0].cross(0).k.clone() if source._plan else source._entries[0][0].clone()  # type: ignore[index,union-attr]
    caches[1].select([1, 1, 0])
    for i in range(6):
        for cache, rows in zip(caches, ([0, 1], [1, 1, 0]), strict=True):
            model(tiny.ids(2, 6, seed=4)[rows, i : i + 1], cache=cache, tap=tap)
    assert len(calls) == 1
    once = {key: n for key, n in tap.names.items() if key.startswith(("source", "encoder")) or key.endswith("cross.k")}
    assert once
    assert set(once.values()) == {1}
    assert tap.names["decoder.layers.0.cross.q"] == 12
    assert torch.equal(caches[0].cross(0).k, before)  # type: ignore[union-attr]
    assert caches[0].nbytes > 2 * sum(t.nbytes for t in source._entries[0])  # type: ignore[misc]


@torch.no_grad()
def test_refused() -> None:
    model = tiny.transformer("bart")
    with pytest.raises(RequestError, match="needs a source"):
        model(tiny.ids(1, 3))
    with pytest.raises(RequestError, match="needs a source"):
        model.new_cache(1)
    with pytest.raises(ContextExceeded):
        model.read(tiny.ids(1, 49))
    with pytest.raises(ContextExceeded):
        model(tiny.ids(1, 49), source=model.read(tiny.ids(1, 48)))
    source = model.read(tiny.ids(2, 4))
    with pytest.raises(RequestError, match="rows"):
        model(tiny.ids(3, 3), source=source)
    with pytest.raises(RequestError, match="rows"):
        model.new_cache(3, source=source)
    for plain in ({"layers": 2}, {"layers": 0, "encoder_layers": 2}):
        other = built(expand({"d_model": 16, "n_heads": 2, "vocab_size": 20, **plain}))
        with pytest.raises(RequestError):
            other.read(torch.zeros(1, 3, dtype=torch.long))


# ---- the Transformer of 2017 ----------------------------------------------------------------------------------

PAPER = {
    "d_model": 32, "n_heads": 4, "d_ff": 80, "layers": 3, "encoder_layers": 2, "vocab_size": 64, "embed_scale": 32**0.5,
    "positions": "sinusoidal", "norm": "layer", "where": "post", "activation": "relu", "gated": False, "bias": True,
}  # fmt: skip


def torch_s_own(model: Transformer, final: bool) -> nn.Transformer:
    """PyTorch's module with our weights, embedding and head apart."""
    d, e, n = model.spec.d_model, len(model.spec.encoder.layers), len(model.spec.decoder.layers)
    theirs = nn.Transformer(d, 4, e, n, 80, dropout=0.0, activation="relu", batch_first=True)
    theirs.encoder.use_nested_tensor = False
    if not final:  # it adds a norm that the paper does not have
        theirs.encoder.norm = theirs.decoder.norm = None
    weights: dict[str, Tensor] = {}
    own = model.state_dict()
    for side, stack in model.spec.stacks.items():
        branches = [branch.name for branch in stack.layers[0].branches]
        for i in range(len(stack.layers)):
            for place, name in enumerate(branches):
                ours, there = f"{side}.layers.{i}.branches.{name}", f"{side}.layers.{i}"
                for part in ("weight", "bias"):
                    weights[f"{there}.norm{place + 1}.{part}"] = own[f"{ours}.post_norm.{part}"]
                    if name == "mlp":
                        weights[f"{there}.linear1.{part}"] = own[f"{ours}.body.up.{part}"]
                        weights[f"{there}.linear2.{part}"] = own[f"{ours}.body.down.{part}"]
                        continue
                    there_attn = f"{there}.{'self_attn' if name == 'attn' else 'multihead_attn'}"
                    qkv = torch.cat([own[f"{ours}.body.{x}.{part}"] for x in "qkv"])
                    weights[f"{there_attn}.in_proj_{part}"] = qkv
                    weights[f"{there_attn}.out_proj.{part}"] = own[f"{ours}.body.out.{part}"]
        if final:
            weights |= {f"{side}.norm.{part}": own[f"{side}.norm.{part}"] for part in ("weight", "bias")}
    theirs.load_state_dict(weights)
    return theirs.eval()


@pytest.mark.parametrize("final", [False, True])
@torch.no_grad()
def test_against_torch_s_own_module(final: bool) -> None:
    """The recipe of 2017 is ``torch.nn.Transformer`` to within rounding, with ragged sources too."""
    from tests.reference.tiny import scale_randomly

    spec = expand(PAPER)
    if final:
        norm = spec.encoder.layers[0].branches[0].post_norm
        spec = replace(spec, **{side: replace(stack, norm=norm) for side, stack in spec.stacks.items()})
    model = Transformer(spec).eval()
    scale_randomly(model, norm_mean=1.0)
    theirs = torch_s_own(model, final)
    source, target = tiny.ids(2, 9), tiny.ids(2, 6, seed=2)
    places = torch.arange(9).repeat(2, 1)
    places[1, 6:] = -1
    tap = Recorder(["source_embed.out", "embed.out"])
    hidden = model.hidden(target, source=model.read(source, places, tap=tap), tap=tap)
    [embedded], [ours] = tap.kept.values()
    pads = places < 0
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    wanted = theirs(
        embedded, ours, tgt_mask=causal, src_key_padding_mask=pads, memory_key_padding_mask=pads, tgt_is_causal=True
    )
    assert wanted.std() > 0.3
    assert float((hidden - wanted).abs().max()) <= 1e-5


def test_the_paper_s_base_model_starts_undecided() -> None:
    """Its stream starts at unit spread, its loss at that of a guess, and it learns to copy."""
    spec = expand({**PAPER, "tied": True})
    model = built(spec, seed=1)
    source = torch.randint(0, 64, (16, 8), generator=torch.Generator().manual_seed(1))
    tap = Recorder(["source_embed.tokens", "embed.tokens"])
    target = torch.cat([torch.zeros(16, 1, dtype=torch.long), source[:, :-1]], 1)

    def loss(tap: Recorder | None = None) -> Tensor:
        logits = model(target, source=model.read(source, tap=tap), tap=tap)
        return nn.functional.cross_entropy(logits.flatten(0, 1), source.flatten())

    first = float(loss(tap).detach())
    assert abs(first - math.log(64)) < 0.7
    for [rows] in tap.kept.values():
        assert 0.85 < float(rows.std().detach()) < 1.15
    optimiser = torch.optim.Adam(model.train().parameters(), 2e-3)
    for _ in range(60):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()
    assert float(loss().detach()) < first / 2


@torch.no_grad()
def test_it_does_not_begin_by_repeating() -> None:
    """At the paper's own width: rows are scaled up, and the head has the same ones. (Smaller steps: a loss of 19.5.)"""
    words = {**PAPER, "d_model": 512, "n_heads": 8, "layers": 6, "encoder_layers": 6, "vocab_size": 300}
    model = built(expand({**words, "d_ff": 2048, "embed_scale": 512**0.5}))
    source, target, wanted = torch.randint(0, 300, (3, 2, 20), generator=torch.Generator().manual_seed(1))
    logits = model(target, source=model.read(source))
    assert abs(float(nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())) - math.log(300)) < 0.8
    assert abs(float(logits.gather(-1, target[..., None]).mean())) < 1.5


def checks(marked: str) -> None:
    """Run ``seq2seq_compile_checks.py``, those with or without a mark."""
    file = Path(__file__).parent / "seq2seq_compile_checks.py"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--noconftest",
        "-pno:cacheprovider",
        "-Wignore",
        "-m",
        marked,
        str(file),
    ]
    run = subprocess.run(command, cwd=file.parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


def test_graphs() -> None:
    """Compiled, in a process without shape checks; see ``test_compile.py``."""
    checks("not slow")


@pytest.mark.slow
def test_through_the_real_compiler() -> None:
    checks("slow")
