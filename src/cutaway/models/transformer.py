"""The transformer: an embedding, one or two stacks of blocks, a head."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cutaway.cache import Cache, KvDtype, NoCache, Source, StoredCache, new_cache
from cutaway.errors import RequestError
from cutaway.models import ways
from cutaway.models.batch import check_limit, check_positions
from cutaway.models.head import Classifier, Head, Pooler
from cutaway.models.steps import Steps
from cutaway.modules.attention import How
from cutaway.modules.embedding import Embedding
from cutaway.modules.part import Part
from cutaway.modules.rotary import asks_length, text_lengths
from cutaway.modules.stack import Stack
from cutaway.modules.tap import Tap
from cutaway.shapes import Ids, Logits, Stream
from cutaway.spec import ClassifierSpec, HeadSpec, ModelSpec, PoolerSpec

Start: TypeAlias = tuple[int, Stream]  # a layer, and the stream that enters it


class Transformer(Part):
    """A language model of either or both stacks, assembled from its spec.

    ::

        ids ──► embed ──► decoder (or encoder).layers.0 ──► … ──► norm ──► head ──► logits
                                  ▲ cross-attention
        source ids ──► source_embed ──► encoder                     (encoder–decoder)

    Args:
        spec: what it is made of. Weights start empty; see ``checkpoints`` for loading.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.attention: How = "fused"  # or the readable one everywhere, or block by block, for comparison
        self.warned_length = False  # whether the one warning about long texts was given
        self.probed: tuple[int, str] | None = None  # threads with which steady sums were tried, and what went wrong
        self._asks_length = any(asks_length(a.attention.rotary) for stack in spec.stacks.values() for a in stack.layers)
        self.embed = Embedding(spec.embedding, spec.vocab_size, spec.d_model)
        rows = spec.source_vocab_size
        self.source_embed = None if spec.source is None else Embedding(spec.source, rows, spec.d_model)
        self.encoder = Stack(spec.encoder, spec.d_model)
        self.decoder = Stack(spec.decoder, spec.d_model)
        self.steps: Steps | None = None  # how a token at a time is run from id to logits: see use_kernels
        self.head: Head | Pooler | Classifier | None
        match spec.head:
            case HeadSpec():
                self.head = Head(spec.head, spec.vocab_size, spec.d_model)
            case PoolerSpec():
                self.head = Pooler(spec.head, spec.d_model)
            case ClassifierSpec():
                self.head = Classifier(spec.head, spec.d_model)
            case None:
                self.head = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.table.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are."""
        return self.embed.table.dtype

    def forward(
        self,
        ids: Ids,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        cache: Cache | None = None,
        tap: Tap | None = None,
        source: Source | None = None,
        types: Ids | None = None,
    ) -> Tensor:
        """What the head says of this pass: logits of tokens or labels, a vector, or the stream where there is no head.

        Args:
            ids: token ids. [batch, query]
            positions: each token's place in its text, −1 for a pad (there is no attention mask); see ``cutaway.pad``.
            segments, cache, tap, source, types: see :meth:`hidden`.
        """
        x = self.hidden(ids, positions, segments, cache, tap, source=source, types=types)
        if isinstance(self.head, Pooler | Classifier):
            return self.answer(x, self._positions(ids, cache) if positions is None else positions, tap)
        return self.unembed(x, tap) if isinstance(self.head, Head) else x

    def hidden(
        self,
        ids: Ids,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        cache: Cache | None = None,
        tap: Tap | None = None,
        lengths: Tensor | None = None,
        source: Source | None = None,
        types: Ids | None = None,
        how: How | None = None,
        start: Start | None = None,
        ends: bool = False,
    ) -> Stream:
        """The stream that the head reads: after the last norm of the decoder, or of the encoder where that is all.

        Args:
            ids: token ids; what stands at a pad does not matter. [batch, query]
            positions: each token's place in its text, −1 for a pad; by default each row goes on from
                what the cache holds. [batch, query]
            segments: which document of its row a token belongs to. [batch, query]
            cache: keys and values of earlier tokens, to read and to extend (without gradients).
            tap: reads or edits what is computed on the way.
            lengths: how long each row's text is known to become, where it is read in pieces: rotary positions
                that change with the length (dynamic NTK, LongRoPE) turn the whole text alike. By default as far
                as it has been read. [batch], or [batch, query] where each token counts with a length of its own.
            source: what an encoder–decoder's encoder has read, see :meth:`read`; a cache has its own.
            types: each token's type, where the model has types. [batch, query]
            how: which implementation of attention, for this pass; by default the model's ``attention``.
            start: a layer, and the stream to begin there with: neither embedding nor earlier layers are run.
            ends: each row's last token alone is asked for: what comes for the others means nothing.

        Raises:
            ContextExceeded: a position past the end of a learned table; the cache stays as it was.
            RequestError: an encoder–decoder without a source, or with one of other rows.
        """
        if positions is None:
            positions = self._positions(ids, cache)
        check_positions(ids, positions)
        check_limit(positions, self.spec.position_limit)
        stack, scope = (self.decoder, "decoder") if self.spec.main == "decoder" else (self.encoder, "encoder")
        if cache is None:
            self._check_source(source, ids.shape[0])
            cache = NoCache([layer.attention.mask for layer in stack.spec.layers], self.device, source)
        elif source is not None:
            raise RequestError("a cache has its own source", field="source", hint="Give it to new_cache instead.")
        cache.begin(positions.cpu(), None if segments is None else segments.cpu())
        if tap is not None:
            tap.begin(positions)
        if start is None:
            at = None if tap is None else tap.at("embed")
            x = self.embed(ids.to(self.device), positions.to(self.device), at, _moved(types, self.device))
            start = 0, x
        return self._run(stack, scope, start, positions, segments, cache, tap, lengths, how, ends)

    def encode(
        self,
        ids: Ids,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        tap: Tap | None = None,
        types: Ids | None = None,
        how: How | None = None,
        start: Start | None = None,
    ) -> Stream:
        """What the encoder makes of texts. [batch, key] → [batch, key, d_model]

        Raises:
            ContextExceeded: a position past the end of a learned table.
            RequestError: there is no encoder.
        """
        if not self.spec.encoder.layers:
            raise RequestError("this model has no encoder", field="source")
        if self.source_embed is None:
            return self.hidden(ids, positions, segments, tap=tap, types=types, how=how, start=start)
        if positions is None:
            positions = self._positions(ids, None)
        check_positions(ids, positions)
        check_limit(positions, self.spec.source_limit)
        cache = NoCache([layer.attention.mask for layer in self.spec.encoder.layers], self.device)
        cache.begin(positions.cpu(), None if segments is None else segments.cpu())
        if tap is not None:
            tap.begin(positions, of_source=True)
        if start is None:
            at = None if tap is None else tap.at("source_embed")
            table = self.embed.table if self.source_embed.tokens is None else None
            x = self.source_embed(ids.to(self.device), positions.to(self.device), at, _moved(types, self.device), table)
            start = 0, x
        return self._run(self.encoder, "encoder", start, positions, segments, cache, tap, None, how)

    def read(
        self,
        ids: Ids,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        tap: Tap | None = None,
        how: How | None = None,
        start: Start | None = None,
    ) -> Source:
        """Read a source once: the encoder, then every decoder layer's keys and values of what came of it.

        Args:
            ids, positions, segments: as for :meth:`hidden`, of the source. [batch, key]
            tap: reads or edits; the keys and values are ``decoder.layers.{i}.cross.k`` and ``v``.
            how: which implementation of attention, for the encoder.
            start: a layer of the encoder, and the stream to begin there with.

        Raises:
            ContextExceeded: a position past the end of a learned table.
            RequestError: no encoder–decoder.
        """
        if self.source_embed is None:
            raise RequestError("only an encoder–decoder reads a source", field="source")
        if positions is None:
            positions = self._positions(ids, None)
        memory = self.encode(ids, positions, segments, tap, how=how, start=start)
        entries = self.decoder.read(memory, None if tap is None else tap.at("decoder"))
        return Source(positions.cpu(), entries, None if segments is None else segments.cpu())

    def unembed(self, x: Stream, tap: Tap | None = None) -> Logits:
        """Logits of final hidden states. [batch, query, d_model] → [batch, query, vocab]

        Raises:
            RequestError: the head does not score tokens.
        """
        if not isinstance(self.head, Head):
            raise RequestError("this model has no head that scores tokens", field="head", got=self._head_kind())
        return self.head(x, self.embed.table, tap)

    def answer(self, x: Stream, positions: Tensor, tap: Tap | None = None) -> Tensor:
        """What a pooler or a classifier makes of final hidden states.

        Args:
            x: [batch, query, d_model]
            positions: −1 for a pad. [batch, query]
            tap: reads or edits.

        Returns:
            A vector each ([batch, d_model]), or scores of labels ([batch, label] or [batch, query, label]).

        Raises:
            RequestError: the model has no such head.
        """
        if not isinstance(self.head, Pooler | Classifier):
            raise RequestError("this model has no pooler and no labels", field="head", got=self._head_kind())
        out: Tensor = self.head(x, positions.to(x.device), tap)
        return out

    def new_cache(
        self,
        batch: int = 1,
        capacity: int = 256,
        *,
        sliding: bool = True,
        source: Source | None = None,
        kv_dtype: KvDtype | None = None,
        paged: bool = False,
        most_pages: int | None = None,
    ) -> StoredCache:
        """An empty cache for the decoder. See :func:`cutaway.cache.new_cache`.

        Raises:
            RequestError: there is no decoder, it needs a source of as many rows, or that function refuses.
        """
        if self.spec.main != "decoder":
            raise RequestError("an encoder reads a text at once and keeps no cache", field="cache")
        self._check_source(source, batch)
        made = partial(new_cache, self.spec.decoder, dtype=self.dtype, device=self.device, source=source)
        made = partial(made, batch=batch, capacity=capacity, sliding=sliding, kv_dtype=kv_dtype)
        return made(paged=paged, most_pages=most_pages)

    def compile_blocks(self, enabled: bool = True, **options: Any) -> None:
        """Run the blocks through ``torch.compile`` from now on, or no longer: see :func:`models.ways.compiled`."""
        ways.compiled(self, enabled, **options)

    def use_kernels(self, enabled: bool = True) -> bool:
        """Run the blocks through the native library from now on, or no longer: see :func:`models.ways.native`."""
        # A class made of this one may have other ways from ids to scores.
        return ways.native(self, enabled, stepping=type(self) is Transformer)

    def _check_source(self, source: Source | None, rows: int) -> None:
        if source is not None and len(source.lengths) != rows:
            raise RequestError("the source has other rows", field="source", expected=rows, got=len(source.lengths))
        if source is None and self.source_embed is not None:
            hint = "Give source=model.read(ids), or a cache made with one."
            raise RequestError("an encoder–decoder needs a source to read", field="source", hint=hint)

    def _positions(self, ids: Ids, cache: Cache | None) -> Tensor:
        past = torch.tensor(cache.lengths if cache is not None else [0], dtype=torch.long)
        return (past[:, None] + torch.arange(ids.shape[1])).expand(ids.shape[0], -1)

    def _run(
        self,
        stack: Stack,
        scope: str,
        start: Start,
        positions: Tensor,
        segments: Tensor | None,
        cache: Cache,
        tap: Tap | None,
        lengths: Tensor | None,
        how: How | None,
        ends: bool = False,
    ) -> Stream:
        """One stack over a pass that the cache has planned."""
        known = None
        if self._asks_length and positions.numel():
            known = text_lengths(positions, segments) if lengths is None else lengths
            known = known[:, None].expand_as(positions) if known.dim() == 1 else known
        inner = None if tap is None else tap.at(scope)
        return stack(start[1], positions.to(self.device), cache, inner, how or self.attention, known, start[0], ends)

    def _head_kind(self) -> str:
        return "no head" if self.head is None else type(self.head).__name__.lower()


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
