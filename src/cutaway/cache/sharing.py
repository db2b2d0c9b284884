"""Pages found again by the tokens that were read into them, and before them.

A page's key is a hash of its tokens and of the key before, so that equal keys mean equal texts up to there: unless two
texts have one key. So the tokens themselves are compared, page by page from the beginning (case T26).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import ReferenceType, WeakValueDictionary, ref

from cutaway.cache.paged import PagedStore
from cutaway.cache.pages import EMPTY


@dataclass(slots=True, eq=False, weakref_slot=True)
class Entry:
    """A page's worth of tokens after a certain beginning.

    Attributes:
        key: under which it is found.
        before: the entry of the page before; None for the entry that texts with one salt begin with.
        tokens: what was read.
        pages: where, in each store; EMPTY where it is not kept any more.
        after: entries whose ``before`` this is.
    """

    key: bytes
    before: Entry | None = None
    tokens: tuple[int, ...] = ()
    pages: list[int] = field(default_factory=list)
    after: int = 0


@dataclass(slots=True)
class Read:
    """What is known of a row: the entries of its full pages, after its root, and the tokens that follow."""

    chain: list[Entry]
    rest: list[int] = field(default_factory=list)

    def copy(self) -> Read:
        """The same, to go on by itself."""
        return Read(list(self.chain), list(self.rest))


class Index:
    """All entries over some pools."""

    def __init__(self, stores: Sequence[PagedStore]) -> None:
        self._pools = [store.pool for store in stores]
        self._entries: dict[bytes, Entry] = {}
        # A salt that no row and no page has any more is forgotten: they may be as many as there are requests.
        self._roots: WeakValueDictionary[bytes, Entry] = WeakValueDictionary()
        self._of: list[dict[int, Entry]] = [{} for _ in stores]
        for place, pool in enumerate(self._pools):  # which must not keep this alive, or they would keep one another
            pool.forget = partial(_forget, ref(self), place)

    def root(self, salt: bytes) -> Entry:
        """What texts begin with that may share pages: those with the same salt."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Entry(key_of(b"salt", salt))
        return root

    def find(self, before: Entry, tokens: tuple[int, ...]) -> Entry | None:
        """The entry of a page after ``before``, if there is one."""
        entry = self._entries.get(key_of(before.key, tokens))
        return entry if entry is not None and entry.before is before and entry.tokens == tokens else None

    def add(self, before: Entry, tokens: tuple[int, ...], pages: Sequence[int]) -> Entry:
        """Note where a page's tokens lie; where they are known to lie already, that stays."""
        key = key_of(before.key, tokens)
        entry = self.find(before, tokens)
        if entry is None:
            entry = Entry(key, before, tokens, [EMPTY] * len(pages))
            if key in self._entries:  # another text has this key, and keeps it
                return entry
            self._entries[key] = entry
            before.after += 1
        for place, page in enumerate(pages):
            if entry.pages[place] == EMPTY != page:
                entry.pages[place] = page
                self._of[place][page] = entry
                self._pools[place].know(page)
        return entry

    def forget(self, place: int, page: int) -> None:
        """A page is about to hold something else. Entries go that lead to no page any more."""
        entry = self._of[place].pop(page)
        entry.pages[place] = EMPTY
        while entry.before is not None and self._entries.get(entry.key) is entry:
            if entry.after or any(entry.pages):
                return
            del self._entries[entry.key]
            entry = entry.before
            entry.after -= 1


def _forget(index: ReferenceType[Index], place: int, page: int) -> None:
    if (found := index()) is not None:
        found.forget(place, page)


class Sharing:
    """What is known of each row of a cache, and what it may take over from others.

    Args:
        stores: of the cache.
        index: over their pools.
        rows: what is known of each.
    """

    def __init__(self, stores: Sequence[PagedStore], index: Index, rows: list[Read]) -> None:
        self.size = stores[0].pool.size
        self._stores = stores
        self._index = index
        self._rows = rows

    @classmethod
    def begun(cls, stores: Sequence[PagedStore], batch: int) -> Sharing:
        """Of a new cache."""
        sharing = cls(stores, Index(stores), [])
        sharing.join(batch, b"")
        return sharing

    def adopt(self, row: int, length: int, tokens: Sequence[int]) -> int:
        """Have a row read pages that hold what its text begins with; how many tokens it holds then.

        Args:
            row: which.
            length: how many it holds.
            tokens: its text from the beginning, also what it has read already.
        """
        chain, least = [self._rows[row].chain[0]], length // self.size
        for start in range(0, len(tokens) - self.size + 1, self.size) if len(tokens) // self.size > least else ():
            entry = self._index.find(chain[-1], tuple(tokens[start : start + self.size]))
            if entry is None:
                break
            chain.append(entry)
        n = len(chain) - 1
        while n > least:
            pages = [[entry.pages[place] for entry in chain[1 : n + 1]] for place in range(len(self._stores))]
            gaps = [max((i for i, page in enumerate(found) if page == EMPTY), default=-1) + 1 for found in pages]
            short = [gap for gap, store in zip(gaps, self._stores, strict=True) if gap > store.first(n * self.size)]
            if not short:
                for store, found, gap in zip(self._stores, pages, gaps, strict=True):
                    store.adopt(row, [EMPTY] * gap + found[gap:])
                self._rows[row] = Read(chain[: n + 1])
                return n * self.size
            n = min(short) - 1  # with more than that, the same page is missing
        return length

    def note(self, row: int, before: int, tokens: Sequence[int]) -> None:
        """A row that held ``before`` tokens has read these. If those before are not known, these are of no use."""
        read = self._rows[row]
        if before != self._known(read):
            return
        read.rest += tokens
        while len(read.rest) >= self.size:
            place = len(read.chain) - 1
            page, read.rest = tuple(read.rest[: self.size]), read.rest[self.size :]
            read.chain.append(self._index.add(read.chain[-1], page, [store.page(row, place) for store in self._stores]))

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first tokens of each row."""
        for read, n in zip(self._rows, lengths, strict=True):
            if n < self._known(read):
                whole = n // self.size
                rest = read.rest if whole == len(read.chain) - 1 else list(read.chain[whole + 1].tokens)
                del read.chain[whole + 1 :]
                read.rest = rest[: n % self.size]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self._rows = [self._rows[row].copy() for row in rows]

    def join(self, rows: int, salt: bytes) -> None:
        """More rows, empty, after these; they share with rows of the same salt only."""
        self._rows += [Read([self._index.root(salt)]) for _ in range(rows)]

    def fork(self, stores: Sequence[PagedStore], rows: Sequence[int]) -> Sharing:
        """These rows in stores of their own, with the same index."""
        return Sharing(stores, self._index, [self._rows[row].copy() for row in rows])

    def _known(self, read: Read) -> int:
        """Tokens of a row that are known."""
        return self.size * (len(read.chain) - 1) + len(read.rest)


def key_of(before: bytes, what: bytes | tuple[int, ...]) -> bytes:
    """SHA-256 over a kind and the two parts, each with its length before it, so that no two texts look alike."""
    kind, data = (
        (b"salt", what) if isinstance(what, bytes) else (b"page", b"".join(int(t).to_bytes(8, "big") for t in what))
    )
    found = hashlib.sha256(kind)
    for part in (before, data):
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.digest()
