"""One answer as it comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cutaway.errors import RequestError
from cutaway.generation.generate import Generation, Run
from cutaway.generation.inputs import is_list
from cutaway.generation.options import Options


def check_one(prompt: Any, options: Options) -> None:
    """Refuse what is more than one answer to one prompt.

    Raises:
        RequestError: several prompts, or several answers.
    """
    if is_list(prompt):
        raise RequestError("one prompt is streamed at a time", field="prompt", hint="Use generate for a list.")
    if options.get("n", 1) != 1:
        raise RequestError("one answer is streamed at a time", field="n", expected=1, got=options["n"])


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

    def close(self) -> None:
        """End it here, and let go of what was read. Leaving the stream to itself does the same."""
        self._run.close()

    def __del__(self) -> None:
        self._run.close()

    @property
    def result(self) -> Generation:
        """What has come so far."""
        return self._run.results()[0]
