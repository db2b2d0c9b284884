"""The loop: read the prompts, then choose, check and read one token after another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import accumulate
from time import perf_counter

from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.checks import check_ids
from cutaway.generation.constrain import Guides, mask
from cutaway.generation.drafting import Drafting
from cutaway.generation.logprobs import PromptLogprobs, TokenLogprob, token_logprobs
from cutaway.generation.ongoing import held
from cutaway.generation.pace import Pace
from cutaway.generation.reading import check_length, read_sources
from cutaway.generation.result import Generation, Timing, Usage
from cutaway.generation.row import Row
from cutaway.generation.sampling import Sampling
from cutaway.generation.session import Session
from cutaway.generation.speculative import Guesses
from cutaway.generation.steady import promise
from cutaway.generation.stop import StopText
from cutaway.generation.words import with_words
from cutaway.kernels import alone
from cutaway.models import Transformer
from cutaway.modules.tap import Tap
from cutaway.tokenizers.stream import DecodeStream
from cutaway.tokenizers.tokenizer import Tokenizer

__all__ = ["Generation", "Row", "Run", "TokenLogprob", "Usage"]


class _Stopped(Exception):
    """The run was told to end."""


class Run:
    """Prompts being continued together. Iterating, once, yields (row, text) as text becomes ready.

    Args:
        model: what generates.
        tokenizer: turns tokens into text; None gives tokens only.
        prompts: ids of each.
        sampling: how to choose and when to stop.
        sources: of an encoder–decoder, what its encoder reads for each; a prompt is what the decoder begins with.
        each: of each prompt, settings that differ from ``sampling`` in seed and length.
        drafting: who guesses ahead, if anybody does.
        ongoing: what a single prompt's beginning may be in already: see ``generation.ongoing``.
        tap: reads or edits what is computed; the last token of each answer is then read too. Not with beams or drafts.

    Attributes:
        watch: called before each pass, and at the end, with the rows as they are.

    Raises:
        RequestError: an empty prompt, an id outside the vocabulary, or something asked for that this model has not.
        ContextExceeded: a prompt or source longer than a learned table of positions.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        sources: Sequence[Sequence[int]] | None = None,
        each: Sequence[Sampling] | None = None,
        drafting: Drafting | None = None,
        ongoing: Session | None = None,
        tap: Tap | None = None,
    ) -> None:
        self._model = model
        self._tap = tap
        self._ongoing = ongoing
        self._kept = 0  # tokens of the prompt that it had read before
        self._drafting = drafting
        self._sampling = with_words(sampling, tokenizer)
        self._prompts = [check_ids(prompt, model.spec.vocab_size) for prompt in prompts]
        rows = model.spec.source_vocab_size or model.spec.vocab_size
        self._sources = None if sources is None else [check_ids(source, rows) for source in sources]
        if tokenizer is None and sampling.stop:
            raise RequestError("stop texts need a tokenizer, and this model has none", field="stop")
        if sources is not None and sampling.prompt_logprobs is not None:
            hint = "model.score(source, target=…) scores a target."
            raise RequestError("a source is not predicted, so it has none", field="prompt_logprobs", hint=hint)
        guides = self._guides(tokenizer)
        if sampling.deterministic:
            promise(model)
        self.rows = [
            Row(
                prompt,
                choice,
                own.seed,
                self._room(prompt, own),
                None if tokenizer is None else self._decoder(tokenizer),
                StopText(sampling.stop),
                n_read=len(read),
                guide=None if guides is None else guides.new(),
                pace=Pace(0 if drafting is None else drafting.most),
            )
            for prompt, read, own in zip(
                self._prompts, self._sources or self._prompts, each or [sampling] * len(self._prompts), strict=True
            )
            for choice in range(sampling.n)
        ]
        for row in self.rows:
            if not row.max_tokens:
                row.finish_reason = "length"
        self.watch: Callable[[Sequence[Row]], None] | None = None
        self._prompt_logprobs: PromptLogprobs | None = None
        self._began: float | None = None
        self._read: float | None = None
        self._stopped = False
        self._steps = self._steps_of()

    def _guides(self, tokenizer: Tokenizer | None) -> Guides | None:
        sampling = self._sampling
        if sampling.constraint is None:
            return None
        if tokenizer is None:
            raise RequestError("needs a tokenizer, and this model has none", field=sampling.constraint.kind)
        words = tokenizer if self._sources is None else tokenizer.target
        return Guides(sampling.constraint, words, self._model.spec.vocab_size, sampling.stop_ids)

    def _room(self, prompt: list[int], own: Sampling) -> int:
        """Tokens that may be produced. The last is only predicted, never read, so it needs no position."""
        check_length(self._model, len(prompt), "prompt")
        spec, most = self._model.spec, own.max_tokens
        if most is None and own.max_length is not None:
            most = max(1, own.max_length - len(prompt))
        if most is None:
            return max(1, (spec.position_limit or spec.max_positions) - len(prompt) + 1)
        return most if spec.position_limit is None else min(most, spec.position_limit - len(prompt) + 1)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return self._steps

    def stop(self) -> None:
        """End before the next pass; may be called from another thread. Rows that go on are left without a reason."""
        self._stopped = True

    def close(self) -> None:
        """Let go of what was read; no further step comes. Not while one is being made."""
        self._steps.close()

    def _steps_of(self) -> Generator[tuple[int, str], None, None]:
        done = all(row.finish_reason for row in self.rows)
        if not done or (self.rows and self._sampling.prompt_logprobs is not None):
            steps = self._loop if self._sampling.num_beams == 1 else self._search
            try:
                with held(self._ongoing):
                    if done:
                        self._read_prompts()
                    else:
                        yield from steps(*self._read_prompts())
            except _Stopped:
                return
        if self.watch is not None:
            self.watch(self.rows)

    def _between(self) -> None:
        if self._stopped:
            raise _Stopped
        if self.watch is not None:
            self.watch(self.rows)

    def _read_prompts(self) -> tuple[Session, Tensor]:
        """A row for each prompt, read, and what comes next. [prompts, vocab]"""
        self._between()
        self._began = perf_counter()
        session, top, steady = self._session(), self._sampling.prompt_logprobs, self._sampling.deterministic
        session.between = self._between
        if top is not None:
            self._prompt_logprobs = PromptLogprobs(self._model, self._prompts, top, steady)
        if self._ongoing is not None:  # of what is to be reported, all is read
            (self._kept,) = session.reuse(self._prompts if top is None else [[0]])
        logits = session.feed([p[self._kept :] for p in self._prompts], self._tap, self._prompt_logprobs)
        self._read = perf_counter()
        return session, logits

    def _loop(self, session: Session, logits: Tensor) -> Iterator[tuple[int, str]]:
        n = self._sampling.n
        if n > 1:
            logits = logits.repeat_interleave(n, 0)
            session.select([row for row in range(len(self._prompts)) for _ in range(n)])
        live = list(enumerate(self.rows))  # the rows of the session
        guesses = Guesses(self._drafting, self._model.spec.vocab_size, self._sampling, self._prompts, self._sources)
        guesses.between = self._between
        after, proposed = logits, [list[int]() for _ in live]
        starts = [*range(len(live))]  # of each row, in what came after
        while True:
            yield from self._take(after, starts, proposed, live)
            if any(proposed):  # what was read and is not in the answer is taken back
                session.rewind([len(row.prompt) + len(row.tokens) - 1 for _, row in live])
            going = [place for place, (_, row) in enumerate(live) if row.finish_reason is None]
            if not going:
                if self._tap is not None:
                    session.read(self._unread(session), self._tap)
                return
            if self._tap is not None:
                after = session.feed(self._unread(session), self._tap)
                continue
            if len(going) * 2 <= len(live):  # finished rows stay, idle, until they are the half
                session.select(going)
                guesses.select(going)
                live = [live[place] for place in going]
            proposed = guesses.ahead([row for _, row in live])
            news = [[*row.unread, *more] for (_, row), more in zip(live, proposed, strict=True)]
            after, starts = session.feed_each(news), [0, *accumulate(map(len, news))][:-1]

    def _unread(self, session: Session) -> list[list[int]]:
        """What the session has not read of each row, last tokens too."""
        return [[*row.prompt, *row.tokens][len(read) :] for row, read in zip(self.rows, session.tokens, strict=True)]

    def _session(self) -> Session:
        """A row for each prompt."""
        if self._ongoing is not None:
            return self._ongoing
        capacity = max(len(row.prompt) + min(row.max_tokens, 256) for row in self.rows)
        steady = self._sampling.deterministic
        source = None if self._sources is None else read_sources(self._model, self._sources, self._tap, steady=steady)
        kept, whole = self._sampling.kv_dtype, self._tap is not None
        return Session(self._model, len(self._prompts), capacity, source, steady, kept, sliding=not whole)

    def _decoder(self, tokenizer: Tokenizer) -> DecodeStream:
        """An answer goes on from its prompt; to a source it is a text of its own, perhaps in another vocabulary."""
        if self._sources is None:
            return tokenizer.stream(continuation=True)
        # The form of an answer is about all of its characters, a first space too.
        return tokenizer.target.stream(continuation=self._sampling.constraint is not None)

    def _search(self, session: Session, logits: Tensor) -> Iterator[tuple[int, str]]:
        """Beams: a prompt's answers come whole, when the search for them is over."""
        from cutaway.generation.beam import beam_search

        rooms = [row.max_tokens for row in self.rows[:: self._sampling.n]]
        for prompt, answers in beam_search(session, logits, self._prompts, rooms, self._sampling):
            for index, beam in enumerate(answers, prompt * self._sampling.n):
                row = self.rows[index]
                row.score, row.logprobs, row.processed = beam.score, beam.logprobs, beam.processed
                yield index, "".join(row.take(token, self._sampling.stop_ids) for token in beam.tokens)

    def _take(
        self,
        after: Tensor,
        starts: Sequence[int],
        proposed: Sequence[Sequence[int]],
        live: Sequence[tuple[int, Row]],
    ) -> Iterator[tuple[int, str]]:
        """Give each row that goes on its next token, and another after each proposal that was right.

        Args:
            after: of each row, logits after its last token and after each of the proposed ones. [tokens, vocab]
            starts: where each row's begin.
            proposed: of each row, what may come next.
            live: each row, and which of self.rows it is.
        """
        going = [place for place, (_, row) in enumerate(live) if row.finish_reason is None]
        right, step = dict.fromkeys(going, 0), 0
        while going:
            rows = [live[place][1] for place in going]
            places = [starts[place] + step for place in going]
            with alone(len(places) * after.shape[1]):
                pieces = self._choose(after if places == [*range(len(after))] else after[places], rows)
            for place, row, piece in zip(going, rows, pieces, strict=True):
                right[place] += row.tokens[-1:] == proposed[place][step : step + 1]
                if piece or row.finish_reason:
                    yield live[place][0], piece
            step += 1
            going = [place for place in going if right[place] == step and live[place][1].finish_reason is None]
        for place, n in right.items():
            live[place][1].pace.note(len(proposed[place]), n)

    def _choose(self, logits: Tensor, rows: Sequence[Row]) -> list[str]:
        """Choose each row's next token; text of it that can be shown. [rows, vocab]"""
        guides = [row.guide for row in rows if row.guide is not None]
        processed = self._sampling.processed(
            logits,
            [row.prompt for row in rows],
            [row.tokens for row in rows],
            [row.max_tokens for row in rows],
            partial(mask, guides=guides) if guides else None,
        )
        tokens = self._sampling.take(processed, [row.key() for row in rows])
        if self._sampling.logprobs is not None:
            for row, entry in zip(rows, token_logprobs(logits, tokens, self._sampling.logprobs), strict=True):
                row.logprobs.append(entry)
        if self._sampling.processed_logprobs is not None:
            entries = token_logprobs(processed, tokens, self._sampling.processed_logprobs)
            for row, entry in zip(rows, entries, strict=True):
                row.processed.append(entry)
        return [row.take(token, self._sampling.stop_ids) for row, token in zip(rows, tokens, strict=True)]

    def results(self) -> list[Generation]:
        """Each row's outcome so far."""
        read = None if self._prompt_logprobs is None else self._prompt_logprobs.found
        return [
            row.result(self._sampling, None if read is None else read[i // self._sampling.n], self._timing(row))
            for i, row in enumerate(self.rows)
        ]

    def _timing(self, row: Row) -> Timing:
        began = self._began or 0.0
        first = row.first if self._sampling.num_beams == 1 else None
        last = row.last or self._read or began
        return Timing(
            prompt_s=None if self._read is None else self._read - began,
            first_token_s=None if first is None else first - began,
            total_s=last - began,
            prompt_tokens=row.n_read - self._kept,
            tokens=len(row.tokens),
        )
