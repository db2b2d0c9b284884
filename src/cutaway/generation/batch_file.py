"""A file of prompts in, a file of answers out: a JSON object a line, in the order of the prompts.

    prompts ─► windows of a few batches ─► each sorted by length, and cut into batches ─► answers
                                                                                             │ as soon as all before
                                                         the output, a whole line at a time ◄┘ them are there

Which prompts are answered together is a function of their place in the file, and what was written is the beginning of
the whole. So a run that was cut off goes on with the batches that still have something to say, and ends with the same
bytes as one that was not.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from cutaway.errors import RequestError
from cutaway.formats.files import StrPath, sweep
from cutaway.formats.growing import GrowingFile
from cutaway.formats.lock import locked
from cutaway.formats.paths import usable_path
from cutaway.formats.strict_json import to_json
from cutaway.generation.checks import flag, whole
from cutaway.generation.options import Options
from cutaway.generation.progress import Report, Tally, meter
from cutaway.generation.prompt_file import Line, PromptFile, with_line
from cutaway.generation.reading import check_length
from cutaway.generation.report import as_plain
from cutaway.generation.result import Generation, Usage
from cutaway.generation.run_record import RunRecord
from cutaway.generation.sampling import Sampling
from cutaway.generation.voice import Voice

WINDOW = 4  # batches whose prompts are sorted by length together
BATCH = 8  # prompts that are answered at once, if nobody says how many
MOST = 1024


@dataclass(frozen=True, slots=True)
class FileReport:
    """What came of a file.

    Attributes:
        prompts: in it.
        kept: answers that were there before.
        usage: of those that were written now.
    """

    prompts: int
    kept: int
    usage: Usage


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt with all that its answer depends on."""

    index: int
    line: Line
    ids: list[int]
    sampling: Sampling
    kind: str  # prompts of one kind may be answered together


def generate_file(
    voice: Voice,
    source: StrPath,
    out: StrPath,
    *,
    batch: int | None = None,
    restart: bool = False,
    progress: Report | bool | None = None,
    **options: Unpack[Options],
) -> FileReport:
    """See ``Model.generate_file``."""
    if batch is not None:
        whole("batch", batch, 1, MOST)
    flag("restart", restart)
    if options.get("session") is not None:
        raise RequestError("the prompts of a file have none in common", field="session", hint="Leave it out.")
    voice.must_generate()
    source, out = usable_path(source, "source"), usable_path(out, "out")
    prompts = PromptFile(source)
    if "-" not in (source, out) and os.path.exists(out) and os.path.samefile(source, out):
        raise RequestError("would be written over what it is made of", field="out", got=out)
    answers = Answers(voice, prompts, options)
    answers.check()
    with meter(progress) as report:
        if out == "-":
            for lines in answers.lines(0, "", batch or BATCH, report):
                sys.stdout.write(lines)
                sys.stdout.flush()
            return FileReport(len(prompts), 0, answers.usage)
        target = Path(os.path.realpath(out))  # a link stays, and what it leads to is written
        with locked(target), GrowingFile.open(target) as file:
            sweep(target.parent)
            record = RunRecord(target, file)
            if not restart:  # what a call leaves open is as it was
                batch = batch or record.number("batch")
                drawn = None if options.get("seed") is not None else record.number("settings", "seed")
                answers.seed = answers.seed if drawn is None else drawn
            batch = batch or BATCH
            sampling = replace(answers.sampling({}), seed=answers.seed)
            kept = record.begin(voice, prompts, sampling, batch, restart=restart)
            for lines in answers.lines(kept, record.name, batch, report):
                file.append(lines.encode())
    return FileReport(len(prompts), kept, answers.usage)


class Answers:
    """Makes answers, in the order of the prompts.

    Args:
        voice: what answers.
        prompts: what is asked.
        options: for all of them; a line's own come first.

    Attributes:
        seed: what each prompt's own is counted from.
        usage: of the lines that were given out.
    """

    def __init__(self, voice: Voice, prompts: PromptFile, options: Options) -> None:
        self._voice = voice
        self._prompts = prompts
        self._options = options
        self._settled: dict[str, Sampling] = {}
        self.seed = self.sampling({}).seed
        self.usage = Usage(0, 0)
        self._tokens = 0  # produced, again or for the first time

    def check(self) -> None:
        """Find what is wrong with any of the prompts, or with the options, before the first is answered.

        Raises:
            DatasetError, ContextExceeded, TemplateError: a line, which the path names.
            RequestError: an option.
        """
        model, seen = self._voice.model, set()
        self._voice.run_ids([[0]], self.sampling({}), self._options)
        for index in range(len(self._prompts)):
            one = self._asked(index)
            of_source = model.spec.source is not None
            with_line(one.line.where, check_length, model, len(one.ids), "prompt", of_source=of_source)
            if one.kind not in seen:
                seen.add(one.kind)
                with_line(one.line.where, self._voice.run_ids, [one.ids], one.sampling, self._both(one.line.options))

    def lines(self, start: int, name: str, batch: int, report: Report | None) -> Iterator[str]:
        """The lines from a place on, some at a time.

        Args:
            start: how many there are.
            name: of the run, which each line repeats; empty for none.
            batch: prompts that are answered together.
            report: told how far it has come.
        """
        n, span = len(self._prompts), WINDOW * batch
        place = start
        for first in range(start - start % span, n, span):
            ready: dict[int, str] = {}
            for together in self._batches(range(first, min(first + span, n)), batch):
                if all(one.index < start for one in together):
                    continue
                found = self._answered(together, place + len(ready), report)
                for one, results in zip(together, found, strict=True):
                    if one.index >= start:
                        ready[one.index] = self._line(one, results, name)
                        self.usage = self.usage + Usage.of(results)
                out = []
                while place in ready:
                    out.append(ready.pop(place))
                    place += 1
                if out:
                    yield "".join(out)

    def sampling(self, own: Options) -> Sampling:
        """What a line's own options make of the others, but for the seed."""
        key = json.dumps({name: value for name, value in own.items() if name != "seed"}, sort_keys=True)
        if key not in self._settled:
            self._settled[key] = self._voice.sampling(**self._both(own))
        return self._settled[key]

    def _both(self, own: Options) -> Options:
        """A line's own options over the others."""
        return {**self._options, **own}

    def _asked(self, index: int) -> _Asked:
        line = self._prompts[index]
        own = line.options
        ids = with_line(line.where, self._voice.ids, line.prompt, line.field)
        common = with_line(line.where, self.sampling, own)
        seed = with_line(line.where, whole, "seed", own.get("seed", _wrapped(self.seed + index)), -(2**63), 2**63 - 1)
        alone = common.num_beams > 1 or common.max_tokens == 0  # lengths that a run must have in common
        kind = {name: value for name, value in own.items() if name != "seed" and (alone or name != "max_tokens")}
        return _Asked(index, line, ids, replace(common, seed=seed), json.dumps(kind, sort_keys=True))

    def _batches(self, window: range, batch: int) -> list[list[_Asked]]:
        """Prompts that are answered together: of one kind, and of about one length."""
        kinds: dict[str, list[_Asked]] = defaultdict(list)
        for index in window:
            one = self._asked(index)
            kinds[one.kind].append(one)
        ordered = [sorted(some, key=lambda one: len(one.ids)) for some in kinds.values()]
        return [some[i : i + batch] for some in ordered for i in range(0, len(some), batch)]

    def _answered(self, together: list[_Asked], before: int, report: Report | None) -> list[list[Generation]]:
        """The answers to each of some prompts."""
        each = [one.sampling for one in together]
        run = self._voice.run_ids([one.ids for one in together], each[0], self._both(together[0].line.options), each)
        n = each[0].n
        if report is not None:
            done = self._tokens

            def watch(rows: Any) -> None:
                now = Tally.of(rows)
                report(Tally(before + now.finished // n, len(self._prompts), done + now.tokens))

            run.watch = watch
        for _ in run:
            pass
        results = run.results()
        self._tokens += Usage.of(results).completion_tokens
        return [results[i : i + n] for i in range(0, len(results), n)]

    def _line(self, one: _Asked, results: list[Generation], name: str) -> str:
        said = as_plain(results, self._voice.tokenizer)
        value = {"index": one.index, **one.line.rest, **said, **({"run": name} if name else {})}
        # JSON takes these as they are; what reads a file line by line may take them for the end of one.
        text = to_json(value)
        for letter in "\x85\u2028\u2029":
            text = text.replace(letter, f"\\u{ord(letter):04x}")
        return text + "\n"


def _wrapped(seed: int) -> int:
    """In the range of seeds, beyond whose end it begins again."""
    return (seed + 2**63) % 2**64 - 2**63
