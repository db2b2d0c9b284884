"""A recipe from a YAML text or file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

from cutaway.errors import ConfigError, RequestError
from cutaway.formats.files import read_small

__all__ = ["read_recipe"]

_MOST = 1 << 20  # bytes
_NUMBER = r"^[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?$"  # YAML 1.1 takes 1e-5 for a word


def read_recipe(source: str | PathLike[str]) -> Mapping[str, Any]:
    """The words of a recipe.

    Args:
        source: YAML text where it has a colon followed by a space or several lines, else a file's path.

    Raises:
        ConfigError: not YAML, a word twice, or no words.
        RequestError: PyYAML is not installed.
        StorageError, LimitExceeded: the file.
    """
    path = None if isinstance(source, str) and ("\n" in source or ": " in source) else fspath(source)
    try:
        text = str(source) if path is None else read_small(path, limit=_MOST).decode()
    except UnicodeDecodeError as error:
        raise ConfigError("is not UTF-8", path=path, offset=error.start) from error
    found = _parse(text, path)
    if not isinstance(found, dict):
        raise ConfigError("not a recipe", path=path, expected="words with their values", got=found)
    return found


def _parse(text: str, path: str | None) -> object:
    try:
        import yaml
    except ImportError as error:
        hint = "pip install pyyaml, or give the words as a dict"
        raise RequestError("YAML needs PyYAML, which is not installed", field="recipe", hint=hint) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """PyYAML's safe one; 1e-5 is a number, and no word may stand twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            """A mapping whose keys are distinct."""
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key.value, str) and key.value in seen:
                    line = key.start_mark.line + 1
                    raise ConfigError("stands twice", path=path, field=f"line {line}", got=key.value)
                seen.add(str(key.value))
            made: dict[Any, Any] = super().construct_mapping(node, deep)
            return made

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_NUMBER), list("-+0123456789."))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error)
        where = None if mark is None else f"line {mark.line + 1}"
        raise ConfigError(f"is not YAML: {what}", path=path, field=where) from error
    except (RecursionError, ValueError) as error:
        raise ConfigError("is not YAML that can be read", path=path, got=error) from error
