"""A session saved and gone on with is the session that went on, bit for bit; and no other model takes it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

import cutaway
from cutaway.cache import build, pages
from cutaway.errors import CutawayError, FormatError, RequestError, ResumeMismatch, ShapeMismatch, TruncatedError
from cutaway.formats.safetensors import SafetensorsFile
from cutaway.generation import saved
from cutaway.generation.reading import read_sources
from cutaway.generation.session import Session
from cutaway.models import Transformer
from tests.generation.sweep import FEW, families
from tests.reference import tiny, tiny_seq2seq


@pytest.fixture
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """And small pages, spoilt when they are given back."""
    monkeypatch.setattr(build, "SLACK", 4)
    monkeypatch.setattr(build, "PAGE", 4)
    monkeypatch.setattr(pages, "POISON", True)


def text(n: int, seed: int = 1) -> list[int]:
    return tiny.ids(n, seed=seed).tolist()


def kept(model: Transformer, session: Session, path: Path) -> Session:
    session.save(path)
    return Session.load(model, path)


def together(one: Session, two: Session, rows: list[list[int]]) -> None:
    """Both read the same, and predict the same bits."""
    fed = [i for i, row in enumerate(rows) if row]
    assert torch.equal(one.feed(rows)[fed], two.feed(rows)[fed])
    assert one.tokens == two.tokens


@pytest.mark.usefixtures("short_rings")
@pytest.mark.parametrize("paged", [False, True], ids=["plain", "paged"])
@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("name", families(*FEW))
def test_the_same_bits(name: str, steady: bool, paged: bool, tmp_path: Path) -> None:
    """Ragged, past a ring's window, after rewinds that need reading again, and when forked."""
    model = tiny.transformer(name)
    one = Session(model, 3, capacity=4, steady=steady, paged=paged)
    one.feed([text(31, 1), text(9, 2), []])
    two = kept(model, one, tmp_path / "a")
    together(one, two, [text(3, 4), text(1, 5), text(8, 6)])
    for lengths in ([33, 10, 7], [12, 10, 0]):
        one.rewind(lengths)
        two.rewind(lengths)
        two = kept(model, two, tmp_path / "a")
        together(one, two, [text(2, 7), [], text(3, 8)])
    one.select([2, 0])
    together(one, kept(model, two.fork([2, 0]), tmp_path / "a"), [text(1, 9), text(12, 9)])


@pytest.mark.usefixtures("short_rings")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["mistral-window", "gemma3", "llama"])
def test_any_life(name: str, seed: int, tmp_path: Path) -> None:
    """Fed, rewound, reused, forked, picked from and saved at random: what is said is what a plain pass says."""
    model, chance = tiny.transformer(name), random.Random(seed)
    session = Session(model, 2, capacity=4, paged=seed % 2 == 1)
    for _ in range(12):
        batch = len(session.tokens)
        match chance.choice(["feed", "feed", "feed", "rewind", "reuse", "fork", "select", "save"]):
            case "rewind":
                session.rewind([chance.randint(0, len(row)) for row in session.tokens])
            case "reuse":
                session.reuse(
                    [row[: chance.randint(0, len(row))] + text(2, chance.randint(0, 99)) for row in session.tokens]
                )
            case "fork":
                other, session = session, session.fork([chance.randrange(batch) for _ in range(chance.randint(1, 3))])
                other.feed([text(5, 3)] * batch)
            case "select":
                session.select([chance.randrange(batch) for _ in range(chance.randint(1, 3))])
            case "save":
                session = kept(model, session, tmp_path / "a")
            case _:
                session.feed([text(chance.choice([0, 1, 2, 11]), chance.randint(0, 99)) for _ in range(batch)])
                session.rewind([min(len(row), 40) for row in session.tokens])
    logits = session.feed([[7]] * len(session.tokens))
    with torch.no_grad():
        wanted = torch.stack([model(torch.tensor([row]))[0, -1] for row in session.tokens])
    assert float((logits - wanted).abs().max()) <= 1e-4


@pytest.mark.parametrize(("steady", "paged"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_with_a_source(name: str, steady: bool, paged: bool, tmp_path: Path) -> None:
    """What the encoder read is kept too, and a fork has it."""
    model = tiny_seq2seq.transformer(name)
    source = read_sources(model, [text(9, 1), text(5, 2)], steady=steady)
    one = Session(model, 2, 8, source, steady, paged=paged)
    one.feed([text(3, 3), text(6, 4)])
    two = kept(model, one, tmp_path / "a")
    together(one, two, [text(1, 5), text(2, 6)])
    fork = kept(model, two.fork([1, 0, 1]), tmp_path / "a")
    one.select([1, 0, 1])
    together(one, fork, [[5], [6], [7]])


def test_forks_go_their_own_ways() -> None:
    model = tiny.transformer("mistral-window")
    one = Session(model, 2)
    one.feed([text(20, 1), text(12, 2)])
    two, three = one.fork(), one.fork([1])
    two.feed([text(30, 5), text(30, 6)])
    three.rewind([3])
    three.feed([text(9, 7)])
    alone = Session(model, 2)
    alone.feed([text(20, 1), text(12, 2)])
    together(one, alone, [[5], [6]])
    for rows in ([2], [-1]):
        with pytest.raises(RequestError, match="no such row"):
            one.fork(rows)


@pytest.mark.usefixtures("short_rings")
@pytest.mark.parametrize("paged", [False, True], ids=["plain", "paged"])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3"])
def test_reuse(name: str, paged: bool) -> None:
    model = tiny.transformer(name)
    session = Session(model, 3, paged=paged)
    old = [text(30, 1), text(20, 2), text(6, 3)]
    session.feed(old)
    new = [[*old[0][:28], 1, 2, 3], old[1], [*old[2], 9]]
    assert session.reuse(new) == [28, 19, 6]  # of a text that is held whole, its last token is read again
    logits = session.feed([row[n:] for row, n in zip(new, [28, 19, 6], strict=True)])
    assert session.tokens == new
    with torch.no_grad():
        wanted = torch.stack([model(torch.tensor([row]))[0, -1] for row in new])
    assert float((logits - wanted).abs().max()) <= 1e-4
    other = [(new[0][0] + 1) % 64, *new[0][1:]]
    assert session.reuse([other, new[1][:5], []]) == [0, 4, 0]
    assert session.tokens == [[], new[1][:4], []]
    with pytest.raises(RequestError, match="for each row"):
        session.reuse([new[0]])


def test_only_what_is_held(tmp_path: Path) -> None:
    """Neither spare room nor what was rewound is written."""
    model = tiny.transformer("llama")
    session = Session(model, 2, capacity=2000)
    session.feed([text(40, 1), text(5, 2)])
    session.rewind([7, 5])
    session.save(tmp_path / "a")
    attention = model.spec.decoder.layers[0].attention
    with SafetensorsFile(tmp_path / "a") as file:
        assert file.info("cache.stores.0.0.k").shape == (12, attention.n_kv_heads, attention.d_head)


def test_another_model(tmp_path: Path) -> None:
    model, path = tiny.transformer("llama"), tmp_path / "a"
    session = Session(model)
    session.feed([text(9)])
    session.save(path)

    def field(other: Transformer) -> str | None:
        with pytest.raises(ResumeMismatch) as caught:
            Session.load(other, path)
        assert caught.value.path == str(path)
        return caught.value.field

    assert str(field(tiny.transformer("gemma3"))).startswith("spec/")
    longer = Transformer(replace(model.spec, max_positions=model.spec.max_positions + 1))
    longer.load_state_dict(model.state_dict())
    assert field(longer) == "spec/max_positions"
    tuned = tiny.transformer("llama")
    tuned.load_state_dict({name: weight * 1.001 for name, weight in model.state_dict().items()})
    assert field(tuned) == "weights"
    assert field(tiny.transformer("llama").bfloat16()) == "dtype"


def test_rounded_products_are_another_model(tmp_path: Path) -> None:
    """The weights are the same, and what is computed with them is not."""
    folder = tiny.write(tiny.config("llama") | {"hidden_size": 64, "intermediate_size": 64}, tmp_path / "m")
    rounded, exact = (cutaway.load(folder, quantize=kind).transformer for kind in ("int8", "q8_0"))
    for mine, other in ((rounded, exact), (exact, rounded)):
        session = Session(mine)
        session.feed([text(9)])
        session.save(tmp_path / "a")
        assert Session.load(mine, tmp_path / "a").tokens == session.tokens
        with pytest.raises(ResumeMismatch, match="other weights"):
            Session.load(other, tmp_path / "a")


def rewritten(path: Path, **changes: str) -> None:
    """The file with other metadata, and a digest that fits."""
    with SafetensorsFile(path) as file:
        metadata = {**file.metadata, **changes}
        tensors = {name: file.read(name) for name in file.names()}
    forged(path, metadata, tensors)


def forged(path: Path, metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
    metadata = {key: value for key, value in metadata.items() if key != "sha256"}
    safetensors.torch.save_file(tensors, path, {**metadata, "sha256": saved._digest(metadata, tensors)})


def test_another_version(tmp_path: Path) -> None:
    model = tiny.transformer("llama")
    Session(model).save(tmp_path / "a")
    rewritten(tmp_path / "a", version="2")
    with pytest.raises(ResumeMismatch) as caught:
        Session.load(model, tmp_path / "a")
    assert (caught.value.field, caught.value.expected, caught.value.got) == ("version", "1", "2")
    rewritten(tmp_path / "a", format="something")
    with pytest.raises(FormatError, match="no saved session"):
        Session.load(model, tmp_path / "a")


@pytest.mark.filterwarnings("ignore:.*are not read:UserWarning")  # a letter of a header's word was turned
@pytest.mark.usefixtures("short_rings")
def test_damaged_files(tmp_path: Path) -> None:
    """Cut anywhere, or any bit turned: a typed error, or (in the header's blanks and names) the very same session."""
    model, path, chance = tiny.transformer("mistral-window"), tmp_path / "a", random.Random(0)
    session = Session(model, 2)
    session.feed([text(20, 1), text(3, 2)])
    session.save(path)
    whole = path.read_bytes()
    for _ in range(60):
        path.write_bytes(whole[: chance.randrange(len(whole))])
        with pytest.raises(FormatError):
            Session.load(model, path)
    path.write_bytes(whole[:-1])
    with pytest.raises(TruncatedError):
        Session.load(model, path)
    head = 8 + int.from_bytes(whole[:8], "little")
    for place in [*chance.sample(range(head), 150), *chance.sample(range(head, len(whole)), 60)]:
        turned = bytearray(whole)
        turned[place] ^= 1 << chance.randrange(8)
        path.write_bytes(turned)
        try:
            found = Session.load(model, path)
        except CutawayError:
            continue
        assert place < head
        assert found.tokens == session.tokens


@pytest.mark.usefixtures("short_rings")
@pytest.mark.parametrize("paged", [False, True], ids=["plain", "paged"])
def test_forged_files(paged: bool, tmp_path: Path) -> None:
    """Tensors that lie, under a digest that fits them."""
    model, path, chance = tiny.transformer("gemma3"), tmp_path / "a", random.Random(0)
    session = Session(model, 2, paged=paged)
    session.feed([text(30, 1), text(3, 2)])
    session.save(path)
    with SafetensorsFile(path) as file:
        metadata, tensors = dict(file.metadata), {name: file.read(name) for name in file.names()}
    for name, tensor in tensors.items():
        for other in (tensor.double(), tensor[..., None], tensor.new_zeros(0), tensor.reshape(-1)[:-1].clone()):
            forged(path, metadata, {**tensors, name: other})
            with pytest.raises((ShapeMismatch, FormatError)) as caught:
                Session.load(model, path)
            assert caught.value.path == str(path)
        forged(path, metadata, {key: value for key, value in tensors.items() if key != name})
        with pytest.raises((ShapeMismatch, FormatError)):
            Session.load(model, path)
        if tensor.dtype == torch.long:
            for value in (-5, 1 << 62, 2**63 - 1, -(2**63), 64):
                other = tensor.clone()
                other.reshape(-1)[chance.randrange(other.numel())] = value
                forged(path, metadata, {**tensors, name: other})
                try:
                    Session.load(model, path).feed([[1], [2]])
                except CutawayError:
                    continue
                assert name.endswith(("capacity", "positions", "highest", "first"))  # numbers that may be others


def test_no_rows(tmp_path: Path) -> None:
    session = Session(tiny.transformer("llama"))
    session.select([])
    with pytest.raises(RequestError, match="no rows"):
        session.save(tmp_path / "a")


WRITER = """
import sys
from cutaway.generation.session import Session
from tests.reference import tiny
model = tiny.transformer("llama")
sessions = [Session(model, 40) for _ in range(2)]
for i, session in enumerate(sessions):
    session.feed([tiny.ids(40, seed=i).tolist()] * 40)
while True:
    for session in sessions:
        session.save(sys.argv[1])
        print(".", end="", flush=True)
"""


def test_killed_while_saving(tmp_path: Path) -> None:
    """``kill -9`` at any moment: what is there under the name is one of the sessions, whole."""
    path, chance = tmp_path / "a", random.Random(0)
    model = tiny.transformer("llama")
    wanted = [tiny.ids(40, seed=i).tolist() for i in range(2)]
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    unfinished = 0
    for _ in range(6):
        command = [sys.executable, "-W", "ignore", "-c", WRITER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
            assert process.stdout is not None
            assert process.stdout.read(1) == b"."
            time.sleep(chance.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
        session = Session.load(model, path)
        assert session.tokens in [[row] * 40 for row in wanted]
        unfinished += any(other != path for other in tmp_path.iterdir())
    print(f"\n{unfinished} of 6 were killed in the middle of a file")


KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
import safetensors.torch
from cutaway.generation.session import Session
from tests.reference import tiny

path, left = Path(sys.argv[1]), 0
model = tiny.transformer("llama")
sessions = [Session(model) for _ in range(2)]
for n, session in enumerate(sessions):
    session.feed([tiny.ids(40 + n, seed=n).tolist()])
    session.save(path.parent / "on"[n])

def there():
    try:
        tokens = Session.load(model, path).tokens
    except Exception as error:
        return repr(error)
    return "on"[[session.tokens for session in sessions].index(tokens)]

def counted(real):
    def call(*arguments, **more):
        global left
        left -= 1
        if left:
            return real(*arguments, **more)
        if real is whole:
            real(*arguments, **more)
            os.truncate(arguments[1], os.path.getsize(arguments[1]) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    return call

whole = safetensors.torch.save_file
safetensors.torch.save_file = counted(whole)
for name in ("open", "replace", "fsync", "chmod", "unlink"):
    setattr(os, name, counted(getattr(os, name)))

found = []
while True:
    shutil.copyfile(path.parent / "o", path)
    pid = os.fork()
    if not pid:
        left = len(found) + 1
        sessions[1].save(path)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status):
        break
    found.append([there(), len(list(path.parent.glob(".*.tmp")))])
print(json.dumps([found, os.WEXITSTATUS(status), there()]))
"""


def test_killed_at_every_call_of_a_save(tmp_path: Path) -> None:
    """Half way through the writing, and before each call to the disk after it: the old file or the new one, whole."""
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path / "a")]
    found, code, last = json.loads(subprocess.run(command, env=env, check=True, capture_output=True).stdout)
    assert (code, last) == (0, "n")
    names = "".join(name for name, _ in found)
    print(f"\n{len(found)} moments: {names.count('o')} left the old session, {names.count('n')} the new one")
    assert re.fullmatch("o{4,}n+", names)  # the folder is synced after the rename
    assert found[0][1] == 1  # half a file, under another name


def test_what_killed_writers_left_goes(tmp_path: Path) -> None:
    """After an hour; a file that somebody may still be writing stays."""
    old, new = (tmp_path / f".{letter * 16}.tmp" for letter in "ab")
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    Session(tiny.transformer("llama")).save(tmp_path / "a")
    assert {*tmp_path.iterdir()} == {new, tmp_path / "a"}


def test_the_spec_is_readable(tmp_path: Path) -> None:
    """Anybody can see what a file is of, with no more than the format."""
    model = tiny.transformer("llama")
    Session(model).save(tmp_path / "a")
    with safetensors.safe_open(tmp_path / "a", "pt") as file:
        assert json.loads(file.metadata()["spec"])["d_model"] == model.spec.d_model
