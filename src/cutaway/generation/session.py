"""Rows of tokens with the cache that remembers them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

import torch
from torch import Tensor

from cutaway.cache import KvDtype, Source
from cutaway.errors import RequestError
from cutaway.formats.files import StrPath
from cutaway.formats.paths import usable_path
from cutaway.generation.checks import flag, whole
from cutaway.generation.drafting import network_of
from cutaway.generation.inputs import each_row, places_of, shared
from cutaway.generation.passes import Passes, Seen
from cutaway.generation.reading import check_length
from cutaway.generation.steady import unembedded
from cutaway.generation.unmixed import unmixed
from cutaway.models import Transformer
from cutaway.modules.tap import Tap


class Session:
    """Texts, row by row, that a model has read so far.

    The cache may hold less of a row than ``tokens`` does: after a rewind past what a ring kept, or a pass that
    broke off. What it lacks is read again, without a tap, before the next tokens.

    Args:
        model: what reads.
        batch: rows.
        capacity: tokens of a row to make room for; grows when needed.
        source: of an encoder–decoder, what its encoder has read for each row.
        steady: the same bits for a row in any company and any pieces: see ``generation.steady``.
        kv_dtype: ``"int8"`` keeps keys and values in eight bits; see ``cache.new_cache``.
        paged: keep them in pages that rows share, for one thread at a time. A row then takes over what another has
            read of the same beginning.
        most_pages: of 16 tokens each, that all rows and their forks may hold; None for no bound.
        sliding: layers with a window keep no more than that, in a ring. Without one a tap sees keys in the order of
            the text.

    Attributes:
        model, steady, kv_dtype: as given.
        tokens: what each row has read.
        busy: whether a call of ``generate`` is going on with it.
        between: called before each pass, of which a long prompt has several; what it raises breaks off.
        adopted: how many tokens each row took over last, rather than read.
    """

    def __init__(
        self,
        model: Transformer,
        batch: int = 1,
        capacity: int = 256,
        source: Source | None = None,
        steady: bool = False,
        kv_dtype: KvDtype | None = None,
        paged: bool = False,
        most_pages: int | None = None,
        sliding: bool = True,
    ) -> None:
        self.model = network_of(model)
        self.steady = flag("steady", steady)
        self.kv_dtype = kv_dtype
        self._paged = flag("paged", paged)
        whole("batch", batch, 0)
        whole("capacity", capacity, 0)
        # A ring's slots are out of order, and a sum's order is what steadiness is about.
        ring = flag("sliding", sliding) and not steady
        self._cache = model.new_cache(
            batch, capacity, sliding=ring, source=source, kv_dtype=kv_dtype, paged=paged, most_pages=most_pages
        )
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.between: Callable[[], None] | None = None
        self.adopted = [0] * batch
        self.busy = False

    @property
    def free_pages(self) -> int | None:
        """Pages that rows may still take; None where there is no bound."""
        return self._cache.free_pages

    @torch.no_grad()
    def feed(self, rows: Sequence[Sequence[int]], tap: Tap | None = None, seen: Seen | None = None) -> Tensor:
        """Read more tokens, not the same number in each row, and predict what follows each row.

        An exception on the way, of the tap or from the keyboard, leaves the session as it was before. The caller's
        ``torch.autocast`` is off in here: keys and values have the model's type.

        Args:
            rows: new tokens of each row; a row with none keeps still, and its result means nothing.
            tap: reads or edits what is computed on the way; logits of all new tokens where it wants them.
            seen: given the final states of the new tokens, piece by piece.

        Returns:
            Logits after each row's last token. [batch, vocab]

        Raises:
            ContextExceeded: a row would outgrow a learned table of positions.
            ResourceError: there are not so many pages; the session is as it was before.
        """
        return self._extend(rows, tap, seen, each=False)

    def read(self, rows: Sequence[Sequence[int]], tap: Tap | None = None) -> None:
        """As :meth:`feed`, where nobody asks what follows."""
        self._extend(rows, tap, None, each=False, asked=False)

    @torch.no_grad()
    def feed_each(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Read more tokens as :meth:`feed` does, and predict what follows each of them.

        They count as read one after another: where rotary positions change with a text's length, each token takes
        those of the text up to it, so that a row which goes back to any of them stands as if it had come no further.

        Returns:
            Logits after each new token, row after row. [new tokens, vocab]
        """
        return self._extend(rows, None, None, each=True)

    @torch.no_grad()
    def _extend(
        self, rows: Sequence[Sequence[int]], tap: Tap | None, seen: Seen | None, each: bool, asked: bool = True
    ) -> Tensor:
        """Read, and give logits after each row's last token ([batch, vocab]) or after each new one ([new, vocab])."""
        rows = each_row(rows, len(self.tokens), self.model.spec.vocab_size)
        before = [len(held) for held in self.tokens]
        check_length(self.model, max((n + len(new) for n, new in zip(before, rows, strict=True)), default=0))
        self.adopted = [0] * len(before)
        try:
            with unmixed(self.model.device):
                logits = self._read(rows, tap, seen, each, asked)
            for held, new in zip(self.tokens, rows, strict=True):
                held.extend(new)
        except BaseException:
            for held, n in zip(self.tokens, before, strict=True):
                del held[n:]
            self._cache.rewind(before)
            raise
        return logits

    def _read(
        self, rows: Sequence[Sequence[int]], tap: Tap | None, seen: Seen | None, each: bool, asked: bool
    ) -> Tensor:
        """The passes of :meth:`_extend`."""
        watched = tap is not None or seen is not None or each  # by somebody who is to see every token
        rest = self._adopt(rows) if self._paged and not watched else rows
        behind = [held[n:] for held, n in zip(self.tokens, self._cache.lengths, strict=True)]
        passes = Passes(self.model, self._cache, self.steady, self._paged, self.between)
        if any(behind):
            passes.read(behind)
        logits = None if tap is not None or seen is not None else self._step(rest)
        if logits is None:
            # Steady sums are of so many rows at once; then a tap sees the head's last rows only.
            whole = tap is not None and not self.steady and (tap.wants("logits") or tap.at("head") is not None)
            scored = partial(self.model.unembed, tap=tap) if whole else None
            found = passes.read_each(rest) if each else passes.read(rest, tap, seen, scored)
            logits = found if whole or not asked else self._unembed(found, tap)
        return logits

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may be taken twice."""
        chosen = places_of(rows, "rows", len(self.tokens) - 1, "no such row")
        self._cache.select(chosen)
        self.tokens = [list(self.tokens[row]) for row in chosen]
        self.adopted = [0] * len(self.tokens)

    def join(self, rows: int = 1, salt: bytes = b"") -> None:
        """More rows, empty, after these; a row leaves by :meth:`select`. Among pages neither copies another row.

        Args:
            rows: how many.
            salt: of a paged session: they take over only what rows of the same salt have read. Rows that a session
                begins with have none.

        Raises:
            RequestError: rows have a source, which new ones would lack.
        """
        whole("rows", rows, 0)
        if not isinstance(salt, bytes):
            raise RequestError("not bytes", field="salt", got=salt)
        self._cache.join(rows, salt)
        self.tokens += [[] for _ in range(rows)]
        self.adopted += [0] * rows

    def fork(self, rows: Sequence[int] | None = None) -> Session:
        """A session of its own with these rows, or all: what either reads from here on, the other does not see.

        Args:
            rows: which, in which order; a row may be taken twice.

        Raises:
            RequestError: there is no such row.
        """
        chosen = (
            [*range(len(self.tokens))] if rows is None else places_of(rows, "rows", len(self.tokens) - 1, "no such row")
        )
        other = copy(self)
        other._cache = self._cache.fork(chosen)
        other.tokens = [list(self.tokens[row]) for row in chosen]
        other.adopted, other.busy = [0] * len(chosen), False
        if self.busy:
            other.between = None  # the call's own
        return other

    def reuse(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """Keep of each row what a new text begins with, and say how many tokens that are: feed the rest.

        The last token of a text is never among them: what follows it is found by reading it.

        Args:
            rows: whole texts, one for each row.

        Raises:
            RequestError: not as many texts as rows.
        """
        rows = each_row(rows, len(self.tokens), self.model.spec.vocab_size)
        kept = [shared(held, row[:-1]) for held, row in zip(self.tokens, rows, strict=True)]
        self.rewind(kept)
        return kept

    def save(self, path: StrPath) -> None:
        """Keep it in one file; ``path`` is the old file or the whole new one at every moment.

        The file holds what was read, as tokens and as keys and values: guard it like the text.

        Raises:
            RequestError: there are no rows.
            StorageError: the disk refuses.
        """
        from cutaway.generation import saved

        if not self.tokens:
            raise RequestError("there are no rows to save", field="session", path=path)
        saved.write(usable_path(path), self.model, self.tokens, self._cache, self.steady, self.kv_dtype, self._paged)

    @classmethod
    def load(cls, model: Transformer, path: StrPath) -> Session:
        """Go on with what :meth:`save` kept, with the same bits as if there had been no pause.

        Args:
            model: the one that it was saved with.
            path: the file.

        Raises:
            ResumeMismatch: another model, other weights, another version; the field says what differs.
            FormatError: no saved session, cut off, or changed since it was written.
            ShapeMismatch: its tensors are not those of this model's cache.
            ResourceError: there is too little memory.
        """
        from cutaway.generation import saved

        found = saved.read(usable_path(path), network_of(model))
        session = cls(model, len(found.tokens), 1, found.source, found.steady, found.kv_dtype, found.paged)
        found.fill(session._cache, path)
        session.tokens = found.tokens
        return session

    def rewind(self, lengths: Sequence[int]) -> None:
        """Go back to each row's first tokens.

        Raises:
            RequestError: a row is not that long.
        """
        kept = places_of(lengths, "lengths", [len(held) for held in self.tokens], "no such place")
        self._cache.rewind(kept)
        self.tokens = [held[:n] for held, n in zip(self.tokens, kept, strict=True)]

    def _step(self, rows: Sequence[Sequence[int]]) -> Tensor | None:
        """Logits after one new token in each row, or None where that is not all that there is to do."""
        steps = self.model.steps
        if steps is None or self._paged or any(len(new) != 1 for new in rows):
            return None
        if self.between is not None:
            self.between()
        return steps([new[0] for new in rows], self._cache, "steady" if self.steady else self.model.attention)

    def _unembed(self, rows: Tensor, tap: Tap | None) -> Tensor:
        """Logits. [rows, d_model] → [rows, vocab]"""
        if self.steady:
            return unembedded(self.model, rows, tap)
        return self.model.unembed(rows[:, None], tap)[:, 0]

    def _adopt(self, rows: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Take over what others have read of these rows' texts, all but a last token; what is left of the new ones."""
        rest = list(rows)
        for row, (held, new, n) in enumerate(zip(self.tokens, rows, self._cache.lengths, strict=True)):
            if new and len(held) + len(new) - 1 > n:
                found = self._cache.adopt(row, [*held, *new[:-1]])
                rest[row] = new[max(0, found - len(held)) :]
                self.adopted[row] = found - n
        return rest
