"""The files beside tokenizer.json: which tokens have which role, and the chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, final

from cutaway.errors import CutawayError, TemplateError, TokenizerError
from cutaway.formats.strict_json import parse_json, pointer
from cutaway.tokenizers.chat import ChatTemplate, LateTemplate

__all__ = ["FLAGS", "ROLES", "Settings"]

FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # of an added token: how it is found in a text

ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_LIMIT = 16 << 20


@final
class Settings:
    """tokenizer_config.json over special_tokens_map.json, with every value checked when asked for."""

    def __init__(self, folder: Path, files: Any) -> None:
        self._folder = folder
        self._read = files
        self.path = str(folder / "tokenizer_config.json")
        self._config = self._json("tokenizer_config.json")
        self._map = self._json("special_tokens_map.json")

    def _json(self, name: str) -> dict[str, Any]:
        data = self._read(self._folder, name, _LIMIT)
        if data is None:
            return {}
        path = str(self._folder / name)
        tree = parse_json(data, path=path, limit=_LIMIT, error=TokenizerError)
        if not isinstance(tree, dict):
            raise TokenizerError("is not an object", path=path, got=type(tree).__name__)
        return tree

    def fail(self, what: str, *keys: str | int, expected: object = None, got: object = None) -> TokenizerError:
        return TokenizerError(what, path=self.path, field=pointer(*keys), expected=expected, got=got)

    def role(self, name: str) -> str | None:
        """The string of ``bos_token`` and the like, which stands there bare or as an object."""
        value = self._role(name)
        return None if value is None else self._content(value, name)

    def role_flags(self, name: str) -> dict[str, bool]:
        """How that token is found in a text, where the settings say so."""
        value = self._role(name)
        found = {key: value[key] for key in FLAGS if key in value} if isinstance(value, dict) else {}
        for key, flag in found.items():
            if not isinstance(flag, bool):
                raise self.fail("is not a flag", name, key, got=flag)
        return found

    def _role(self, name: str) -> Any:
        return self._config[name] if name in self._config else self._map.get(name)

    def has_role(self, name: str) -> bool:
        """Whether the settings name such a token, or say that there is none."""
        return name in self._config or name in self._map

    def kind(self) -> str | None:
        """The reference's class: ``T5`` for ``T5Tokenizer`` and ``T5TokenizerFast``."""
        value = self._config.get("tokenizer_class")
        return value.removesuffix("Fast").removesuffix("Tokenizer") if isinstance(value, str) else None

    def whole(self, name: str, default: int, most: int) -> int:
        value = self._config.get(name, default)
        if type(value) is not int or not 0 <= value <= most:
            raise self.fail("is not a number in range", name, expected=f"0 to {most}", got=value)
        return value

    def _content(self, value: Any, *keys: str | int) -> str:
        if isinstance(value, dict):
            value = value.get("content")
        if not isinstance(value, str) or not value:
            raise self.fail("is not a token", *keys, got=value)
        return value

    def extras(self) -> Iterator[str]:
        """Further control tokens, named or not."""
        for source in (self._config, self._map):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                value = source.get(key) or []
                if not isinstance(value, list | dict):
                    raise self.fail("is not a list", key, got=value)
                for item in value.values() if isinstance(value, dict) else value:
                    yield self._content(item, key)

    def named_extras(self) -> dict[str, str]:
        """Those of them that a template may ask for by name, such as ``image_token``."""
        value = self._config.get("extra_special_tokens")
        return {key: self._content(item, key) for key, item in value.items()} if isinstance(value, dict) else {}

    def flag(self, name: str) -> bool | None:
        value = self._config.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.fail("is not a flag", name, got=value)
        return value

    def declared(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """``added_tokens_decoder``: id → token."""
        table = self._config.get("added_tokens_decoder") or {}
        if not isinstance(table, dict):
            raise self.fail("is not an object", "added_tokens_decoder")
        for key, token in table.items():
            if not key.isdecimal() or not key.isascii() or len(key) > 9:
                raise self.fail("is no token id", "added_tokens_decoder", key)
            self._content(token, "added_tokens_decoder", key)
            if not isinstance(token, dict):
                raise self.fail("is not an object", "added_tokens_decoder", key)
            yield int(key), token

    def template(self) -> LateTemplate:
        """The chat template; its files are read now, so that they may change or go."""
        try:
            return LateTemplate(self._template())
        except CutawayError as error:
            return LateTemplate(partial(_refuse, error))

    def _template(self) -> Callable[[], ChatTemplate | None]:
        data = self._read(self._folder, "chat_template.jinja", _LIMIT)
        if data is not None:
            path = str(self._folder / "chat_template.jinja")
            try:
                return partial(ChatTemplate, data.decode(), path=path)
            except UnicodeDecodeError as error:
                raise TemplateError("is not UTF-8", path=path, offset=error.start) from error
        source, path = self._json("chat_template.json").get("chat_template"), str(self._folder / "chat_template.json")
        if source is None:
            source, path = self._config.get("chat_template"), self.path
        if source is None:
            return lambda: None
        if not isinstance(source, list):
            return partial(ChatTemplate, source, path=path, field="/chat_template")
        named: dict[str, str] = {}
        for i, entry in enumerate(source):
            name = entry.get("name") if isinstance(entry, dict) else None
            if not isinstance(name, str) or name in named:
                what = "has no name" if name is None else "has the name of another"
                raise TemplateError(what, path=path, field=pointer("chat_template", i), got=name)
            named[name] = entry.get("template")
        if "default" not in named and len(named) != 1:
            raise TemplateError("none is called default", path=path, field="/chat_template", got=", ".join(named))
        usual = named.get("default", *named.values()) if "default" not in named else named["default"]
        tools = named.get("tool_use")

        def made() -> ChatTemplate:
            other = None if tools is None else ChatTemplate(tools, path=path, field="/chat_template")
            return ChatTemplate(usual, path=path, field="/chat_template", with_tools=other)

        return made


def _refuse(error: CutawayError) -> NoReturn:
    raise error
