"""Calls that go on with a session: nothing is read twice, and the answers are those without one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway
from cutaway.cache import build
from cutaway.errors import RequestError
from cutaway.generation.session import Session
from cutaway.model import Model
from cutaway.models import Transformer
from tests.generation.scripted import Bytes
from tests.generation.test_deterministic import bits
from tests.generation.test_families import model_of, same
from tests.reference import tiny, tiny_seq2seq

NAMES = ["llama", "gpt2", "gemma3", "mistral-window"]
WAYS: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 3, "top_k": 20},
    {"temperature": 0, "draft": "prompt", "draft_tokens": 5},
]


@pytest.fixture(autouse=True)
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """These texts go round them."""
    monkeypatch.setattr(build, "SLACK", 4)


def read_by(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each pass of a model reads, as they come."""
    found: list[int] = []
    hidden = model.hidden

    def counted(ids: Any, positions: Any = None, **more: Any) -> Any:
        found.append(ids.numel() if positions is None else int((positions >= 0).sum()))
        return hidden(ids, positions, **more)

    monkeypatch.setattr(model, "hidden", counted)
    return found


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, {}) for name in NAMES), ("gemma3", {"kv_dtype": "int8"}), ("gemma3", {"paged": True})]
)
def test_a_conversation(name: str, how: dict[str, Any], kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three turns, each with all before it; then one that goes back, as a question that is asked anew does."""
    model = model_of(name)
    session = Session(model.transformer, **kind)
    own = {"kv_dtype": kind.get("kv_dtype")}
    text: list[int] = []
    for turn in range(3):
        text += tiny.ids(9, seed=turn).tolist()
        wanted = model.generate(text, max_tokens=6, **how, **own)
        with monkeypatch.context() as patch:
            passes = read_by(model.transformer, patch)
            answer = model.generate(text, max_tokens=6, session=session, **how)
        assert same(model, text, wanted, answer) == 0
        assert passes[0] == (9 if turn == 0 else 10)  # the question, and the last token of the answer before it
        assert answer.usage == wanted.usage
        assert answer.timing.prompt_tokens == passes[0]
        text += answer.tokens
        assert session.tokens == [text[:-1]]
    again = [*text[:20], *tiny.ids(4, seed=9).tolist()]
    assert same(model, again, model.generate(again, max_tokens=6, **how, **own),
                model.generate(again, max_tokens=6, session=session, **how)) == 0  # fmt: skip


def test_the_same_bits_with_the_promise(tmp_path: Path) -> None:
    """Saved, loaded and gone on with: as if there had been one call."""
    model = model_of("llama")
    how: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "deterministic": True, "logprobs": 0}
    session, text = Session(model.transformer, steady=True), tiny.ids(9).tolist()
    first = model.generate(text, session=session, **how)
    session.save(tmp_path / "talk.safetensors")
    again = Session.load(model.transformer, tmp_path / "talk.safetensors")
    longer = [*text, *first.tokens, *tiny.ids(5, seed=4).tolist()]
    wanted = bits(model.generate(longer, **how))
    assert bits(model.generate(longer, session=again, **how)) == wanted
    assert bits(model.generate(longer, session=session, **how)) == wanted


def test_what_is_reported_of_the_prompt_is_all_of_it() -> None:
    model = model_of("llama")
    session, text = Session(model.transformer), tiny.ids(9).tolist()
    model.generate(text, max_tokens=3, session=session)
    found = model.generate(text, max_tokens=3, session=session, prompt_logprobs=0).prompt_logprobs
    wanted = model.generate(text, max_tokens=3, prompt_logprobs=0).prompt_logprobs
    assert [one and one.token for one in found] == [one and one.token for one in wanted]
    assert found[5].logprob == pytest.approx(wanted[5].logprob, abs=1e-4)


def test_streams_end_and_let_go() -> None:
    """Left, closed, cancelled, or broken off: the session is free, and what it says it has read is so."""
    model, text = model_of("llama"), tiny.ids(9).tolist()
    wanted = model.generate(text, max_tokens=8, temperature=0).tokens
    session = Session(model.transformer)
    stream = model.stream(text, max_tokens=8, temperature=0, session=session, draft="prompt")
    assert list(stream) == []  # no tokenizer, so no text
    assert not session.busy

    run = model._voice.run(text, max_tokens=8, temperature=0, session=session)
    run.watch = lambda rows: (_ for _ in ()).throw(OSError("broken")) if len(rows[0].tokens) == 3 else None
    with pytest.raises(OSError, match="broken"):
        list(run)
    assert not session.busy
    assert session.tokens == [[*text, *wanted[:2]]]

    async def both() -> list[Any]:
        return [await model.agenerate(text, max_tokens=8, temperature=0, session=session) for _ in range(2)]

    assert [one.tokens for one in asyncio.run(both())] == [wanted, wanted]
    assert session.between is None


def test_one_call_at_a_time() -> None:
    """And a fork made meanwhile is nobody's."""
    model, text = model_of("llama"), tiny.ids(9).tolist()
    wanted = model.generate(text, max_tokens=4, temperature=0).tokens
    session = Session(model.transformer)
    session.between = own = lambda: None
    found: list[Any] = []

    def meanwhile(rows: Any) -> None:
        if len(rows[0].tokens) == 2:
            with pytest.raises(RequestError, match="another call") as caught:
                model.generate(text, session=session)
            assert caught.value.field == "session"
            found.append(model.generate(text, max_tokens=4, temperature=0, session=session.fork()).tokens)

    assert model.generate(text, max_tokens=4, temperature=0, session=session, progress=lambda tally: None)
    run = model._voice.run(text, max_tokens=4, temperature=0, session=session)
    run.watch = meanwhile
    for _ in run:
        pass
    assert found == [wanted]
    assert run.results()[0].tokens == wanted
    assert session.between is own


def test_a_stream_is_closed() -> None:
    """Or left to itself; either frees the session, which others may then go on with."""
    model, text = Model(tiny.transformer("llama")), tiny.ids(9).tolist()
    model.tokenizer = Bytes()  # type: ignore[assignment]
    session = Session(model.transformer)
    stream = model.stream(text, max_tokens=4, temperature=1.0, seed=1, session=session)
    next(stream)
    assert session.busy
    stream.close()
    assert list(stream) == []
    assert not session.busy
    for _ in model.stream(text, max_tokens=4, temperature=1.0, seed=1, session=session):
        break
    assert not session.busy


@pytest.mark.parametrize(
    ("session", "call"),
    [
        (lambda model: "talk.safetensors", {}),
        (lambda model: Session(tiny.transformer("llama")), {}),
        (lambda model: Session(model, 2), {}),
        (lambda model: Session(model), {"n": 2}),
        (lambda model: Session(model), {"num_beams": 2}),
        (lambda model: Session(model), {"deterministic": True}),
        (lambda model: Session(model, steady=True), {}),
        (lambda model: Session(model), {"kv_dtype": "int8"}),
    ],
)
def test_what_does_not_go_together(session: Any, call: dict[str, Any]) -> None:
    model = model_of("llama")
    with pytest.raises(RequestError) as caught:
        model.generate([3, 4, 5], session=session(model.transformer), **call)
    assert caught.value.field == "session"
    assert caught.value.hint


def test_several_prompts_files_and_sources(tmp_path: Path) -> None:
    model = model_of("llama")
    session = Session(model.transformer)
    with pytest.raises(RequestError, match="one answer"):
        model.generate([[3, 4], [5, 6]], session=session)
    (tmp_path / "in.jsonl").write_text('{"prompt": [3, 4]}\n')
    with pytest.raises(RequestError, match="file"):
        model.generate_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", session=session)
    assert not (tmp_path / "out.jsonl").exists()
    translator = Model(tiny_seq2seq.transformer("bart"))
    with pytest.raises(RequestError, match="encoder–decoder"):
        translator.generate([3, 4], session=Session(translator.transformer))


@pytest.mark.real
def test_smollm2(smollm2_path: Path, tmp_path: Path) -> None:
    """A talk, kept on disk between two questions."""
    model = cutaway.load(smollm2_path)
    messages = [{"role": "user", "content": "Name a colour."}]
    session = Session(model.transformer)
    answer = model.generate(messages, max_tokens=12, temperature=0, session=session)
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "Another?"}]
    wanted = model.generate(messages, max_tokens=12, temperature=0)
    session.save(tmp_path / "talk.safetensors")
    again = Session.load(model.transformer, tmp_path / "talk.safetensors")
    with torch.no_grad():
        found = model.generate(messages, max_tokens=12, temperature=0, session=again)
    assert same(model, model.encode_prompt(messages), wanted, found) == 0
    assert found.timing.prompt_tokens < wanted.usage.prompt_tokens / 2
