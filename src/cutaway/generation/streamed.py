"""One answer as it comes."""

from __future__ import annotations

from collections.abc import Iterator

from cutaway.generation.generate import Generation, Run


class Stream:
    """Text of one generation as it comes. Iterate once; ``result`` is complete afterwards."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pieces = iter(run)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while True:
            _, piece = next(self._pieces)
            if piece:
                return piece

    @property
    def result(self) -> Generation:
        """What has come so far."""
        return self._run.results()[0]
