"""Pages: shared, copied before they are written, given back, found by what they hold, and never read after that."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable

import pytest
import torch
from tests.reference import tiny, tiny_seq2seq
from torch import Tensor

from cutaway.cache import StoredCache, build, pages, sharing
from cutaway.errors import RequestError, ResourceError
from cutaway.generation.reading import read_sources
from cutaway.generation.session import Session
from cutaway.inspection import Recorder
from cutaway.models import Transformer

PLAIN, WINDOWS = tiny.transformer("llama"), tiny.transformer("gemma3")  # the latter has windows of 8, and none


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given back is spoilt."""
    monkeypatch.setattr(pages, "POISON", True)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of four tokens, and two more than a window are kept."""
    monkeypatch.setattr(build, "PAGE", 4)
    monkeypatch.setattr(build, "SLACK", 2)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many tokens models have read since it was last asked."""
    count, hidden = 0, Transformer.hidden

    def counted(
        self: Transformer, ids: Tensor, positions: Tensor | None = None, *rest: object, **more: object
    ) -> Tensor:
        nonlocal count
        count += ids.numel() if positions is None else int((positions >= 0).sum())
        return hidden(self, ids, positions, *rest, **more)  # type: ignore[arg-type]

    def asked() -> int:
        nonlocal count
        found, count = count, 0
        return found

    monkeypatch.setattr(Transformer, "hidden", counted)
    return asked


def text(n: int, seed: int = 1) -> list[int]:
    return tiny.ids(n, seed=seed).tolist()


def close(session: Session, logits: Tensor, rows: list[int] | None = None) -> None:
    """What follows each row is what a plain pass says."""
    for row in range(len(session.tokens)) if rows is None else rows:
        with torch.no_grad():
            plain = session.model(torch.tensor([session.tokens[row]]))[0, -1]
        assert float((logits[row] - plain).abs().max()) <= 1e-4


def used(cache: StoredCache) -> list[int]:
    """Pages that are held, in each pool."""
    return [store.pool.used for store in cache._stores]  # type: ignore[attr-defined]


# ---- memory ----------------------------------------------------------------------------------------------


def fill(cache: StoredCache, n: int) -> None:
    """As many random keys and values for each row."""
    start = torch.tensor(cache.lengths)[:, None]
    cache.begin(start + torch.arange(n))
    for i, layer in enumerate(WINDOWS.spec.decoder.layers):
        a = layer.attention
        x = torch.rand(len(start), a.n_kv_heads, n, a.d_head)
        cache.layer(i).update(x, x)


@pytest.mark.parametrize("sliding", [True, False])
def test_a_fork_of_a_long_prompt_copies_a_page(sliding: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one in each group of layers, when it is written; and the text that both have lies there once."""
    copied = []
    copy = pages.Pool.copy
    monkeypatch.setattr(pages.Pool, "copy", lambda self, *words: (copied.append(self), copy(self, *words)))
    cache = WINDOWS.new_cache(paged=True, sliding=sliding)
    fill(cache, 10_001)
    before, bytes_before = used(cache), cache.nbytes
    forks = [cache.fork([0]) for _ in range(8)]
    assert used(cache) == before
    assert not copied
    for fork in forks:
        fill(fork, 1)
    groups = len(before)
    assert len(copied) == 8 * groups  # the first row to write copies, and so on: the prompt's own page stays
    assert [now - old for now, old in zip(used(cache), before, strict=True)] == [8] * groups
    fill(cache, 1)
    assert len(copied) == 8 * groups  # nobody else reads that page any more
    if not sliding:
        assert {fork.nbytes for fork in forks} == {bytes_before}


@pytest.mark.usefixtures("small")
def test_every_page_comes_back() -> None:
    session = Session(WINDOWS, 3, paged=True)
    cache = session._cache
    session.feed([text(21, 1), text(9, 2), []])
    full = used(cache)
    other = session.fork([0, 0, 1])
    assert used(cache) == full
    other.feed([[1], [2], [3]])
    assert used(cache) > full
    del other
    assert used(cache) == full
    session.select([0, 0])
    assert used(cache) < full
    session.rewind([5, 21])
    session.rewind([0, 3])
    assert used(cache) == [1] * len(full)  # three tokens
    session.select([])
    assert used(cache) == [0] * len(full)
    session.join(2)
    close(session, session.feed([text(5, 3), text(2, 4)]))


def test_a_pool_goes_with_its_last_session() -> None:
    """At once, not when the garbage collector comes round: it may be gigabytes."""
    gc.collect()
    gc.disable()
    try:
        session = Session(WINDOWS, 2, paged=True)
        session.feed([text(40, 1), text(9, 2)])
        fork = session.fork()
        fork.feed([text(20, 3), [1]])
        pools = [weakref.ref(store.pool) for store in session._cache._stores]  # type: ignore[attr-defined]
        del session
        assert all(pool() is not None for pool in pools)
        del fork
        assert [pool() for pool in pools] == [None, None]
    finally:
        gc.enable()


@pytest.mark.usefixtures("small")
def test_a_window_keeps_no_more_than_it_needs() -> None:
    """Pages of tokens that nobody may read any more are given back, however long a text grows."""
    session, whole = Session(WINDOWS, paged=True), WINDOWS.new_cache(paged=True, sliding=False)
    for seed in range(12):
        close(session, session.feed([text(5, seed)]))
    fill(whole, 60)
    near, far = used(session._cache)
    assert near <= -(-(8 + 2 + 5 + 3) // 4)  # a window, the slack, a pass, and where pages begin
    assert far == 15
    assert used(whole) == [15]


def test_memory_grows_with_the_text() -> None:
    """And never by more than as much again: a pool is enlarged, what is held is moved once for each doubling."""
    cache = PLAIN.new_cache(capacity=16, paged=True)
    token = 2 * sum(a.n_kv_heads * a.d_head * 4 for a in (layer.attention for layer in PLAIN.spec.decoder.layers))
    assert cache.nbytes == 0
    for n in range(1, 40):
        cache.begin(torch.tensor([[n - 1]]))
        assert cache.nbytes == -(-n // 16) * 16 * token
    pool = cache._stores[0].pool  # type: ignore[attr-defined]
    assert pool.page_nbytes == 16 * token
    assert sum(x.nbytes for layer in pool._layers for x in layer.values()) <= (2 * 3 + 2) * 16 * token


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("model", [PLAIN, WINDOWS])
def test_a_full_cache(model: Transformer) -> None:
    """Says so, and everything is as it was; rows that leave make room."""
    session = Session(model, 2, paged=True, most_pages=10)
    session.feed([text(13, 1), text(9, 2)])  # 4 + 3 pages
    before, tokens = used(session._cache), [list(row) for row in session.tokens]
    assert session.free_pages == 10 - max(before)
    for news in ([text(30, 3), []], [text(8, 3), text(9, 4)], [text(40, 3), []]):
        with pytest.raises(ResourceError) as caught:
            session.feed(news)
        assert (caught.value.field, caught.value.exit_code) == ("pages", 4)
        assert session.tokens == tokens
        assert session._cache.lengths == [len(row) for row in tokens]
        # A window's pages that are out of reach have gone: they would have, had there been room.
        assert used(session._cache)[-1] == before[-1]
        assert used(session._cache)[0] <= before[0]
    close(session, session.feed([text(7, 3), text(3, 4)]))
    fork = session.fork([0, 1])
    with pytest.raises(ResourceError):
        fork.feed([text(9, 5), text(9, 6)])
    close(session, session.feed([[5], []]), [0])
    session.select([0])
    del fork
    close(session, session.feed([text(15, 7)]))


@pytest.mark.usefixtures("small")
def test_a_pass_that_finds_no_room_takes_none() -> None:
    """Also where one pool had enough and the other had not."""
    cache = WINDOWS.new_cache(paged=True, most_pages=6)
    fill(cache, 17)
    fill(cache, 1)  # gives back what is out of reach
    before = used(cache)
    with pytest.raises(ResourceError):
        cache.begin(torch.arange(18, 30)[None])
    assert used(cache) == before
    assert cache.lengths == [18]
    fill(cache, 6)


def test_refusals() -> None:
    for words in ({"most_pages": 3}, {"most_pages": 0, "paged": True}):
        with pytest.raises(RequestError) as caught:
            Session(PLAIN, **words)  # type: ignore[arg-type]
        assert caught.value.field == "most_pages"
    model = tiny_seq2seq.transformer("t5")
    session = Session(model, 1, 8, read_sources(model, [text(5)]), paged=True)
    with pytest.raises(RequestError, match="begin together"):
        session.join()


# ---- the same beginning ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("model", [PLAIN, WINDOWS], ids=["whole", "windows"])
def test_a_prompt_that_another_row_has_read(model: Transformer, read: Callable[[], int]) -> None:
    """Only what is new is read, and never nothing: the last token says what follows."""
    session = Session(model, 1, paged=True)
    prompt = text(22, 1)
    session.feed([prompt])
    assert read() == 22
    session.join(2)
    logits = session.feed([[], prompt, [*prompt[:13], *text(6, 2)]])
    assert session.adopted == [0, 20, 12]
    assert read() == 2 + 7
    close(session, logits, [1, 2])
    session.join()
    logits = session.feed([[], [], [], prompt[:20]])
    assert session.adopted == [0, 0, 0, 16]  # not the fifth page, which has the last token
    close(session, logits, [3])
    close(session, session.feed([[1], [2], [3], text(9, 9)]))


@pytest.mark.usefixtures("small")
def test_a_row_may_take_over_what_comes_later() -> None:
    """Also in the middle of a text, in the place of a page that is its own and not full."""
    session = Session(WINDOWS, 2, paged=True)
    prompt = text(30, 1)
    session.feed([prompt, prompt[:6]])
    assert session.adopted == [0, 0]  # both read at once
    logits = session.feed([[], prompt[6:]])
    assert session.adopted == [0, 28 - 6]
    close(session, logits, [1])
    session.rewind([29, 15])
    close(session, session.feed([[3], text(5, 4)]))
    session.rewind([0, 0])
    logits = session.feed([prompt[:25], []])
    assert session.adopted == [24, 0]  # of pages that were given back and not yet used again
    close(session, logits, [0])


@pytest.mark.usefixtures("small")
def test_what_was_rewound_is_known_as_it_is_now() -> None:
    """Back into the middle of a page, and on with another text: that is found, and the old one is, and no mixture."""
    session = Session(PLAIN, 1, paged=True)
    old, new = text(14, 1), text(7, 2)
    session.feed([old])
    session.rewind([6])
    session.feed([new])
    rows = [[*old[:6], *new], old, [*old[:4], *old[12:], *new], [*old[:4], *old[8:10], *new]]
    session.join(len(rows))
    logits = session.feed([[], *rows])
    assert session.adopted == [0, 12, 12, 4, 4]
    close(session, logits, [1, 2, 3, 4])


@pytest.mark.usefixtures("small")
def test_what_left_is_found_until_its_room_is_needed() -> None:
    """Those that were given back last stay longest, and of a text its beginning."""
    session = Session(PLAIN, 1, paged=True, most_pages=8)
    one, two = text(12, 1), text(12, 2)
    for row in (one, two):
        session.feed([row])
        session.rewind([0])
    for row in (one, two):
        session.feed([row])
        assert session.adopted == [8]
        session.rewind([0])
    session.feed([text(20, 3)])  # five pages: three of those, and of the older text none but the first remain
    session.rewind([0])
    session.feed([two])
    assert session.adopted == [8]
    session.rewind([0])
    session.feed([one])
    assert session.adopted[0] < 8
    close(session, session.feed([[4]]))


@pytest.mark.usefixtures("small")
def test_two_texts_with_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case T26: whatever the hash, another text's pages are never read."""
    monkeypatch.setattr(sharing, "key_of", lambda before, what: b"the same")
    session = Session(PLAIN, 1, paged=True)
    one, same, other = text(12, 1), text(12, 1), text(12, 2)
    session.feed([one])
    session.join(3)
    logits = session.feed([[], same, other, [*other[:4], *one[4:]]])
    assert session.adopted == [0, 4, 0, 0]  # only one page can have that key
    close(session, logits, [1, 2, 3])
    # The same page of tokens after another beginning is another page.
    monkeypatch.setattr(sharing, "key_of", lambda before, what: repr(what).encode())
    session = Session(PLAIN, 1, paged=True)
    session.feed([one])
    session.join(1)
    logits = session.feed([[], [*other[:4], *one[4:]]])
    assert session.adopted == [0, 0]
    close(session, logits, [1])
    session = Session(PLAIN, 1, paged=True)
    session.feed([[*one[:4], *one[:4], 7]])
    session.join(1)
    logits = session.feed([[], [*one[:4], *one[:4], 7]])
    close(session, logits, [1])


def test_keys() -> None:
    """Parts have their kind and length before them: no two lists of parts make the same bytes."""
    parts = [
        (b"", b""), (b"", b"a"), (b"a", b""), (b"", ()), (b"a", (1,)), (b"a\0", (1,)), (b"", (0, 1)), (b"", (1, 0)),
        (b"", (1,)), (b"", (0,)), (b"", (0, 0)), (b"", bytes(8)), (b"", (2**40,)), (bytes(8), ()), (bytes(16), ()),
    ]  # fmt: skip
    assert len({sharing.key_of(*part) for part in parts}) == len(parts)
    assert len(sharing.key_of(b"", (5,))) == 32


@pytest.mark.usefixtures("small")
def test_salts(read: Callable[[], int]) -> None:
    """Rows share with their like: nobody can tell by the time what a stranger has read (case T25)."""
    session = Session(PLAIN, 0, paged=True)
    prompt = text(14, 1)
    for salt, wanted in ((b"", 0), (b"ann", 0), (b"bob", 0), (b"ann", 12), (b"", 12)):
        session.join(1, salt)
        read()
        logits = session.feed([*[[]] * (len(session.tokens) - 1), prompt])
        assert session.adopted[-1] == wanted
        assert read() == 14 - wanted
        close(session, logits, [len(session.tokens) - 1])
    for i in range(50):
        session.join(1, b"%d" % i)
        session.select(range(5))
    index = session._cache._sharing._index  # type: ignore[union-attr]
    assert {*index._roots} == {b"", b"ann", b"bob"}


@pytest.mark.usefixtures("small")
def test_what_is_edited_is_not_shared() -> None:
    """Nor is anything that is read after it; when it was taken back, what comes instead is."""
    session = Session(PLAIN, 1, paged=True)
    prompt = text(20, 1)
    louder = Recorder([], {"decoder.layers.0.attn.v": [lambda x: 3 * x]})
    session.feed([prompt[:6]])
    session.feed([prompt[6:9]], louder)
    session.feed([prompt[9:]])
    session.join()
    logits = session.feed([[], prompt])
    assert session.adopted == [0, 4]
    close(session, logits, [1])
    session.join()
    logits = session.feed([[], [], [*prompt[:6], *prompt[9:]]])  # what is left without the edited ones
    assert session.adopted == [0, 0, 4]
    close(session, logits, [2])
    session.select([0])
    session.rewind([6])
    session.feed([[*prompt[6:10], 1, 2, 3]])
    session.join()
    logits = session.feed([[], [*prompt[:10], 1, 2, 3, 4]])
    assert session.adopted == [0, 12]
    close(session, logits, [1])
    # Who looks on sees every token: nothing is taken over behind his back.
    session.join()
    recorder = Recorder(["decoder.layers.0.attn.q"])
    session.feed([[], [], prompt], recorder)
    assert recorder.kept["decoder.layers.0.attn.q"][0].shape[1] == 20
    assert session.adopted == [0] * 3


@pytest.mark.usefixtures("small")
def test_where_keys_follow_from_more_than_the_tokens() -> None:
    """From how long the text is, or from a source: nothing is shared by content. Forks share all the same."""
    from tests.reference.test_long_texts import LONG

    model = tiny.transformer(LONG["longrope"])
    model.warned_length = True
    session = Session(model, 1, paged=True)
    session.feed([text(12)])
    session.join()
    session.feed([[], text(30)])
    assert session.adopted == [0, 0]

    model = tiny_seq2seq.transformer("bart")
    session = Session(model, 2, 8, read_sources(model, [text(9, 1), text(9, 2)]), paged=True)
    apart = session.feed([text(9, 3), text(9, 3)])
    assert float((apart[0] - apart[1]).abs().max()) > 0.01
    session.select([0, 0, 1])
    before = used(session._cache)
    logits = session.feed([[5], [5], [5]])
    assert torch.equal(logits[0], logits[1])
    assert used(session._cache) == [before[0] + 1]


@pytest.mark.usefixtures("small")
def test_the_same_bits_from_shared_pages() -> None:
    """In steady sessions, where a page's numbers do not depend on what it was read with."""
    prompt = text(27, 1)
    alone, session = (Session(WINDOWS, 1, steady=True, paged=True) for _ in range(2))
    wanted = alone.feed([prompt])
    for pieces in ([prompt[:11], prompt[11:]], [prompt[:3], prompt[3:20]]):
        for piece in pieces:
            session.feed([*[[]] * (len(session.tokens) - 1), piece])
        session.join()
    logits = session.feed([[], [], prompt])
    assert session.adopted[2] == 24
    assert torch.equal(logits[2], wanted[0])


# ---- any life --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 150))])
def test_any_life(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case T27: rows come and go, fork, rewind, break off and share, in a pool that is often full: nobody reads a page
    that is another's now, and what is held is what rows have."""
    chance = random.Random(seed)
    model = [PLAIN, WINDOWS, tiny.transformer("mistral-window")][seed % 3]
    most = chance.choice([None, 12, 20, 30])
    sessions = [Session(model, 1, paged=True, most_pages=most, kv_dtype=None)]
    texts = [text(40, n) for n in range(3)]  # so that beginnings are often the same

    def boom(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    full = 0
    for _ in range(40):
        session = chance.choice(sessions)
        batch = len(session.tokens)
        match chance.choice(["feed"] * 5 + ["rewind", "reuse", "fork", "select", "join", "break", "end"]):
            case "rewind":
                session.rewind([chance.randint(0, len(row)) for row in session.tokens])
            case "reuse":
                session.reuse([chance.choice(texts) for _ in session.tokens])
            case "fork":
                sessions.append(session.fork([chance.randrange(batch) for _ in range(chance.randint(1, 2))]))
            case "select":
                session.select([chance.randrange(batch) for _ in range(chance.randint(1, 3))])
            case "join":
                session.join(1, chance.choice([b"", b"x"]))
            case "break":
                news = [text(chance.randint(1, 6), 5)] * batch
                bomb = Recorder([], {f"decoder.layers.{chance.randrange(2)}.attn.{chance.choice('qz')}": [boom]})
                with pytest.raises((KeyboardInterrupt, ResourceError)):
                    session.feed(news, bomb)
            case "end":
                sessions.remove(session)
                del session
                if not sessions:
                    sessions = [Session(model, 1, paged=True, most_pages=most)]
                continue
            case _:
                news = []
                for row in session.tokens:
                    like = [one for one in texts if one[: len(row)] == row]
                    more = chance.choice(like)[len(row) :] if like else text(9, chance.randint(0, 99))
                    news.append(more[: chance.choice([0, 1, 1, 3, 9, 20])] if len(row) < 40 else [])
                try:
                    logits = session.feed(news)
                except ResourceError:
                    full += 1
                    session.select([0])
                    session.rewind([len(session.tokens[0]) // 2])
                    continue
                assert logits.isfinite().all()
                close(session, logits, [row for row, new in enumerate(news) if new])
        del session
        for place, store in enumerate(sessions[0]._cache._stores):
            rows = [row for one in sessions for row in one._cache._stores[place]._rows]  # type: ignore[attr-defined]
            pool = store.pool  # type: ignore[attr-defined]
            if all(one._cache._stores[place].pool is pool for one in sessions):  # type: ignore[attr-defined]
                assert pool.used == len({page for row in rows for page in row} - {pages.EMPTY})
    print(f"\n{full} times full")
