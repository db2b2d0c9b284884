"""Generating in an event loop: the same answers, a loop that goes on, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cutaway
from cutaway.errors import ContextExceeded, RequestError
from cutaway.generation import asynchronous
from cutaway.model import Model
from tests.cli.conftest import config, write_folder
from tests.reference import tiny

HOW = {"max_tokens": 24, "temperature": 1.5, "seed": 3, "logprobs": 1}
PROMPTS = ["the end", "a 🙂", "the the the", "é"]
PATIENCE = 60.0  # seconds after which a test that hangs says so


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("asynchronous") / "tiny", config())


@pytest.fixture
def model(folder: Path) -> Model:
    return cutaway.load(folder)


class Watched:
    """Counts a model's passes, sees that no two run at once, and can hold them up."""

    def __init__(self, model: Model, patch: pytest.MonkeyPatch) -> None:
        self.passes = 0
        self.overlaps = 0
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self._inside = 0
        hidden = model.transformer.hidden

        def watched(*arguments: Any, **more: Any) -> Any:
            self._inside += 1
            self.overlaps += self._inside > 1
            self.passes += 1
            self.threads.add(threading.get_ident())
            self.entered.set()
            if not self.gate.wait(PATIENCE):
                raise TimeoutError("the event loop was held up")
            out = hidden(*arguments, **more)
            self._inside -= 1
            return out

        patch.setattr(model.transformer, "hidden", watched)
        patch.setattr(model.transformer, "steps", None)  # every pass is a whole one


@pytest.fixture
def watched(model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    found = Watched(model, monkeypatch)
    yield found
    found.gate.set()


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


async def collected(stream: Any) -> list[str]:
    return [piece async for piece in stream]


# ── the same answers ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stop", [None, "e", ["ab", " t"]])
def test_the_same_pieces(model: Model, stop: Any) -> None:
    how = {**HOW, "stop": stop}
    plain = model.stream(PROMPTS[1], **how)
    wanted = list(plain)
    stream = model.astream(PROMPTS[1], **how)
    assert stream.result is None
    assert run(collected(stream)) == wanted
    assert stream.result == plain.result
    assert run(model.agenerate(PROMPTS[1], **how)) == plain.result
    assert run(collected(stream)) == []  # once


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"temperature": 0, "num_beams": 3, "n": 2}, {"max_tokens": 0}])
def test_the_same_batches(model: Model, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """However the thread's time is cut."""
    for turn in (0.0, 60.0):
        monkeypatch.setattr(asynchronous, "TURN", turn)
        assert run(model.agenerate(PROMPTS, **{**HOW, **more})) == model.generate(PROMPTS, **{**HOW, **more})


def test_two_at_once(model: Model, watched: Watched) -> None:
    """Streams and batches together: each gets what it would alone, and no two passes run at the same time."""

    async def all_of_them() -> list[Any]:
        streams = [collected(model.astream(prompt, **HOW)) for prompt in PROMPTS]
        return await asyncio.gather(*streams, model.agenerate(PROMPTS, **HOW), model.agenerate("x", **HOW))

    *streams, batch, one = run(all_of_them())
    assert watched.overlaps == 0
    assert len(watched.threads) == 1
    assert threading.get_ident() not in watched.threads
    assert ["".join(pieces) for pieces in streams] == [answer.text for answer in batch]
    assert batch == model.generate(PROMPTS, **HOW)
    assert one == model.generate("x", **HOW)


def test_requests_take_turns(model: Model, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short answer is not kept waiting until a long one is finished; one may be asked for within another's loop."""

    async def short_within_long() -> tuple[int, str]:
        stream, count, answer = model.astream(PROMPTS[0], **{**HOW, "max_tokens": 60}), 0, ""
        async for _ in stream:
            count += 1
            if count == 3:
                answer = (await model.agenerate("the", max_tokens=3, temperature=0)).text
        return count, answer

    async def side_by_side() -> bool:
        long = asyncio.create_task(model.agenerate(PROMPTS[0], **{**HOW, "max_tokens": 400}))
        while not watched.passes:
            await asyncio.sleep(0.001)
        await collected(model.astream("the", max_tokens=2, temperature=0))
        waits = not long.done()
        await long
        return waits

    count, answer = run(short_within_long())
    assert count > 3
    assert answer == model.generate("the", max_tokens=3, temperature=0).text
    model.transformer.warned_length = True
    monkeypatch.setattr(asynchronous, "TURN", 0.0)
    assert run(side_by_side())


# ── the loop goes on ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("asked", ["stream", "whole", "beams"])
def test_the_loop_is_never_held_up(model: Model, watched: Watched, asked: str) -> None:
    """Every pass waits until the loop has turned many times since it began: held up, it would never end."""
    ticks: list[int] = []

    async def tick(done: asyncio.Event) -> None:
        while not done.is_set():
            if watched.entered.is_set():
                for _ in range(20):
                    await asyncio.sleep(0)
                ticks.append(watched.passes)
                watched.entered.clear()
                watched.gate.set()
                watched.gate.clear()
            await asyncio.sleep(0.0005)

    class OneAtATime(threading.Event):
        """A gate that lets one pass through each time it is set."""

        def wait(self, timeout: float | None = None) -> bool:
            return lets.acquire(timeout=timeout or PATIENCE)

        def set(self) -> None:
            lets.release()

        def clear(self) -> None:
            pass

    lets = threading.Semaphore(0)
    watched.gate = OneAtATime()

    async def main() -> None:
        done = asyncio.Event()
        ticker = asyncio.create_task(tick(done))
        how = {**HOW, "max_tokens": 6}
        if asked == "stream":
            await collected(model.astream("the", **how))
        else:
            await model.agenerate("the", **({**how, "num_beams": 3, "temperature": 0} if asked == "beams" else how))
        done.set()
        await ticker

    run(main())
    assert len(ticks) == watched.passes >= 6


def test_nothing_runs_ahead(model: Model, watched: Watched) -> None:
    """A slow reader bounds the work: as many passes as its pieces took, while it does something else."""

    async def slowly() -> list[int]:
        stream, seen = model.astream("the", **HOW), []
        async for _ in stream:
            before = watched.passes
            await asyncio.sleep(0.01)
            seen.append(watched.passes - before)
        return seen

    assert set(run(slowly())) == {0}


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", ["stream", "whole", "beams", "tokens"])
def test_cancelled_in_a_pass(model: Model, watched: Watched, way: str) -> None:
    """The pass that runs is the last: also of beams, and where no text comes, as without a tokenizer."""
    how = {**HOW, "max_tokens": 1000}
    asked = Model(model.transformer) if way == "tokens" else model
    asked.transformer.warned_length = True
    asked.transformer.steps = None  # a new Model has steps again

    async def main() -> None:
        if way == "stream":
            work = asyncio.create_task(collected(asked.astream("the", **how)))
        elif way == "beams":
            work = asyncio.create_task(asked.agenerate("the", **{**how, "temperature": 0, "num_beams": 3}))
        else:
            work = asyncio.create_task(asked.agenerate([5, 6], **how))
        while watched.passes < 4:
            await asyncio.sleep(0.001)
        watched.gate.clear()
        watched.entered.clear()
        while not watched.entered.is_set():
            await asyncio.sleep(0.001)
        before = watched.passes
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        watched.gate.set()
        assert await asked.agenerate([5], max_tokens=1, temperature=0)  # the thread is free, and what it ran is over
        assert watched.passes == before + 1  # the new request's

    run(main())


def test_cancelled_while_a_long_prompt_is_read(model: Model, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutaway.generation.passes.CHUNK", 4)
    prompt = tiny.ids(60).tolist()

    async def main() -> None:
        watched.gate.clear()
        stream = model.astream(prompt, **HOW)
        first = asyncio.create_task(anext(stream))
        while watched.passes < 1:
            await asyncio.sleep(0.001)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        watched.gate.set()
        await stream.aclose()
        assert watched.passes == 1  # of fifteen
        assert await collected(stream) == []
        assert stream.result.finish_reason is None

    run(main())


def test_cancelled_before_its_turn(model: Model, watched: Watched) -> None:
    """A request that waits behind another's pass never begins."""

    async def main() -> None:
        watched.gate.clear()
        first = asyncio.create_task(model.agenerate("the", max_tokens=1, temperature=0))
        await asyncio.sleep(0)
        second = asyncio.create_task(model.agenerate("a", max_tokens=1, temperature=0))
        while watched.passes < 1:
            await asyncio.sleep(0.001)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        watched.gate.set()
        await first

    run(main())
    assert watched.passes == 1


def test_breaking_out(model: Model, watched: Watched) -> None:
    """What was there is a beginning of the whole; nothing runs afterwards, and the memory goes."""
    wanted = model.generate("the", **HOW)
    sessions: list[Any] = []

    async def main() -> None:
        stream, text = model.astream("the", **HOW), ""
        async for piece in stream:
            text += piece
            if len(text) > 3:
                break
        assert wanted.text.startswith(text)
        assert stream.result.finish_reason is None
        assert stream.result.text == text
        before = watched.passes
        await asyncio.sleep(0.02)
        assert watched.passes == before
        sessions.append(weakref.ref(stream._work.run._steps.gi_yieldfrom.gi_frame.f_locals["session"]))
        await stream.aclose()
        await stream.aclose()
        assert stream.result.text == text

    run(main())
    assert sessions[0]() is None


def test_let_go_without_a_word(model: Model) -> None:
    """A stream that nobody holds any more gives its memory back at once."""

    async def main() -> Any:
        stream = model.astream("the", **HOW)
        await anext(stream)
        return weakref.ref(stream._work.run._steps.gi_yieldfrom.gi_frame.f_locals["session"])

    gc.disable()
    try:
        assert run(main())() is None
    finally:
        gc.enable()


def test_async_with(model: Model, watched: Watched) -> None:
    async def main() -> None:
        async with model.astream("the", **HOW) as stream:
            await anext(stream)
        assert await collected(stream) == []

    run(main())


def test_errors_reach_who_waits(model: Model, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes no sense, what does not fit, and what breaks in the middle; the next request is none the worse."""

    async def main() -> None:
        with pytest.raises(RequestError) as caught:
            await model.agenerate("the", temperature=-1)
        assert caught.value.field == "temperature"
        with pytest.raises(RequestError):
            await anext(model.astream("the", tempo=1))
        with pytest.raises(RequestError):
            model.astream(["the", "a"])
        with pytest.raises(RequestError):
            model.astream("the", n=2)
        stream, hidden = model.astream("the", **HOW), model.transformer.hidden

        def broken(*arguments: Any, **more: Any) -> Any:
            raise MemoryError("no more")

        for _ in range(3):
            await anext(stream)
        monkeypatch.setattr(model.transformer, "hidden", broken)
        monkeypatch.setattr(model.transformer, "steps", None)
        with pytest.raises(MemoryError, match="no more"):
            await collected(stream)
        assert await collected(stream) == []
        monkeypatch.setattr(model.transformer, "hidden", hidden)
        assert await model.agenerate("the", **HOW) == model.generate("the", **HOW)

    run(main())


def test_too_long_a_prompt(tmp_path: Path) -> None:
    short = Model(tiny.transformer("gpt2"))
    with pytest.raises(ContextExceeded):
        run(short.agenerate([5] * 1000))


def test_one_loop_after_another(model: Model) -> None:
    """A loop that ends with work going on: that ends too, and the next loop finds the model as it was."""
    wanted = model.generate("the", **HOW)

    async def leave() -> None:
        asyncio.create_task(model.agenerate("the", **{**HOW, "max_tokens": 40}))  # noqa: RUF006
        await anext(model.astream("a", **HOW))

    for _ in range(3):
        asyncio.run(leave())
        assert run(model.agenerate("the", **HOW)) == wanted
    loop = asyncio.new_event_loop()
    stream = model.astream("the", **HOW)
    piece = loop.run_until_complete(anext(stream))
    loop.close()
    assert wanted.text.startswith(piece)
    assert run(collected(stream)) == list(model.stream("the", **HOW))[1:]


def test_the_thread_ends_with_the_model() -> None:
    short = Model(tiny.transformer("llama"))
    run(short.agenerate([5], max_tokens=1))
    (thread,) = asynchronous._THREADS[short.transformer]._threads
    assert thread.is_alive()
    del short
    gc.collect()
    end = time.monotonic() + PATIENCE
    while thread.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    assert not thread.is_alive()


LEAVES = """
import asyncio, sys, cutaway
model = cutaway.load(sys.argv[1])
async def main():
    task = asyncio.create_task(model.agenerate("the", max_tokens=None, temperature=1.0, seed=1, logit_bias={0: -100}))
    stream = model.astream("a", max_tokens=100000, temperature=1.0, seed=1)
    print(await anext(stream) is not None, flush=True)
asyncio.run(main())
"""


def test_a_process_that_leaves(folder: Path) -> None:
    """With work going on: it ends by itself, and says nothing."""
    command = [sys.executable, "-W", "ignore", "-c", LEAVES, str(folder)]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE * 2, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
