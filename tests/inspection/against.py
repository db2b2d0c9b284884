"""Small checkpoints of all three kinds of model, ours beside transformers', and texts for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cutaway.models import Transformer
from tests.reference import oracle, tiny, tiny_encoders, tiny_seq2seq
from tests.reference.conftest import open_folder


@dataclass
class Pair:
    """A case of the reference matrix.

    Attributes:
        ours, theirs: the same weights.
        ids: a text, of an encoder–decoder what the decoder reads.
        source: of an encoder–decoder.
        layers: of the last stack.
    """

    ours: Transformer
    theirs: Any
    ids: list[int]
    source: list[int] | None

    @property
    def layers(self) -> int:
        return self.ours.spec.n_layers

    def inputs(self) -> dict[str, Tensor]:
        """As transformers wants them."""
        if self.source is None:
            return {"input_ids": torch.tensor([self.ids])}
        return {"input_ids": torch.tensor([self.source]), "decoder_input_ids": torch.tensor([self.ids])}

    @torch.no_grad()
    def cut_short(self, keep: int) -> Tensor:
        """transformers' logits where only the first ``keep`` layers of the last stack are there. [position, vocab]"""
        lists = [
            (module, name, child)
            for module in self.theirs.modules()
            for name, child in module.named_children()
            if isinstance(child, torch.nn.ModuleList) and len(child) == self.layers
        ]
        module, name, every = lists[-1]  # of two stacks, the decoder comes last
        module._modules[name] = every[:keep]
        config = self.theirs.config
        stated = {key: getattr(config, key) for key in ("num_hidden_layers",) if key in config.to_dict()}
        try:
            for key in stated:
                setattr(config, key, keep)
            return self.theirs(**self.inputs(), use_cache=False).logits[0] if self.causal else self.logits()
        finally:
            module._modules[name] = every
            for key, value in stated.items():
                setattr(config, key, value)

    @property
    def causal(self) -> bool:
        return self.ours.spec.generates

    def logits(self) -> Tensor:
        return self.theirs(**self.inputs()).logits[0]


def pair(name: str, folder: Path, length: int = 11) -> Pair:
    """A case of any matrix, written to a folder by transformers."""
    if name in tiny.CASES:
        tiny.write(tiny.config(name), folder)
        return Pair(open_folder(folder), oracle.fresh(folder), tiny.ids(1, length)[0].tolist(), None)
    if name in tiny_encoders.CASES:
        tiny_encoders.write(tiny_encoders.config(name), folder)
        return Pair(open_folder(folder), tiny_encoders.reference(folder), tiny.ids(1, length)[0].tolist(), None)
    tiny_seq2seq.write(tiny_seq2seq.config(name), folder)
    theirs = tiny_seq2seq.reference(folder)
    return Pair(open_folder(folder), theirs, tiny.ids(1, length)[0].tolist(), tiny.ids(1, 7, seed=2)[0].tolist())


@dataclass
class Places:
    """Where in transformers' model the quantities of a layer are: a module, and whether its input or its output."""

    layer: Any
    heads: Any
    attn: Any
    mlp: Any


def places(theirs: Any, index: int) -> Places:
    """Of a layer of the last stack: itself, the projection that reads all heads, and what adds to the stream."""
    kind = theirs.config.model_type
    if kind == "gpt2":
        layer = theirs.transformer.h[index]
        return Places(layer, layer.attn.c_proj, layer.attn, layer.mlp)
    if kind == "t5":
        layer = theirs.decoder.block[index]
        return Places(
            layer, layer.layer[0].SelfAttention.o, layer.layer[0].SelfAttention, layer.layer[2].DenseReluDense
        )
    if kind == "bert":
        layer = theirs.bert.encoder.layer[index]
        return Places(layer, layer.attention.output.dense, layer.attention.output.dense, layer.output.dense)
    layer = theirs.model.layers[index]
    if kind == "gemma2":  # what is added has gone through a norm
        return Places(layer, layer.self_attn.o_proj, layer.post_attention_layernorm, layer.post_feedforward_layernorm)
    return Places(layer, layer.self_attn.o_proj, layer.self_attn, layer.mlp)


class Hooked:
    """Reads or replaces an input or an output of transformers' modules while it is entered."""

    def __init__(self, change: Any, module: Any, of: str) -> None:
        def before(_: Any, args: Any, kwargs: Any) -> Any:
            if args:
                return (change(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

        def after(_: Any, args: Any, out: Any) -> Any:
            return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

        add = module.register_forward_hook(after) if of == "output" else None
        self._handle = add or module.register_forward_pre_hook(before, with_kwargs=True)

    def __enter__(self) -> Hooked:
        return self

    def __exit__(self, *_: Any) -> None:
        self._handle.remove()


@torch.no_grad()
def hooked(case: Pair, ids: list[int], module: Any, of: str, change: Any) -> Tensor:
    """transformers' logits of a text with one thing changed. [position, vocab]"""
    text = torch.tensor([ids])
    inputs = {"input_ids": text}
    if case.source is not None:
        inputs = {"input_ids": torch.tensor([case.source]), "decoder_input_ids": text}
    with Hooked(change, module, of):
        return case.theirs(**inputs, **({"use_cache": False} if case.causal else {})).logits[0]
