"""Beam search: the likeliest answers, several being written at a time.

    one prompt's beams ─► the best next tokens of each ─► the best (1 + ends)·B candidates of all
            ▲                                                │                       │
            └── the first B that go on (the cache follows) ◄─┘   of the first B, those that end: finished
                                                                 score = log-probability / length ** penalty

What counts, and in which order, is as in transformers' ``_beam_search`` for each prompt alone: neither padding nor the
other prompts have a part in it. A length is that of the answer, whatever the decoder's text began with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation import logits as steps
from cutaway.generation.logprobs import TokenLogprob, listed, token_logprobs
from cutaway.generation.sampling import Sampling
from cutaway.generation.session import Session


@dataclass(slots=True)
class Beam:
    """An answer, finished or not.

    Attributes:
        tokens: its ids.
        score: the sum of its log-probabilities, as penalties and rules left them; over length ** penalty at the end.
        logprobs: the model's own, if asked for.
        processed: those that the score is the sum of, if asked for.
    """

    tokens: list[int]
    score: float
    logprobs: list[TokenLogprob] = field(default_factory=list)
    processed: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class Hunt:
    """The search for one prompt's answers.

    Attributes:
        index: which prompt.
        prompt: its ids.
        room: most tokens of an answer.
        running: beams that go on, best first.
        finished: the best that ended, best first.
    """

    index: int
    prompt: Sequence[int]
    room: int
    running: list[Beam]
    finished: list[Beam] = field(default_factory=list)

    def advance(
        self, candidates: Sequence[tuple[float, int, int]], beams: Sequence[Beam], sampling: Sampling
    ) -> list[tuple[int, Beam]]:
        """Take one step; what it made, with the row that each came from.

        Args:
            candidates: (score, row, token), best first.
            beams: of every row.
        """
        width, length = sampling.num_beams, len(self.running[0].tokens) + 1
        kept: list[tuple[int, Beam]] = []
        ended: list[tuple[int, Beam]] = []
        for place, (score, row, token) in enumerate(candidates):
            longer = Beam([*beams[row].tokens, token], score, beams[row].logprobs, beams[row].processed)
            if token not in sampling.stop_ids and length < self.room:
                if len(kept) < width:
                    kept.append((row, longer))
            elif place < width:  # the others are only there so that enough go on
                longer.score = score / length**sampling.length_penalty
                ended.append((row, longer))
        # Of equals, the one that ended first is kept.
        self.finished = sorted([*self.finished, *(beam for _, beam in ended)], key=lambda beam: -beam.score)[:width]
        self.running = [beam for _, beam in kept]
        return [*kept, *ended]

    def done(self, sampling: Sampling) -> bool:
        """Whether nothing better is to be expected."""
        if not self.running:
            return True
        if len(self.finished) < sampling.num_beams:
            return False
        if sampling.early_stopping is True:
            return True
        length = len(self.running[0].tokens)
        if sampling.early_stopping == "never" and sampling.length_penalty > 0:
            length = self.room  # where the best running beam could still get to
        return not self.running[0].score / length**sampling.length_penalty > self.finished[-1].score


def beam_search(
    session: Session, logits: Tensor, prompts: Sequence[Sequence[int]], rooms: Sequence[int], sampling: Sampling
) -> Iterator[tuple[int, list[Beam]]]:
    """The ``sampling.n`` best answers to each prompt, as (prompt's place, answers best first), when they are found.

    Args:
        session: a row for each prompt, which it has read.
        logits: what it predicts. [prompts, vocab]
        prompts: ids of each; of an encoder–decoder, what the decoder starts with.
        rooms: most tokens of each answer.

    Raises:
        RequestError: the model's logits are no numbers, or the rules leave fewer answers than were asked for.
    """
    hunts = [Hunt(i, prompt, rooms[i], [Beam([], 0.0)]) for i, prompt in enumerate(prompts)]
    while True:
        beams = [beam for hunt in hunts for beam in hunt.running]
        processed = _processed(logits, [hunt for hunt in hunts for _ in hunt.running], beams, sampling)
        best = _continuations(processed, beams, sampling)
        made, start = [], 0
        for hunt in hunts:
            rows = range(start, start := start + len(hunt.running))
            found = sorted((one for row in rows for one in best[row]), key=lambda one: -one[0])
            made.append(hunt.advance(found[: _kept(sampling)], beams, sampling))
        _report([new for news in made for new in news], logits, processed, sampling)
        for hunt in hunts:
            if hunt.done(sampling):
                yield hunt.index, _answers(hunt, sampling)
        going = [place for place, hunt in enumerate(hunts) if not hunt.done(sampling)]
        if not going:
            return
        rows_kept = [row for place in going for row, _ in made[place][: len(hunts[place].running)]]
        hunts = [hunts[place] for place in going]
        session.select(rows_kept)
        logits = session.feed([beam.tokens[-1:] for hunt in hunts for beam in hunt.running])


def _kept(sampling: Sampling) -> int:
    """Candidates of a step: enough that as many as there are beams go on, whatever ends."""
    return sampling.num_beams * max(2, 1 + len(sampling.stop_ids))


def _processed(logits: Tensor, owners: Sequence[Hunt], beams: Sequence[Beam], sampling: Sampling) -> Tensor:
    """Log-probabilities as penalties and rules leave them. [rows, vocab] → the same"""
    x = logits.float()
    steps.check_finite(x)
    x = sampling.changed(
        x.log_softmax(-1),
        [hunt.prompt for hunt in owners],
        [beam.tokens for beam in beams],
        [hunt.room for hunt in owners],
    )
    steps.check_finite(x, changed=True, dead_ends=True)
    return x.log_softmax(-1) if sampling.renormalize else x


def _continuations(processed: Tensor, beams: Sequence[Beam], sampling: Sampling) -> list[list[tuple[float, int, int]]]:
    """The best next tokens of each row, as (score of the whole, row, token). [rows, vocab]"""
    x = processed + processed.new_tensor([beam.score for beam in beams])[:, None]
    top = x.topk(min(_kept(sampling), x.shape[1]))
    return [
        [(score, row, token) for score, token in zip(scores, tokens, strict=True) if score > steps.NEVER]
        for row, (scores, tokens) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True))
    ]


def _report(made: Sequence[tuple[int, Beam]], logits: Tensor, processed: Tensor, sampling: Sampling) -> None:
    """Give each beam the log-probabilities of its last token that were asked for."""
    rows, tokens = [row for row, _ in made], [beam.tokens[-1] for _, beam in made]
    if sampling.logprobs is not None:
        for (_, beam), entry in zip(made, token_logprobs(logits[rows], tokens, sampling.logprobs), strict=True):
            beam.logprobs = [*beam.logprobs, entry]
    if sampling.processed_logprobs is not None:
        for (_, beam), entry in zip(made, listed(processed[rows], tokens, sampling.processed_logprobs), strict=True):
            beam.processed = [*beam.processed, entry]


def _answers(hunt: Hunt, sampling: Sampling) -> list[Beam]:
    if len(hunt.finished) < sampling.n:
        raise RequestError(
            "what is forbidden, suppressed and forced leaves fewer answers than asked for",
            field="n",
            expected=f"at most {len(hunt.finished)}",
            got=sampling.n,
        )
    return hunt.finished[: sampling.n]
