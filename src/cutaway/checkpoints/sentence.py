"""The files that sentence-transformers puts beside a model: how a text becomes one vector, both ways.

::

    modules.json                          the steps: a transformer, pooling, perhaps normalisation
    1_Pooling/config.json                 which pooling
    sentence_bert_config.json             how many tokens are read
    config_sentence_transformers.json     texts to put before what is embedded
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cutaway.errors import ConfigError, UnsupportedModelError
from cutaway.formats.config import ConfigReader
from cutaway.formats.files import read_json, resolve_inside
from cutaway.spec.sentence import Pool, SentenceSettings

STEPS, POOLING, LENGTH, PROMPTS = (
    "modules.json",
    "1_Pooling/config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
FILES = (STEPS, POOLING, LENGTH, PROMPTS)
_MOST = 1 << 20
_POOLS: dict[str, Pool] = {"mean": "mean", "cls": "cls", "lasttoken": "last", "max": "max"}
_OLD = {  # one flag for each pooling, in files of before version 6
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


def read_sentence(folder: Path) -> SentenceSettings | None:
    """What the folder says, or None where it is no sentence-transformers folder.

    Raises:
        UnsupportedModelError: a step that is not done here, by its name.
        ConfigError: a value that makes no sense.
    """
    path = folder / STEPS
    if not path.exists():
        return None
    steps: Any = read_json(path, limit=_MOST, error=ConfigError)
    if not isinstance(steps, list) or not steps or not all(isinstance(step, dict) for step in steps):
        raise ConfigError("not a list of steps", path=path, got=steps)
    types = [str(step.get("type", "")) for step in steps]
    kinds = [name.rpartition(".")[2] if name.startswith("sentence_transformers.") else name for name in types]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise UnsupportedModelError(
            "sentence vectors made in other steps are not supported",
            path=path,
            expected="Transformer, Pooling, Normalize",
            got=", ".join(kinds),
        )
    if steps[0].get("path", "") not in ("", "."):
        what = "the model lies in a folder of its own"
        raise UnsupportedModelError(what, path=path, field="/0/path", expected="''", got=steps[0]["path"])
    try:
        pooling = resolve_inside(folder, str(steps[1].get("path", "")), error=ConfigError) / "config.json"
    except ConfigError as error:
        raise ConfigError(error.what, path=path, field="/1/path", got=steps[1].get("path")) from error
    length = _reader(folder / LENGTH)
    most, lower = None, False
    if length is not None:
        most, lower = length.integer("max_seq_length", None), length.flag("do_lower_case", False)
    prompts, default = _prompts(_reader(folder / PROMPTS))
    return SentenceSettings(_pool(pooling), "Normalize" in kinds, most, lower, prompts, default)


def _reader(path: Path) -> ConfigReader | None:
    if not path.exists():
        return None
    values: Any = read_json(path, limit=_MOST, error=ConfigError)
    if not isinstance(values, dict):
        raise ConfigError("not an object", path=path, expected="an object", got=values)
    return ConfigReader(values, path=str(path))


def _pool(path: Path) -> Pool:
    c = _reader(path)
    if c is None:
        raise ConfigError("missing", path=path, hint="modules.json names this file.")
    if not c.flag("include_prompt", True):
        raise c.error("include_prompt", "this value is not supported", expected=True, got=False)
    if c.has("pooling_mode"):
        stated = c.raw("pooling_mode")
        one = stated[0] if isinstance(stated, list) and len(stated) == 1 else stated
        if not isinstance(one, str) or one not in _POOLS:
            raise c.error("pooling_mode", "this pooling is not supported", expected=" or ".join(_POOLS), got=stated)
        return _POOLS[one]
    chosen = [(key, name) for key, name in _OLD.items() if c.flag(key, False)] or [("pooling_mode", "mean")]
    if len(chosen) > 1 or chosen[0][1] not in _POOLS:
        wanted = " or ".join(key for key, name in _OLD.items() if name in _POOLS)
        raise c.error(chosen[-1][0], "this pooling is not supported", expected=f"one of {wanted}", got=True)
    return _POOLS[chosen[0][1]]


def _prompts(c: ConfigReader | None) -> tuple[tuple[tuple[str, str], ...], str | None]:
    if c is None:
        return (), None
    found, default = c.raw("prompts", None) or {}, c.raw("default_prompt_name", None)
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise c.error("prompts", "not texts by name", expected="{name: text}", got=found)
    if default is not None and default not in found:
        raise c.error("default_prompt_name", "is no prompt", expected=" or ".join(found) or None, got=default)
    return tuple(found.items()), default


def sentence_files(settings: SentenceSettings, d_model: int) -> dict[str, bytes]:
    """The files that say the same; the inverse of :func:`read_sentence`."""
    names = {ours: theirs for theirs, ours in _POOLS.items()}
    kinds = ["Transformer", "Pooling", *(["Normalize"] if settings.normalize else [])]
    steps = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    pooling: dict[str, Any] = {"word_embedding_dimension": d_model}
    pooling |= {key: name == names[settings.pool] for key, name in _OLD.items()}
    values: dict[str, Any] = {
        STEPS: steps,
        POOLING: pooling,
        LENGTH: {"max_seq_length": settings.max_length, "do_lower_case": settings.lower},
    }
    if settings.prompts:
        values[PROMPTS] = {"prompts": dict(settings.prompts), "default_prompt_name": settings.default_prompt}
    return {name: json.dumps(value, indent=2).encode() + b"\n" for name, value in values.items()}
