"""Reading a config so that nothing in it is overlooked."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from cutaway.errors import ConfigError, LimitExceeded

T = TypeVar("T")
_MISSING: Any = object()

# Keys that change no number here whatever they say. They are kept and given back on saving.
KEPT = frozenset(
    """
    _attn_implementation _commit_hash _name_or_path _num_labels sbert_ce_default_activation_function
    sentence_transformers summary_activation summary_first_dropout summary_last_dropout summary_proj_to_labels
    summary_type summary_use_proj architectures attn_implementation auto_map bos_token_id
    cache_implementation decoder_start_token_id dtype eos_token_id finetuning_task gradient_checkpointing
    id2label initializer_factor initializer_range keys_to_ignore_at_inference label2id max_length name_or_path
    num_labels output_attentions output_hidden_states pad_token_id prefix problem_type return_dict
    sep_token_id task_specific_params tokenizer_class torch_dtype transformers.js_config transformers_version
    unk_token_id unsloth_fixed unsloth_version use_cache
    """.split()  # noqa: SIM905 (a list of words is read as words)
)

# Keys that change nothing at these values, and are refused at others.
INERT_AT: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "torchscript": (False, True),
    "use_bfloat16": (False,),
    "pruned_heads": ({}, None),
    "chunk_size_feed_forward": (0,),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "use_bidirectional_attention": (False, None),
    "attention_chunk_size": (None,),
    "output_past": (False, True),
    "is_llama_config": (True,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}


class ConfigReader:
    """Hands out a config's values by type and range, remembers which were read, refuses the rest.

    Args:
        values: the config.
        path: file it came from, for messages.
        ignore: keys that the person says to leave unread.
        at: JSON pointer of this section.
    """

    def __init__(
        self, values: Mapping[str, Any], *, path: str | None = None, ignore: Iterable[str] = (), at: str = ""
    ) -> None:
        self._values = values
        self.path = path
        self._at = at
        self._ignore = frozenset(ignore)
        self._seen: set[str] = set()
        self._sections: list[ConfigReader] = []
        self._keep: set[str] = set()

    def keep(self, *keys: str) -> None:
        """Give these back on saving although they were read: what they say is said better elsewhere."""
        self._keep.update(keys)

    def error(self, key: str, what: str, *, expected: object = None, got: object = None) -> ConfigError:
        """A ConfigError about one key of this section."""
        return ConfigError(what, path=self.path, field=f"{self._at}/{key}", expected=expected, got=got)

    def ignores(self, key: str) -> bool:
        """Whether the person says to leave it unread."""
        return key in self._ignore

    def has(self, key: str) -> bool:
        """Whether the key is there and not null. Does not count as reading it."""
        return self._values.get(key) is not None

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def raw(self, key: str, default: Any = _MISSING) -> Any:
        """The value as it is."""
        self._seen.add(key)
        if key not in self._values:
            if default is _MISSING:
                raise self.error(key, "missing")
            return default
        return self._values[key]

    def _typed(self, key: str, default: Any) -> Any:
        value = self.raw(key, default)
        if value is None and default is not _MISSING:
            return default
        return value

    def integer(self, key: str, default: Any = _MISSING, *, low: int = 1, high: int = 1 << 20) -> Any:
        """An int in low…high; a null counts as absent where there is a default (which may be None)."""
        value = self._typed(key, default)
        if value is default and not isinstance(value, int):
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, "not a whole number in range", expected=f"int {low}…{high}", got=value)
        return value

    def size(self, key: str, *, high: int) -> int:
        """How many of something big there are: past ``high`` it is a budget that is broken, not a range."""
        value = self.raw(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > high:
            raise LimitExceeded(
                "more than any model has", path=self.path, field=f"{self._at}/{key}", expected=f"≤ {high}", got=value
            )
        return int(self.integer(key, high=high))

    def number(
        self,
        key: str,
        default: Any = _MISSING,
        *,
        low: float = -math.inf,
        above: float | None = None,
        high: float = math.inf,
    ) -> Any:
        """A finite number, at least ``low``, more than ``above``, at most ``high``."""
        value = self._typed(key, default)
        if value is default and not isinstance(value, (int, float)):
            return value
        wanted = f"a number > {above}" if above is not None else f"a number ≥ {low}"
        wanted += f" and ≤ {high}" if high < math.inf else ""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, "not a number", expected=wanted, got=value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or not low <= number <= high or (above is not None and number <= above):
            raise self.error(key, "out of range", expected=wanted, got=value)
        return number

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        """True or false."""
        value = self._typed(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "not true or false", expected="true or false", got=value)
        return value

    def choice(self, key: str, options: Mapping[str, T], default: Any = _MISSING) -> T:
        """One of some words, as what it stands for."""
        value = self._typed(key, default)
        if not isinstance(value, str) or value not in options:
            raise self.error(key, "unknown value", expected=" or ".join(sorted(options)), got=value)
        return options[value]

    def words(self, key: str, length: int, options: Iterable[str]) -> list[str] | None:
        """A list of words of a given length, or None where there is none."""
        value = self.raw(key, None)
        if value is None:
            return None
        known = set(options)
        if not isinstance(value, list) or len(value) != length:
            got = f"{len(value)} entries" if isinstance(value, list) else value
            raise self.error(key, "one entry a layer is needed", expected=f"a list of {length}", got=got)
        for place, word in enumerate(value):
            if not isinstance(word, str) or word not in known:
                raise self.error(f"{key}/{place}", "unknown value", expected=" or ".join(sorted(known)), got=word)
        return value

    def section(self, key: str) -> ConfigReader | None:
        """A nested object as a reader of its own, or None where there is none."""
        value = self.raw(key, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "not an object", expected="an object", got=value)
        inner = ConfigReader(value, path=self.path, ignore=self._ignore, at=f"{self._at}/{key}")
        self._sections.append(inner)
        return inner

    def fixed(self, key: str, allowed: Iterable[Any], default: Any = _MISSING) -> None:
        """A key whose other values this family does not express."""
        value = self.raw(key, default)
        if value not in list(allowed):
            raise self.error(key, "this value is not supported", expected=list(allowed), got=value)

    def finish(self) -> tuple[tuple[str, str], ...]:
        """Refuse what was not read; give back, as JSON, what was kept unread because it changes nothing."""
        kept = []
        for key, value in self._values.items():
            if key in self._keep:
                kept.append((key, json.dumps(value, sort_keys=True)))
            if key in self._seen or key in self._keep:
                continue
            if key in INERT_AT:
                self.fixed(key, INERT_AT[key])
            elif key not in KEPT and key not in self._ignore:
                continue
            self._seen.add(key)
            kept.append((key, json.dumps(value, sort_keys=True)))
        self._seen |= self._keep
        self._refuse_unread()
        for inner in self._sections:
            inner._refuse_unread()
        return tuple(sorted(kept))

    def _refuse_unread(self) -> None:
        left = [key for key in self._values if key not in self._seen and key not in self._ignore]
        if not left:
            return
        near = difflib.get_close_matches(left[0], sorted(self._seen), n=1)
        error = self.error(left[0], "unknown setting", got=self._values[left[0]])
        error.hint = (f"Did you mean {near[0]!r}? " if near else "") + (
            f"If it changes nothing for you, load with ignore={tuple(left)!r}."
        )
        raise error
