"""Every error cutaway raises on purpose, as one tree.

::

    CutawayError
    ├── FormatError            a file breaks its format
    │   ├── TruncatedError     ... by ending too early
    │   ├── LimitExceeded      ... or claims a size past a budget
    │   ├── ShardError         ... or its parts do not fit together
    │   └── DtypeError         ... or stores a type we do not know
    ├── UnsafeFormatError      reading it could run code (pickle)
    ├── ShapeMismatch          a tensor is missing, unused or of another shape
    ├── ConfigError            a setting is missing, unknown or out of range
    ├── UnsupportedModelError  a family or option that cutaway does not have
    ├── TokenizerError         a vocabulary is damaged or cannot do this
    ├── TemplateError          a chat template is unsafe, broken or refuses the messages
    ├── DatasetError           a file of prompts or training data is unusable
    ├── DownloadError          the network gave something else than was asked
    │   └── OfflineError       ... or may not be used and the file is not here
    ├── StorageError           the disk refused
    ├── ResumeMismatch         a run or session cannot continue from this state
    ├── LockedError            somebody else is writing there
    ├── RequestError           a call's arguments make no sense
    │   ├── NameNotFound       a tap name or pattern that matches nothing
    │   └── ContextExceeded    more tokens than the model or cache can hold
    └── ResourceError          not enough memory

``exit_code`` is what the command line ends with: 2 usage or config, 3 bad input,
4 resources, 5 network.
"""

from __future__ import annotations

from os import PathLike, fspath
from typing import Self

__all__ = [
    "ConfigError",
    "ContextExceeded",
    "CutawayError",
    "DatasetError",
    "DownloadError",
    "DtypeError",
    "FormatError",
    "LimitExceeded",
    "LockedError",
    "NameNotFound",
    "OfflineError",
    "RequestError",
    "ResourceError",
    "ResumeMismatch",
    "ShapeMismatch",
    "ShardError",
    "StorageError",
    "TemplateError",
    "TokenizerError",
    "TruncatedError",
    "UnsafeFormatError",
    "UnsupportedModelError",
]

_LONGEST = 300


def _short(value: object) -> str:
    """A value as one printable line of bounded length, whatever a file put into it."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: _LONGEST + 1])
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


class CutawayError(Exception):
    """Root of the tree. ``str(error)`` is one line: ``path: field: what (expected X, got Y)``.

    Args:
        what: what is wrong, in a few words.
        path: the file or folder it is about.
        field: JSON pointer, tensor name or key inside it.
        offset: byte offset inside the file.
        expected: what would have been right.
        got: what was there.
        hint: what to do next.
    """

    code = "error"
    exit_code = 3

    def __init__(
        self,
        what: str,
        *,
        path: str | PathLike[str] | None = None,
        field: str | None = None,
        offset: int | None = None,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
    ) -> None:
        self.what = _short(what)
        self.path = None if path is None else fspath(path)
        self.field = None if field is None else _short(field)
        self.offset = offset
        self.expected = None if expected is None else _short(expected)
        self.got = None if got is None else _short(got)
        self._hint: str | None = None
        super().__init__(self.line())
        self.hint = hint

    @property
    def hint(self) -> str | None:
        """What to do next. Shown below the line where the error ends a program (PEP 678)."""
        return self._hint

    @hint.setter
    def hint(self, hint: str | None) -> None:
        self._hint = hint
        self.__notes__ = [] if hint is None else [hint]

    def at(self, path: str | PathLike[str]) -> Self:
        """The same error, with the file that it turned out to be about."""
        facts = {"field": self.field, "offset": self.offset, "expected": self.expected, "got": self.got}
        return type(self)(self.what, path=path, hint=self.hint, **facts)  # type: ignore[arg-type]

    def line(self) -> str:
        """The error as one line, without the hint."""
        place = [part for part in (self.path and _short(self.path), self.field) if part]
        if self.offset is not None:
            place.append(f"byte {self.offset}")
        facts = []
        if self.expected is not None:
            facts.append(f"expected {self.expected}")
        if self.got is not None:
            facts.append(f"got {self.got}")
        tail = f" ({', '.join(facts)})" if facts else ""
        return ": ".join([*place, self.what]) + tail


class FormatError(CutawayError):
    """A file breaks the rules of its format."""

    code = "format"


class TruncatedError(FormatError):
    """A file ends before what it announces."""

    code = "truncated"


class LimitExceeded(FormatError):
    """A file claims a size past the budget; nothing was allocated for it."""

    code = "limit"


class ShardError(FormatError):
    """Files that belong together do not fit together."""

    code = "shard"


class DtypeError(FormatError):
    """A stored number type is unknown or not allowed here."""

    code = "dtype"


class UnsafeFormatError(CutawayError):
    """Reading this file could run code. cutaway never does."""

    code = "unsafe_format"


class ShapeMismatch(CutawayError):
    """A tensor is missing, left over, or has another shape than the model."""

    code = "shape"


class ConfigError(CutawayError):
    """A setting is missing, unknown, or out of range."""

    code = "config"


class UnsupportedModelError(CutawayError):
    """A model family, or an option of one, that cutaway does not have."""

    code = "unsupported"


class TokenizerError(CutawayError):
    """A vocabulary is damaged, or a text or id cannot be handled by it."""

    code = "tokenizer"


class TemplateError(CutawayError):
    """A chat template is unsafe or broken, or refuses these messages."""

    code = "template"


class DatasetError(CutawayError):
    """A file of prompts, or training data, is missing or unusable."""

    code = "dataset"


class DownloadError(CutawayError):
    """A download failed, or brought something else than was asked for."""

    code = "download"
    exit_code = 5


class OfflineError(DownloadError):
    """A file is not here and the network may not be used."""

    code = "offline"


class StorageError(CutawayError):
    """The file system refused a read or a write."""

    code = "storage"
    exit_code = 4


class ResumeMismatch(CutawayError):
    """A training run, or a session, cannot continue from this state."""

    code = "resume"


class LockedError(CutawayError):
    """Another process is writing there."""

    code = "locked"
    exit_code = 4


class RequestError(CutawayError):
    """A call's arguments make no sense."""

    code = "request"
    exit_code = 2


class NameNotFound(RequestError):
    """A tap name or pattern matches nothing."""

    code = "name"


class ContextExceeded(RequestError):
    """More tokens than the model's positions or the cache can hold."""

    code = "context"
    exit_code = 3


class ResourceError(CutawayError):
    """There is not enough memory for this."""

    code = "resources"
    exit_code = 4
