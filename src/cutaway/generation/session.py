"""Rows of tokens with the cache that remembers them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import TypeAlias

import torch
from torch import Tensor

from cutaway.cache import KvDtype, Source
from cutaway.errors import RequestError
from cutaway.formats.files import StrPath
from cutaway.formats.paths import usable_path
from cutaway.generation import saved
from cutaway.generation.checks import flag, whole
from cutaway.generation.drafting import network_of
from cutaway.generation.inputs import each_row, places_of, shared
from cutaway.generation.reading import check_length
from cutaway.generation.steady import unembedded
from cutaway.models import Transformer
from cutaway.models.batch import pad
from cutaway.modules.attention import How
from cutaway.modules.steady import ROWS
from cutaway.modules.tap import Tap

# Final states of each row's next tokens, [batch, piece, d_model], and how many of them are real.
Seen: TypeAlias = Callable[[Tensor, Sequence[int]], None]
CHUNK = 512  # tokens of a prompt that are run at once: bounds the memory of a long one


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
    ) -> None:
        self.model = network_of(model)
        self.steady = flag("steady", steady)
        self.kv_dtype = kv_dtype
        self._paged = flag("paged", paged)
        whole("batch", batch, 0)
        whole("capacity", capacity, 0)
        # A ring's slots are out of order, and a sum's order is what steadiness is about.
        self._cache = model.new_cache(
            batch, capacity, sliding=not steady, source=source, kv_dtype=kv_dtype, paged=paged, most_pages=most_pages
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

        An exception on the way, of the tap or from the keyboard, leaves the session as it was before.

        Args:
            rows: new tokens of each row; a row with none keeps still, and its result means nothing.
            tap: reads or edits what is computed on the way.
            seen: given the final states of the new tokens, piece by piece.

        Returns:
            Logits after each row's last token. [batch, vocab]

        Raises:
            ContextExceeded: a row would outgrow a learned table of positions.
            ResourceError: there are not so many pages; the session is as it was before.
        """
        return self._extend(rows, tap, seen, each=False)

    @torch.no_grad()
    def feed_each(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Read more tokens as :meth:`feed` does, and predict what follows each of them.

        They count as read one after another: where rotary positions change with a text's length, each token takes
        those of the text up to it, so that a row which goes back to any of them stands as if it had come no further.

        Returns:
            Logits after each new token, row after row. [new tokens, vocab]
        """
        return self._extend(rows, None, None, each=True)

    def _extend(self, rows: Sequence[Sequence[int]], tap: Tap | None, seen: Seen | None, each: bool) -> Tensor:
        """Read, and give logits after each row's last token ([batch, vocab]) or after each new one ([new, vocab])."""
        rows = each_row(rows, len(self.tokens), self.model.spec.vocab_size)
        before = [len(held) for held in self.tokens]
        check_length(self.model, max((n + len(new) for n, new in zip(before, rows, strict=True)), default=0))
        self.adopted = [0] * len(before)
        try:
            watched = tap is not None or seen is not None or each  # by somebody who is to see every token
            rest = self._adopt(rows) if self._paged and not watched else rows
            behind = [held[n:] for held, n in zip(self.tokens, self._cache.lengths, strict=True)]
            if any(behind):
                self._read(behind, None, None)
            found = self._read_each(rest) if each else self._read(rest, tap, seen)
            logits = (
                unembedded(self.model, found, tap) if self.steady else self.model.unembed(found[:, None], tap)[:, 0]
            )
            for held, new in zip(self.tokens, rows, strict=True):
                held.extend(new)
        except BaseException:
            for held, n in zip(self.tokens, before, strict=True):
                del held[n:]
            self._cache.rewind(before)
            raise
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

    def _read(self, rows: Sequence[Sequence[int]], tap: Tap | None, seen: Seen | None) -> Tensor:
        """The final hidden state of each row's last new token. [batch, d_model]"""
        last = self._nothing(len(rows))
        for hidden, counts in self._passes(rows, tap):
            lengths = counts.tolist()
            if seen is not None:
                seen(hidden, lengths)
            if len(set(lengths)) == 1:  # as in every step of a single answer: fewer small operations
                last = hidden[:, lengths[0] - 1]
                continue
            ends = hidden[torch.arange(len(rows), device=hidden.device), (counts - 1).clamp(min=0)]
            last = torch.where(counts[:, None] > 0, ends, last)
        return last

    def _read_each(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """That of each new token, row after row. [new tokens, d_model]"""
        if all(len(new) == 1 for new in rows):  # as in every step without guesses: fewer small operations
            if self.between is not None:
                self.between()
            how: How | None = "steady" if self.steady else None
            if not self._paged and (hidden := self.model.step([new[0] for new in rows], self._cache, how)) is not None:
                return hidden[:, 0]
        states, owners = [self._nothing(0)], [torch.zeros(0, dtype=torch.long, device=self.model.device)]
        for hidden, counts in self._passes(rows, None, one_by_one=True):
            real = torch.arange(hidden.shape[1], device=hidden.device) < counts[:, None]
            states.append(hidden[real])
            owners.append(real.nonzero()[:, 0])
        return torch.cat(states)[torch.cat(owners).argsort(stable=True)]

    def _nothing(self, n: int) -> Tensor:
        """[n, d_model]"""
        return torch.zeros(n, self.model.spec.d_model, dtype=self.model.dtype, device=self.model.device)

    def _passes(
        self, rows: Sequence[Sequence[int]], tap: Tap | None, *, one_by_one: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Read in passes of bounded length: the final hidden states, and how many of each row are tokens.

        [batch, query, d_model] and [batch]
        """
        model = self.model
        lengths = torch.tensor([n + len(new) for n, new in zip(self._cache.lengths, rows, strict=True)])
        for start in range(0, max(map(len, rows)), CHUNK):
            if self.between is not None:
                self.between()
            pieces = [list(new[start : start + CHUNK]) for new in rows]
            ids, steps = pad(pieces, multiple=ROWS if self.steady else 1)
            positions = torch.where(steps >= 0, torch.tensor(self._cache.lengths)[:, None] + steps, -1)
            reach = positions + 1 if one_by_one else lengths
            how: How | None = "steady" if self.steady else None
            hidden = model.hidden(ids, positions, cache=self._cache, tap=tap, lengths=reach, how=how)
            if self._paged and tap is None:  # an edit makes keys and values that are not the model's own
                self._cache.note(pieces)
            yield hidden, torch.tensor([len(piece) for piece in pieces], device=model.device)

    def _adopt(self, rows: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Take over what others have read of these rows' texts, all but a last token; what is left of the new ones."""
        rest = list(rows)
        for row, (held, new, n) in enumerate(zip(self.tokens, rows, self._cache.lengths, strict=True)):
            if new and len(held) + len(new) - 1 > n:
                found = self._cache.adopt(row, [*held, *new[:-1]])
                rest[row] = new[max(0, found - len(held)) :]
                self.adopted[row] = found - n
        return rest
