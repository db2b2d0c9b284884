"""GGUF's metadata as a config in Hugging Face's words, so that one reader serves both; and back."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cutaway.errors import ConfigError

if TYPE_CHECKING:
    from cutaway.formats.gguf_write import Typed

# Key after the architecture's prefix → config key.
COMMON = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
}
# Read here and translated below, or saying nothing that is not said elsewhere.
_HANDLED = ("attention.value_length", "rope.dimension_count", "rope.scaling.", "attention.causal")
_SCALINGS = {"linear": "linear", "yarn": "yarn", "none": "default"}
_SCALED = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
_BETAS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def config_from_metadata(
    metadata: Mapping[str, Any], arch: str, keys: Mapping[str, str], *, tied: bool, rows: int, path: str | None = None
) -> dict[str, Any]:
    """The config that an architecture's keys amount to.

    Args:
        metadata: the file's key/values.
        arch: its architecture.
        keys: the family's own keys, over the common ones.
        tied: whether the file has no output matrix.
        rows: rows of the embedding table.
        path: file, for messages.

    Raises:
        ConfigError: a key of the architecture that nobody reads, or one whose value contradicts another.
    """
    names = {**COMMON, **keys}
    config: dict[str, Any] = {"tie_word_embeddings": tied, "vocab_size": rows}
    prefix = f"{arch}."
    for key, value in metadata.items():
        if not key.startswith(prefix):
            continue
        word = key[len(prefix) :]
        if word in names:
            config[names[word]] = _plain(value, key, path, metadata.get(f"{prefix}block_count"))
        elif not word.startswith(_HANDLED):
            raise ConfigError("unknown setting", path=path, field=key, got=value)
    if config["vocab_size"] != rows:
        raise ConfigError(
            "differs from the embedding table",
            path=path,
            field=f"{prefix}vocab_size",
            expected=rows,
            got=config["vocab_size"],
        )
    needed = next((name for name in ("rms_norm_eps", "layer_norm_epsilon") if name in names.values()), None)
    if needed is not None and not {"rms_norm_eps", "layer_norm_epsilon"} & set(config):
        raise ConfigError("missing", path=path, field=f"{prefix}attention.layer_norm_rms_epsilon")
    _widths(metadata, prefix, config, path)
    scaling = _scaling(metadata, prefix, path)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _plain(value: Any, key: str, path: str | None, n_layers: Any = None) -> Any:
    """Per-layer lists are read where there is one entry a layer and all agree."""
    if isinstance(value, (str, int, float, bool)):
        return _shortest(value)
    entries = np.asarray(value).tolist()
    if isinstance(n_layers, bool) or not isinstance(n_layers, int) or len(entries) != n_layers:
        raise ConfigError("one entry a layer is needed", path=path, field=key, expected=n_layers, got=len(entries))
    if len(set(map(str, entries))) != 1:
        raise ConfigError("values that differ by layer are not supported", path=path, field=key, got=entries[:8])
    return _shortest(entries[0])


def _shortest(value: Any) -> Any:
    """GGUF keeps fp32: 1e-5 comes back as 9.99999974e-06. The shortest decimal with the same fp32 is meant."""
    if not isinstance(value, float) or value != value or value in (float("inf"), float("-inf")):
        return value

    def fp32(x: float) -> bytes:
        return struct.pack("<f", x)

    if struct.unpack("<f", fp32(value))[0] != value:
        return value
    return next((short for digits in range(1, 10) if fp32(short := float(f"{value:.{digits}g}")) == fp32(value)), value)


def _widths(metadata: Mapping[str, Any], prefix: str, config: Mapping[str, Any], path: str | None) -> None:
    """Widths of values and of the rotation, which must be those of the keys."""
    heads = config.get("num_attention_heads")
    width = config.get("head_dim")
    if width is None and isinstance(heads, int) and heads > 0 and isinstance(config.get("hidden_size"), int):
        width = config["hidden_size"] // heads
    for word in ("attention.value_length", "rope.dimension_count"):
        stated = metadata.get(prefix + word)
        stated = None if stated is None else _plain(stated, prefix + word, path, metadata.get(f"{prefix}block_count"))
        if stated is not None and width is not None and stated != width:
            raise ConfigError("differs from the head width", path=path, field=prefix + word, expected=width, got=stated)
    if metadata.get(f"{prefix}attention.causal") is False:
        raise ConfigError("two-way attention is not supported here", path=path, field=f"{prefix}attention.causal")


def _scaling(metadata: Mapping[str, Any], prefix: str, path: str | None) -> dict[str, Any] | None:
    at = f"{prefix}rope.scaling."
    stated = {key[len(at) :]: _plain(value, key, path) for key, value in metadata.items() if key.startswith(at)}
    kind = stated.pop("type", "none")
    if kind not in _SCALINGS:
        raise ConfigError("unknown value", path=path, field=f"{at}type", expected=" or ".join(_SCALINGS), got=kind)
    stated.pop("finetuned", None)
    if kind == "none":
        for word, neutral in (("factor", (1.0, 0.0)), ("attn_factor", (1.0,))):
            if word in stated and stated[word] not in neutral:
                raise ConfigError("has no meaning without a type", path=path, field=at + word, got=stated[word])
        return None
    names = dict(_SCALED)
    if kind == "yarn":
        names |= _BETAS
    unknown = sorted(set(stated) - set(names))
    if unknown:
        raise ConfigError("unknown setting", path=path, field=at + unknown[0], got=stated[unknown[0]])
    return {"rope_type": kind, **{names[word]: value for word, value in stated.items()}}


def metadata_from_config(config: Mapping[str, Any], arch: str, keys: Mapping[str, str]) -> dict[str, Typed]:
    """The inverse of :func:`config_from_metadata`: an architecture's keys, each with its type.

    Only what has a key is written. Whether that was all, reading it back shows.

    Args:
        config: in Hugging Face's words; ``rope_parameters`` of one kind for all layers.
        arch, keys: see :func:`config_from_metadata`.

    Raises:
        ConfigError: a scaling of rotary positions that the format has no word for.
    """
    rope = dict(config.get("rope_parameters") or {})
    flat = {**config, "rope_theta": rope.pop("rope_theta", None)}
    found: dict[str, Any] = {word: flat.get(name) for word, name in {**COMMON, **keys}.items()}
    found["attention.value_length"] = found["rope.dimension_count"] = config.get("head_dim")
    kind = rope.get("rope_type", "default")
    if kind not in _SCALINGS.values():
        wanted = "default, linear or yarn"
        raise ConfigError(
            "GGUF has no word for this scaling of rotary positions", field="/rope_type", expected=wanted, got=kind
        )
    if kind != "default":
        found["rope.scaling.type"] = kind
        found |= {f"rope.scaling.{word}": rope.get(name) for word, name in _SCALED.items()}
        # YaRN's betas have keys too, which llama.cpp (libllama 0.5.0) passes over: left out, they are missed by name.
    return {f"{arch}.{word}": _typed(value) for word, value in found.items() if value is not None}


def _typed(value: bool | int | float | str) -> Typed:
    match value:
        case bool():
            return "bool", value
        case int():
            return "u32", value
        case float():
            return "f32", value
        case _:
            return "str", value
