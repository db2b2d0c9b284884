"""Must show 6: a stream is the whole text, and nothing of a stop text is ever shown, in 500 generations by default.

A model says random ids of a vocabulary: those of texts with emoji and scripts of all kinds, single bytes, halves of
characters, control tokens, anything. What they spell is read here without ours: from the library's own decoder, or, as
that has its own way with broken bytes, from the vocabulary's entries byte by byte.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from cutaway.generation.generate import Row, Run
from cutaway.generation.params import resolve
from cutaway.generation.stop import StopText
from cutaway.spec import GenerationSettings
from cutaway.tokenizers import Tokenizer, from_folder
from tests.generation.scripted import Scripted, Spec
from tests.generation.test_stop import cut
from tests.reference.test_tokenizers_real import read
from tests.tokenizers import small, trained
from tests.tokenizers.texts import random_texts

LONGEST = 30
MORE = ["👩‍👩‍👧‍👦👍🏽🇩🇪", "東京は日本の首都です。", "é🙂 日本", "안녕하세요 🙂🙃", "𠀀𠀁 emoji 😀😃"]
TEXTS = random_texts(300, seed=6) + MORE * 30
BYTES = {char: byte for byte, char in bytes_to_unicode().items()}

# ── what ids spell ───────────────────────────────────────────────────────────────────────────────────────────


def byte_level(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """By GPT-2's table."""
    names, added = tokenizer.backend.id_to_token, tokenizer.backend.get_added_tokens_decoder()
    data = b""
    for index in ids:
        if (name := names(index)) is not None and name not in tokenizer.special:
            data += name.encode() if index in added else bytes(BYTES[char] for char in name)
    return data.decode("utf-8", "replace")


def sentencepiece(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """``▁`` is a space and ``<0xNN>`` a byte."""
    data = b""
    for index in ids:
        if (name := tokenizer.backend.id_to_token(index)) is not None and name not in tokenizer.special:
            byte = name.startswith("<0x") and len(name) == 6
            data += bytes([int(name[3:5], 16)]) if byte else name.replace("▁", " ").encode()
    return data.decode("utf-8", "replace")


def word_piece(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """By the library, all at once."""
    return str(tokenizer.backend.decode(list(ids), skip_special_tokens=True))


def a_text_of_its_own(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """An encoder–decoder's answer goes on from nothing, so its first space was put there by the vocabulary."""
    return sentencepiece(tokenizer, ids).removeprefix(" ")


# ── vocabularies ─────────────────────────────────────────────────────────────────────────────────────────────

# How many generations by default. The others are large, and slow to read.
VOCABULARIES = {
    "small byte-level": (byte_level, 150),
    "small SentencePiece": (sentencepiece, 150),
    "small WordPiece": (word_piece, 60),
    "small Unigram": (a_text_of_its_own, 60),
    "smollm2": (byte_level, 40),
    "llama2": (sentencepiece, 40),
    "llama3": (byte_level, 0),
    "qwen3": (byte_level, 0),
    "gpt4o": (byte_level, 0),
    "gemma3": (sentencepiece, 0),
}
assert sum(count for _, count in VOCABULARIES.values()) == 500


def opened(name: str, folder: Path, request: pytest.FixtureRequest) -> Tokenizer:
    if name == "smollm2":
        return read(request.getfixturevalue("smollm2_path"))
    if not name.startswith("small"):
        found = from_folder(request.getfixturevalue("real_tokenizer")(name))
    elif name == "small WordPiece":
        found = from_folder(trained.bert(folder))
    elif name == "small Unigram":
        found = from_folder(trained.t5(folder, trained.spm(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)))
    else:
        return small.byte_level() if name == "small byte-level" else small.sentencepiece()
    assert found is not None
    return found


def ids_of(tokenizer: Tokenizer, chance: random.Random) -> list[int]:
    """What a model may say: pieces of texts, cut anywhere, and tokens of all kinds between them."""
    ids: list[int] = []
    control = sorted(tokenizer.special.values())
    while len(ids) < chance.randint(1, LONGEST):
        kind = chance.random()
        if kind < 0.6:
            more = tokenizer.encode(chance.choice(TEXTS), bos=False, special=chance.random() < 0.5)
            start = chance.randrange(len(more) + 1)
            ids += more[start : start + chance.randint(1, 12)]
        elif kind < 0.75:
            ids.append(chance.randrange(tokenizer.vocab_size))
        elif kind < 0.85 and control:
            ids.append(chance.choice(control))
        else:
            ids += byte_tokens(tokenizer, chance.choice("🙂é日𠀀👍").encode()[: chance.randint(1, 4)])
    return ids[:LONGEST]


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """A token for each byte, where there are such."""
    names = [f"<0x{byte:02X}>" for byte in data]
    if tokenizer.backend.token_to_id(names[0]) is None:
        names = [bytes_to_unicode()[byte] for byte in data]
    found = [tokenizer.backend.token_to_id(name) for name in names]
    return [index for index in found if index is not None]


# ── saying them ──────────────────────────────────────────────────────────────────────────────────────────────


def generated(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str]) -> tuple[list[str], str, list[int], str]:
    """Pieces, text, tokens and the reason of the end, through the loop."""
    model: Any = Scripted([0, 0, *ids], spec=Spec(vocab_size=tokenizer.vocab_size))
    sampling = resolve(
        GenerationSettings(), tokenizer.vocab_size, temperature=0, stop=list(stops), max_tokens=len(ids)
    )  # fmt: skip
    run = Run(model, tokenizer, [[1, 2, 3]], sampling)
    pieces = [piece for _, piece in run]
    result = run.results()[0]
    return pieces, result.text, result.tokens, str(result.finish_reason)


def answered(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str]) -> tuple[list[str], str, list[int], str]:
    """The same of an encoder–decoder's answer, which is a text of its own."""
    row = Row([1], 0, 0, len(ids), tokenizer.stream(), StopText(tuple(stops)), n_read=1)
    pieces: list[str] = []
    for index in ids:
        if row.finish_reason is None:
            pieces.append(row.take(index, frozenset()))
    return pieces, "".join(row.pieces), row.tokens, str(row.finish_reason)


def spans(text: str, chance: random.Random) -> list[str]:
    """Stop texts out of a text, of one to nine characters, wherever they begin."""
    starts = [chance.randrange(len(text)) for _ in range(chance.choice([1, 1, 2, 3]))]
    return [text[start : start + chance.randint(1, 9)] for start in starts]


def check(tokenizer: Tokenizer, spell: Callable[..., str], count: int, seed: int) -> tuple[int, int]:
    """So many generations without stops, and most of them again with; gives those, and tokens that showed nothing."""
    chance, stopped, waited = random.Random(seed), 0, 0
    say = answered if spell is a_text_of_its_own else generated
    for _ in range(count):
        ids = ids_of(tokenizer, chance)
        whole = spell(tokenizer, ids)
        pieces, text, tokens, reason = say(tokenizer, ids, ())
        assert ("".join(pieces), text, tokens, reason) == (whole, whole, ids, "length")
        if "�" not in whole:
            assert all("�" not in piece for piece in pieces)
        waited += len(ids) - sum(map(bool, pieces))
        if not whole:
            continue
        stops = spans(whole, chance)
        wanted = cut(whole, stops)
        pieces, text, tokens, reason = say(tokenizer, ids, stops)
        assert ("".join(pieces), text, reason) == (wanted, wanted, "stop"), stops
        if len(stops) == 1:
            assert wanted == whole.split(stops[0])[0]
        # It ends with the token that completes the stop, and not later.
        assert tokens == ids[: len(tokens)]
        stream = tokenizer.stream(continuation=spell is not a_text_of_its_own)
        earlier = "".join([stream.push(index) for index in tokens[:-1]])
        assert not any(stop in earlier for stop in stops)
        stopped += 1
    return stopped, waited


def marked(*names: str) -> list[Any]:
    return [name if name.startswith("small") else pytest.param(name, marks=pytest.mark.real) for name in names]


@pytest.mark.parametrize("name", marked(*(name for name, (_, count) in VOCABULARIES.items() if count)))
def test_a_stream_is_the_whole_text(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    spell, count = VOCABULARIES[name]
    stopped, waited = check(opened(name, tmp_path, request), spell, count, seed=1)
    print(f"\n{name}: {count} generations, {stopped} again with stops, {waited} tokens showed nothing at once")
    assert stopped > count / 2
    assert waited > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(*VOCABULARIES))
def test_five_hundred_of_each(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    stopped, waited = check(opened(name, tmp_path, request), VOCABULARIES[name][0], 500, seed=2)
    print(f"\n{name}: 500 generations, {stopped} again with stops, {waited} tokens showed nothing at once")


def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that lets the beginning of a stop out, and one that forgets what it held."""
    tokenizer = small.byte_level()
    for broken in (lambda self, stop: 0, lambda self, stop: max(0, len(self._held) - 1)):
        with monkeypatch.context() as patch:
            patch.setattr(StopText, "_overlap", broken)
            with pytest.raises(AssertionError):
                check(tokenizer, byte_level, 40, seed=1)
