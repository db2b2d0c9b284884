"""What guessing ahead comes to in one answer, and how far ahead it is done there."""

from __future__ import annotations

from dataclasses import dataclass

FEWEST = 3  # with the token before them four, which a processor reads in less time than two or three


@dataclass(frozen=True, slots=True)
class Speculation:
    """What guessing came to in one answer.

    Attributes:
        proposed: tokens that were guessed and read.
        accepted: those of them that were chosen.
        passes: how often the model was run for this answer, for its prompt too; without guesses, once a token.
    """

    proposed: int = 0
    accepted: int = 0
    passes: int = 0

    @property
    def acceptance(self) -> float | None:
        """The share that was chosen; None where nothing was guessed."""
        return self.accepted / self.proposed if self.proposed else None


@dataclass(slots=True)
class Pace:
    """How many tokens to guess next in one answer: 3, 7, 15 … as long as all are right, else one more than were right.

    Attributes:
        most: never more than these; 0 where nobody guesses.
        width: how many next.
        done: what came of it so far.
    """

    most: int = 0
    width: int = FEWEST
    done: Speculation = Speculation()

    def ahead(self, room: int) -> int:
        """How many next, where an answer has room for so many tokens: one more is chosen after the last of them."""
        return max(0, min(self.most, self.width, room - 1))

    def note(self, proposed: int, accepted: int) -> None:
        """Take in what came of a pass."""
        done = self.done
        self.done = Speculation(done.proposed + proposed, done.accepted + accepted, done.passes + 1)
        if proposed:
            width = 2 * self.width + 1 if accepted == proposed else max(FEWEST, accepted + 1)
            self.width = min(self.most, width)
