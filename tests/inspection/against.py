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
