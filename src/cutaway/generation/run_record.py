"""What a file of answers was made of and with, in a file beside it: so that only the same run goes on with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cutaway.errors import CutawayError, FormatError, ResumeMismatch
from cutaway.formats.files import atomic_write, parse_json, read_json
from cutaway.formats.growing import GrowingFile
from cutaway.generation.fingerprint import model_facts, spec_difference, tokenizer_hash
from cutaway.generation.prompt_file import LONGEST, PromptFile
from cutaway.generation.sampling import Sampling
from cutaway.generation.voice import Voice

FORMAT, VERSION = "cutaway answers", "1"
LARGEST = 64 << 20  # bytes of a record
_ANEW = "Give what it was made with, write to another file, or begin anew with restart=True (--restart)."
_WHAT = {
    "source": "was made of other prompts",
    "model": "was made with another model",
    "settings": "was made with other settings",
}


class RunRecord:
    """The record of a file of answers: ``PATH.run``.

    Args:
        path: of the answers.
        file: the answers.

    Attributes:
        name: a hash of the record, which every line repeats.
    """

    def __init__(self, path: Path, file: GrowingFile) -> None:
        self._path = path
        self._own = path.with_name(path.name + ".run")
        self._file = file
        self._held = sum(1 for _ in file.lines())
        self.name = ""

    def number(self, *keys: str) -> int | None:
        """A number that the answers which are there were made with; :meth:`begin` says what is wrong with a record."""
        if self._held and self._own.exists():
            with suppress(CutawayError, KeyError, TypeError):
                value: Any = self._read()
                for key in keys:
                    value = value[key]
                return value if isinstance(value, int) and (keys != ("batch",) or value > 0) else None
        return None

    def begin(self, voice: Voice, prompts: PromptFile, sampling: Sampling, batch: int, *, restart: bool) -> int:
        """Make the files ready to be added to, and say how many answers there are.

        Raises:
            ResumeMismatch: they are of another run; the field says what differs.
            FormatError: the record, or one of them, is damaged.
        """
        mine = _record(voice, prompts, sampling, batch)
        if not restart and not self._own.exists() and self._file.size:
            what = "is there, and nothing says how it was made"
            raise ResumeMismatch(what, path=self._path, hint=_ANEW)
        if restart or not self._held:
            self._file.cut(0)
            with atomic_write(self._own) as record:
                record.write(json.dumps(mine, indent=1).encode())
            self.name = _name(mine)
            return 0
        theirs = self._read()
        self._compare(mine, theirs)
        self.name = _name(theirs)
        size = 0
        for place, line in enumerate(self._file.lines()):
            self._check_line(line, place, len(prompts))
            size += len(line) + 1
        if size < self._file.size:  # a line that was being written
            self._file.cut(size)
        return self._held

    def _read(self) -> dict[str, Any]:
        found: Any = read_json(self._own, limit=LARGEST)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise FormatError("is no record of a run", path=self._own, field="format", expected=FORMAT, hint=_ANEW)
        return found

    def _compare(self, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        """Refuse what differs, the prompts first."""
        if theirs.get("version") != mine["version"]:
            raise self._other("is of another version", "version", theirs.get("version"), mine["version"])
        for part, what in _WHAT.items():
            old = theirs.get(part)
            if not isinstance(old, dict):
                raise FormatError("missing", path=self._own, field=part, hint=_ANEW)
            for field, one, other in _differences(mine[part], old):
                if (part, field) == ("model", "spec") and isinstance(other, str):
                    differs = spec_difference(self._own, one, other)
                    if differs is not None:
                        raise self._other(what, differs[0], differs[2], differs[1])
                    continue  # written otherwise, and the same
                name = field.removeprefix("rules/") if part == "settings" else f"{part}/{field}"
                raise self._other(what, name, other, one)

    def _other(self, what: str, field: str, old: object, new: object) -> ResumeMismatch:
        old, new = (json.dumps(value) if isinstance(value, (dict, list)) else value for value in (old, new))
        return ResumeMismatch(what, path=self._path, field=field, expected=old, got=new, hint=_ANEW)

    def _check_line(self, line: bytes, place: int, prompts: int) -> None:
        value: Any = None
        with suppress(CutawayError):
            value = parse_json(line, path=self._path, limit=LONGEST)
        fits = isinstance(value, dict) and (value.get("index"), value.get("run")) == (place, self.name)
        if place >= prompts or not fits:
            where = f"{self._path}:{place + 1}"
            raise FormatError("is no line that this run has written", path=where, hint=_ANEW)


def _differences(one: Any, other: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two values of JSON differ, object by object: (path, of the first, of the second)."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            yield from _differences(one.get(key), other.get(key), f"{at}/{key}" if at else key)
    elif one != other:
        yield at, one, other


def _record(voice: Voice, prompts: PromptFile, sampling: Sampling, batch: int) -> dict[str, Any]:
    made = {
        "format": FORMAT,
        "version": VERSION,
        "source": {"prompts": len(prompts), "sha256": prompts.sha256},
        "model": {**model_facts(voice.model), "tokenizer": tokenizer_hash(voice.tokenizer)},
        "settings": asdict(sampling),
        "batch": batch,  # may be another when it goes on
    }
    found: dict[str, Any] = json.loads(json.dumps(made, default=sorted))  # as it will be read
    return found


def _name(record: Mapping[str, Any]) -> str:
    facts = {key: value for key, value in record.items() if key != "batch"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
