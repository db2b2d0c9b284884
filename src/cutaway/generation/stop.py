"""Ending on a text, wherever the borders of tokens fall in it."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Holds back text that may be the beginning of a stop, and never lets a stop or what follows it out.

    Of several stops the one that is complete first counts, and of those the longest, so that it does not
    matter in which pieces a text arrives.

    Args:
        stops: texts that end an answer.

    >>> gate = StopText(["END"])
    >>> gate.push("the E"), gate.push("N"), gate.push("D."), gate.stopped
    ('the ', '', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Take finished text, give back what is safe to show."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            out, self._held = self._held[: min(found)[1]], ""
            return out
        keep = max(self._overlap(stop) for stop in self._stops)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def flush(self) -> str:
        """What was held back, at the end: it turned out to be no stop."""
        out, self._held = self._held, ""
        return "" if self.stopped else out

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins ``stop``."""
        return next((n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)
