"""Generating without holding up an event loop.

    request ─► asks for its next piece ─► the model's own thread: passes until there is one ─► the piece ─► request

A model has one thread, so its passes come one after another, and requests take turns at each piece. Nothing runs ahead
of what is asked for: who asks slowly costs nothing, and who stops asking has stopped the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from time import monotonic
from types import TracebackType
from typing import TypeVar, Unpack
from weakref import WeakKeyDictionary

from cutaway.generation.generate import Run
from cutaway.generation.options import Options
from cutaway.generation.result import Generation
from cutaway.generation.voice import Prompt, Voice
from cutaway.models import Transformer

TURN = 0.05  # seconds that a request which wants all at once keeps the thread for, if others wait
T = TypeVar("T")

_THREADS: WeakKeyDictionary[Transformer, ThreadPoolExecutor] = WeakKeyDictionary()
_MAKING = Lock()


def _thread_of(model: Transformer) -> ThreadPoolExecutor:
    """The thread that runs a model; it ends with it."""
    with _MAKING:
        if model not in _THREADS:
            _THREADS[model] = ThreadPoolExecutor(1, "cutaway")
        return _THREADS[model]


class Work:
    """A run that is made and carried on in its model's thread, whenever something is asked of it.

    Args:
        model: whose thread.
        begin: makes the run.
    """

    def __init__(self, model: Transformer, begin: Callable[[], Run]) -> None:
        self._thread = _thread_of(model)
        self._begin = begin
        self._job: Future[object] | None = None
        self.run: Run | None = None
        self.stopped = False

    async def ask(self, what: Callable[[Run], T]) -> T:
        """What a function makes of the run, called in the thread. A cancelled wait stops the run for good."""
        job: Future[T] = self._thread.submit(self._do, what)
        self._job = job  # type: ignore[assignment]
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            self.stop()
            raise

    def _do(self, what: Callable[[Run], T]) -> T:
        if self.run is None:
            self.run = self._begin()
            if self.stopped:
                self.run.stop()
        return what(self.run)

    def stop(self) -> None:
        """End before the next pass."""
        self.stopped = True
        if self.run is not None:
            self.run.stop()

    async def close(self) -> None:
        """End before the next pass, wait until then, and let go of what was read."""
        self.stop()
        if self._job is not None and not self._job.cancel():
            await asyncio.wait([asyncio.wrap_future(self._job)])
        self.drop()

    def drop(self) -> None:
        """Let go of what was read, if nothing is running."""
        if self.run is not None and (self._job is None or self._job.done()):
            self.run.close()


class AsyncStream:
    """Text of one generation as it comes, for ``async for``. Iterate once; ``result`` is complete afterwards.

    Wrong arguments are found when the first piece is asked for. Breaking out of the loop, a cancelled wait, and
    ``aclose`` (or leaving ``async with``) end it before the next pass; ``aclose`` also waits for the one that runs.
    """

    def __init__(self, voice: Voice, prompt: Prompt, **options: Unpack[Options]) -> None:
        self._work = Work(voice.model, lambda: voice.run(prompt, **options))

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> str:
        piece = None if self._work.stopped else await self._work.ask(_next_piece)
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """End it, and return when nothing of it runs any more."""
        await self._work.close()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._work.stop()
        self._work.drop()

    @property
    def result(self) -> Generation | None:
        """What has come so far; None before the first piece was asked for."""
        return None if self._work.run is None else self._work.run.results()[0]


async def generate(voice: Voice, prompt: Prompt | Sequence[Prompt], **options: Unpack[Options]) -> list[Generation]:
    """Every answer, when all are finished. Cancelled, it ends before the next pass."""
    work = Work(voice.model, lambda: voice.run(prompt, **options))
    while (found := await work.ask(_go_on)) is None:
        pass
    return found


def _next_piece(run: Run) -> str | None:
    return next((piece for _, piece in run if piece), None)


def _go_on(run: Run) -> list[Generation] | None:
    """The results, or None where it is another's turn first."""
    end = monotonic() + TURN
    for _ in run:
        if monotonic() >= end:
            return None
    return run.results()
