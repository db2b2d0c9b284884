"""A file of prompts: a JSON object a line, or a plain text a line."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cutaway.errors import CutawayError, DatasetError, LimitExceeded, RequestError, StorageError
from cutaway.formats.files import StrPath, open_regular, parse_json
from cutaway.generation.options import Options, check_names
from cutaway.generation.voice import Prompt

LONGEST = 64 << 20  # bytes of a line
LONG = 20  # digits: more than any token has, and than Python would read for ever
_JSON, _TEXT = (".jsonl", ".ndjson", ".json"), (".txt",)
T = TypeVar("T")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One prompt of a file.

    Attributes:
        where: file and line, for errors: ``prompts.jsonl:3``.
        field: what the prompt is called there: ``prompt`` or ``messages``.
        prompt: a text, messages or ids.
        options: what the line itself says about its answer.
        rest: what else it says, to be repeated with the answer: its ``id``.
    """

    where: str
    field: str
    prompt: Prompt
    options: Options
    rest: dict[str, Any]


class PromptFile:
    """Prompts by their index, from 0; held as bytes, so that nothing changes while they are answered.

    JSON has ``prompt`` (a text, or ids) or ``messages``, perhaps an ``id``, and perhaps options of its own, by their
    names. In a plain file every line is a text, an empty one too. Which it is says the name's end (.jsonl, .ndjson,
    .json, .txt); of others, and of standard input, the first character: ``{`` begins JSON.

    Args:
        source: a path, or ``-`` for standard input.

    Raises:
        DatasetError: there are no prompts.
        FormatError, StorageError: no regular file, or it cannot be read.
    """

    def __init__(self, source: StrPath) -> None:
        self.name = "standard input" if source == "-" else os.fspath(source)
        self._data = sys.stdin.buffer.read() if source == "-" else _read(source)
        self.sha256 = hashlib.sha256(self._data).hexdigest()
        first = len(_BOM) if self._data.startswith(_BOM) else 0
        ending = Path(self.name).suffix.lower() if source != "-" else ""
        self.is_json = ending in _JSON or (ending not in _TEXT and self._data[first:].lstrip()[:1] == b"{")
        end = len(self._data.rstrip()) if self.is_json else len(self._data)
        self._starts = [first] if end > first else []
        while self._starts and (at := self._data.find(b"\n", self._starts[-1], end)) >= 0 and at + 1 < end:
            self._starts.append(at + 1)
        if not self._starts:
            raise DatasetError("holds no prompts", path=self.name)
        self._end = end

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Line:
        """A prompt, as its line says it.

        Raises:
            DatasetError: it says none, or something that there is not; the path has the line.
        """
        where = f"{self.name}:{index + 1}"
        end = self._starts[index + 1] if index + 1 < len(self._starts) else self._end
        data = self._data[self._starts[index] : end].removesuffix(b"\n")
        if len(data) > LONGEST:
            raise LimitExceeded("is too long a line", path=where, expected=f"at most {LONGEST} bytes", got=len(data))
        if self.is_json:
            return _json_line(data, where)
        try:
            return Line(where, "prompt", data.removesuffix(b"\r").decode(), {}, {})
        except UnicodeDecodeError as error:
            raise DatasetError("is not UTF-8", path=where, offset=error.start) from error


def _read(source: StrPath) -> bytes:
    with open_regular(source) as file:
        try:
            return file.read()
        except OSError as error:
            raise StorageError("cannot be read", path=source, got=error.strerror or repr(error)) from error


def _json_line(data: bytes, where: str) -> Line:
    if not data.strip():
        raise DatasetError("is empty", path=where, expected="a JSON object")
    try:
        value = parse_json(data, path=where, limit=LONGEST, error=DatasetError)
    except DatasetError as error:
        error.hint = error.hint or "A file of prompts has one JSON object a line."
        raise
    if not isinstance(value, dict):
        raise DatasetError("is not a JSON object", path=where, got=value)
    given = [name for name in ("prompt", "messages") if name in value]
    if len(given) != 1:
        got = "both" if given else "neither"
        raise DatasetError("does not say what to answer", path=where, expected="prompt or messages", got=got)
    (field,) = given
    prompt: Any = value.pop(field)
    if field == "prompt" and not isinstance(prompt, (str, list)):
        raise DatasetError("is not a prompt", path=where, field=field, expected="a text, or token ids", got=prompt)
    if field == "messages" and not (isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt)):
        raise DatasetError("are not messages", path=where, field=field, expected="a list of objects", got=prompt)
    rest = {"id": value.pop("id")} if "id" in value else {}
    options: Any = {name: option for name, option in value.items() if option is not None}
    with_line(where, check_names, options)
    biases = options.get("logit_bias")
    if isinstance(biases, dict) and all(key.isdecimal() and len(key) < LONG for key in biases):  # JSON's keys are texts
        options["logit_bias"] = {int(key): bias for key, bias in biases.items()}
    return Line(where, field, prompt, options, rest)


def with_line(where: str, function: Callable[..., T], *arguments: Any, **more: Any) -> T:
    """Call a function; what it refuses is refused with file and line."""
    try:
        return function(*arguments, **more)
    except CutawayError as error:
        if type(error) is not RequestError:
            raise error.at(where) from error
        facts = {"field": error.field, "expected": error.expected, "got": error.got, "hint": error.hint}
        raise DatasetError(error.what, path=where, **facts) from error  # type: ignore[arg-type]
