"""One more token in each row, by one native call: an implementation of a pass, never another definition of it.

A token at a time, what comes before the blocks and after them takes as long as a good part of the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import pointer
from operator import and_, is_
from typing import Any, Protocol, runtime_checkable
from weakref import ref

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.cache import StoredCache
from cutaway.kernels import layout as c
from cutaway.kernels import matrix_of, multiply, size_of
from cutaway.models.fused import FusedStack, slots_of
from cutaway.models.head import Head, finished
from cutaway.models.laid_out import fits
from cutaway.models.tokens import tokens_of
from cutaway.modules.attention import How
from cutaway.modules.embedding import Embedding
from cutaway.modules.part import changes, is_plain
from cutaway.modules.rotary import asks_length, rotary_table
from cutaway.modules.stack import Stack
from cutaway.spec import RotarySpec

FEWEST = 1024  # positions whose angles are kept, to begin with


@runtime_checkable
class Decoding(Protocol):
    """A model that writes."""

    embed: Embedding
    decoder: Stack
    head: Head


class Steps:
    """A token at a time in each row, where the native library knows all layers.

    Args:
        model: whose parts: ids, layers and scores.
        whole: how the stack is run.
    """

    def __init__(self, model: Decoding, whole: FusedStack) -> None:
        self._of, self._whole = ref(model), whole
        self._embed, self._stack, self._head = model.embed, model.decoder, model.head
        self._kinds = (type(model), Embedding, Stack, Head)  # of a class made of one of them nothing is known
        self._compared = -1  # the change that was the last when the next three were found
        self._known, self._asks_length, self._plain = False, False, False
        # cos and sin of the first positions, by what turns.
        self._angles: dict[RotarySpec, tuple[Tensor, Tensor]] = {}

    def _compare(self, model: Decoding) -> None:
        """Find out what lies between ids and scores, where anything was noted."""
        if self._compared == (now := changes()):
            return
        embed, head, layers = self._embed, self._head, self._stack.spec.layers
        parts = (model, embed, self._stack, head)
        own = [isinstance(part, nn.Module) and is_plain(part) for part in parts]
        own = [*map(and_, own, map(is_, map(type, parts), self._kinds))]
        # Whether the model does nothing but call its parts in turn.
        self._known = own[0]
        self._asks_length = any(asks_length(layer.attention.rotary) for layer in layers)
        # Whether ids are looked up, run through the layers and scored, and nothing else comes between.
        looked_up = embed.spec.positions is None and embed.types is None and embed.norm is None
        scored = head.spec.transform is None and head.product in (F.linear, multiply)
        self._plain = all(own) and looked_up and embed.tokens is not None and scored and not self._asks_length
        self._compared = now

    @property
    def _model(self) -> Decoding:
        model = self._of()
        assert model is not None
        return model

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_of": self._model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _of=ref(state["_of"]))

    def __call__(self, ids: Sequence[int], cache: StoredCache, how: How) -> Tensor | None:
        """Logits after one more token in each row, as ``Transformer.hidden`` and ``unembed`` make them.

        Args:
            ids: of the tokens.
            cache: of the rows.
            how: which implementation of attention.

        Returns:
            [batch, vocab], or None where there is more to it; the cache is then as it was.
        """
        if torch.is_grad_enabled() or self._stack.training or how not in ("fused", "steady"):
            return None
        model, parts = self._model, (self._embed, self._stack, self._head)
        self._compare(model)
        if not all(map(is_, (model.embed, model.decoder, model.head), parts)):
            return None
        if not self._known or self._stack.whole is not self._whole:
            return None
        width = size_of(self._embed.table)[1]
        if how == "steady" and not self._whole.ready(width):
            return None  # the readable blocks' sums are steady for four rows, not for one
        positions = cache.advance()
        if positions is None:
            return None
        if self._plain and (logits := self._at_once(ids, positions, cache, width)) is not None:
            return logits
        x = self._embed(torch.tensor(ids)[:, None], positions)
        x = self._stack(x, positions, cache, None, how, positions + 1 if self._asks_length else None)
        scores: Tensor = self._head(x, self._embed.table)
        return scores[:, 0]

    def _at_once(self, ids: Sequence[int], positions: Tensor, cache: StoredCache, width: int) -> Tensor | None:
        """By one native call; None where somebody watches, or where weights or keys have moved."""
        parts = self._embed, self._stack, self._head
        if any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in parts):
            return None
        if (kept := self._whole.kept_for(cache, width, step=True)) is None:
            return None
        table, head = self._embed.table, self._embed.table if self._head.weight is None else self._head.weight
        bias, rows, known = self._head.bias, size_of(head)[0], size_of(table)[0]
        able = fits(table, (known, width)) and fits(head, (rows, width)) and 0 <= min(ids) <= max(ids) < known
        if not able or not (bias is None or fits(bias, (rows,))):
            return None
        n, tokens = len(ids), torch.from_numpy(np.array(ids, np.int64))
        places, order = tokens_of(n, 1)
        held = [tokens, positions]
        groups = (c.Group * len(kept.first))(*self._groups(kept.first, n, positions, cache, held))
        logits = torch.empty(n, rows, dtype=torch.float32)
        self._whole.native.layers(
            c.Pass(
                n=n,
                places=places.data_ptr(),
                rows=order.data_ptr(),
                positions=positions.data_ptr(),
                batch=n,
                norm=kept.norm,
                table=pointer(matrix_of(table)),
                ids=tokens.data_ptr(),
                head=pointer(matrix_of(head, bias)),
                logits=logits.data_ptr(),
                scale=self._embed.spec.scale,
            ),
            kept.layers,
            groups,
        )
        return finished(logits, self._head.spec)

    def _groups(
        self, first: Sequence[int], n: int, positions: Tensor, cache: StoredCache, held: list[Tensor]
    ) -> Iterator[c.Group]:
        """What layers share; tensors that the structs point into are added to ``held``."""
        for i in first:
            view = cache.layer(i)
            slots, keys = slots_of(view), view.plan.keys
            if len(slots) != n or slots.dim() > 1:
                slots = slots.expand(n, 1).reshape(-1).contiguous()
            group = c.Group(
                slots=slots.data_ptr(), count=keys.shape[1], positions=keys.data_ptr(), apart=keys.stride(0)
            )
            held += [slots, keys]
            spec = self._stack.spec.layers[i].attention.rotary
            if spec is not None:
                cos, sin = self._turns(spec, max(cache.lengths))
                group.cos, group.sin, group.turns = cos.data_ptr(), sin.data_ptr(), positions.data_ptr()
                held += [cos, sin]
            yield group

    def _turns(self, spec: RotarySpec, n: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the first ``n`` positions, or more. [position, pair]"""
        found = self._angles.get(spec)
        if found is None or len(found[0]) < n:
            places = torch.arange(max(FEWEST, 2 * n))[None]
            cos, sin = rotary_table(spec, places, torch.float32)
            found = self._angles[spec] = cos[0].contiguous(), sin[0].contiguous()
        return found
