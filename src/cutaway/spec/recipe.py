"""A model in a few words: what a person says of it, expanded to a whole spec.

::

    d_model: 64                          layers: 6
    n_heads: 4                           pattern: [local, local, global]
    vocab_size: 256                      window: 32
    norm: rms                            positions: alibi
    where: post                          activation: relu2

Only the four sizes must be said. What is left out is what most decoders have today: RMSNorm before each branch,
rotary positions, a gated SiLU network of about 8/3 · d_model, one matrix for embedding and head. Wherever one word
will not do, an object says more, with the fields of the spec: ``norm: {kind: layer, eps: 1e-6}``,
``positions: {type: rotary, base: 500000, share: 0.25}``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Final, Literal, final

from cutaway.errors import ConfigError
from cutaway.spec.attention import AttentionSpec, MaskRule
from cutaway.spec.block import BlockSpec, BranchSpec
from cutaway.spec.check import MOST_LAYERS, check
from cutaway.spec.mlp import MlpSpec, MoeSpec
from cutaway.spec.model import EmbeddingSpec, HeadSpec, ModelSpec, StackSpec
from cutaway.spec.norm import NormSpec
from cutaway.spec.recipe_positions import Positions, read_positions
from cutaway.spec.serial import read

__all__ = ["expand"]

NEEDED = ("d_model", "n_heads", "layers", "vocab_size")
# Word → type. Those of the second group may differ by layer, in an entry of the pattern.
MODEL: dict[str, str] = {
    "d_model": "size",
    "layers": "size",
    "vocab_size": "size",
    "max_positions": "size",
    "pattern": "pattern",
    "tied": "flag",
    "embed_scale": "number",
    "embed_norm": "flag",
    "logit_scale": "number",
    "logit_cap": "number",
    "dropout": "number",
}
LAYER: dict[str, str] = {
    "n_heads": "size",
    "n_kv_heads": "size",
    "d_head": "size",
    "d_ff": "size",
    "window": "size",
    "chunk": "size",
    "causal": "flag",
    "prefix": "flag",
    "norm": "any",
    "where": "pre post out sandwich none",
    "parallel": "flag",
    "shared_norm": "flag",
    "positions": "any",
    "activation": "relu relu2 gelu gelu_tanh silu",
    "gated": "flag",
    "bias": "flag",
    "qkv_bias": "flag",
    "qk_norm": "head width none",
    "score_scale": "number",
    "score_cap": "number",
    "clip": "number",
    "branch_scale": "number",
    "experts": "any",
}
_NAMED = {"local": {}, "global": {"window": None, "chunk": None}}


def expand(recipe: Mapping[str, Any]) -> ModelSpec:
    """The spec that a recipe means.

    Raises:
        ConfigError: a word that is not known or does not fit, by its pointer.
        LimitExceeded: more layers or rows than any model has.

    >>> spec = expand({"d_model": 64, "n_heads": 4, "layers": 6, "vocab_size": 256, "positions": "alibi",
    ...     "pattern": ["local", "local", "global"], "window": 16, "norm": "rms", "where": "post"})
    >>> [layer.attention.mask.window for layer in spec.decoder.layers]
    [16, 16, None, 16, 16, None]
    """
    words = _Words(recipe, MODEL | LAYER, "")
    for key in NEEDED:
        if words.get(key) is None:
            raise ConfigError("missing", field=f"/{key}", hint=f"A recipe says at least {', '.join(NEEDED)}.")
    d_model, n_layers = words.get("d_model"), words.get("layers")
    if n_layers > MOST_LAYERS:
        raise ConfigError("more layers than any model has", field="/layers", expected=f"≤ {MOST_LAYERS}", got=n_layers)
    whole = _Layer(_Words({key: value for key, value in recipe.items() if key in LAYER}, LAYER, ""), d_model)
    norm, table = whole.norm, whole.positions.table(words.get("max_positions", 2048))
    layers = [_Layer(inner, d_model) for inner in _by_layer(words, recipe)]
    dropout = words.get("dropout", 0.0)
    spec = ModelSpec(
        family="cutaway",
        vocab_size=words.get("vocab_size"),
        d_model=d_model,
        max_positions=words.get("max_positions", 2048),
        embedding=EmbeddingSpec(
            scale=words.get("embed_scale", 1.0),
            positions=table,
            norm=norm if words.get("embed_norm", False) else None,
            dropout=dropout,
        ),
        decoder=StackSpec(
            tuple(islice(cycle([layer.block(dropout) for layer in layers]), n_layers)),
            # After post-norms the stream is normed already.
            norm if any(layer.where in ("pre", "out", "sandwich") for layer in layers) else None,
        ),
        head=HeadSpec(words.get("tied", True), scale=words.get("logit_scale", 1.0), soft_cap=words.get("logit_cap")),
    )
    check(spec)
    return spec


@final
class _Words:
    """The words of a recipe, each of a known name and type."""

    def __init__(self, values: object, known: Mapping[str, str], at: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError("not an object", field=at or "/", expected="words with their values", got=values)
        self.at: Final = at
        self._values: Final = values
        for key, value in values.items():
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
                raise ConfigError("unknown word", field=f"{at}/{key}", got=value, hint=hint)
            if value is not None:
                self._check(key, value, known[key])

    def _check(self, key: str, value: object, kind: str) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        match kind:
            case "any":
                return
            case "size":
                fine, wanted = type(value) is int and value > 0, "a whole number > 0"
            case "flag":
                fine, wanted = isinstance(value, bool), "true or false"
            case "number":
                fine, wanted = number, "a number"
            case "pattern":
                fine, wanted = isinstance(value, Sequence) and not isinstance(value, str), "a list"
                fine = fine and len(value) > 0  # type: ignore[arg-type]
            case words:
                fine, wanted = value in words.split(), " or ".join(words.split())
        if not fine:
            raise ConfigError("of a wrong type", field=f"{self.at}/{key}", expected=wanted, got=value)

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        if value is None:
            return default
        return float(value) if type(value) is int and (MODEL | LAYER).get(key) == "number" else value


def _by_layer(words: _Words, recipe: Mapping[str, Any]) -> list[_Words]:
    """The recipe of each entry of the pattern: the whole one's words under the entry's own."""
    shared = {key: value for key, value in recipe.items() if key in LAYER}
    pattern = words.get("pattern", ["local"])
    if len(pattern) > words.get("layers"):
        raise ConfigError("longer than there are layers", field="/pattern", expected=words.get("layers"), got=pattern)
    found = []
    for i, entry in enumerate(pattern):
        at = f"/pattern/{i}"
        if isinstance(entry, str):
            if entry not in _NAMED:
                raise ConfigError("unknown value", field=at, expected="local, global or an object", got=entry)
            if entry == "local" and "pattern" in recipe and not {"window", "chunk"} & recipe.keys():
                raise ConfigError("missing, though a layer is local", field="/window", expected="a whole number")
            found.append(_Words(shared | _NAMED[entry], LAYER, ""))
        else:
            own = _Words(entry, LAYER, at).get("positions")
            if own is not None and read_positions(own, 2, f"{at}/positions").at_embedding:
                raise ConfigError("is one for the whole model", field=f"{at}/positions", got=own)
            found.append(_Words(shared | dict(entry), LAYER, at))
    return found


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's words."""

    words: _Words
    d_model: int

    @property
    def where(self) -> Literal["pre", "post", "out", "sandwich", "none"]:
        found: Literal["pre", "post", "out", "sandwich", "none"] = self.words.get("where", "pre")
        return found

    @property
    def norm(self) -> NormSpec:
        value = self.words.get("norm", "rms")
        if isinstance(value, str):
            value = {"kind": value}
        at = f"{self.words.at}/norm"
        if not isinstance(value, Mapping):
            raise ConfigError("of a wrong type", field=at, expected="rms, layer or an object", got=value)
        # LayerNorm has a shift (Ba et al. 2016), RMSNorm has none.
        return read(NormSpec, value, at, eps=1e-5, kind="rms", bias=value.get("kind") == "layer")

    @property
    def d_head(self) -> int:
        stated: int | None = self.words.get("d_head")
        n_heads = self.words.get("n_heads")
        if stated is None and self.d_model % n_heads:
            wanted = f"a divisor of {self.d_model}, or d_head said"
            raise ConfigError("must divide d_model", field=f"{self.words.at}/n_heads", expected=wanted, got=n_heads)
        return self.d_model // n_heads if stated is None else stated

    @property
    def positions(self) -> Positions:
        value = self.words.get("positions", "rotary")
        return read_positions(value, self.d_head, f"{self.words.at}/positions")

    def block(self, dropout: float) -> BlockSpec:
        """The layer as a spec."""
        w, norm, where = self.words, self.norm, self.where
        parallel, shared = w.get("parallel", False), w.get("shared_norm", False)
        before, on_output = where in ("pre", "sandwich"), where in ("out", "sandwich")
        moe = self._experts()
        bodies = {"attn": self._attention(dropout), "mlp" if moe is None else "moe": moe or self._mlp()}
        return BlockSpec(
            tuple(
                BranchSpec(
                    name,
                    body,
                    pre_norm=norm if before and not (shared and name != "attn") else None,
                    out_norm=norm if on_output else None,
                    post_norm=norm if where == "post" else None,
                    scale=w.get("branch_scale", 1.0),
                    dropout=dropout,
                )
                for name, body in bodies.items()
            ),
            parallel=parallel,
            shared_norm=shared,
        )

    def _attention(self, dropout: float) -> AttentionSpec:
        w, positions = self.words, self.positions
        bias, over = w.get("bias", False), w.get("qk_norm", "none")
        n_heads = w.get("n_heads")
        return AttentionSpec(
            n_heads,
            w.get("n_kv_heads", n_heads),
            self.d_head,
            mask=MaskRule(w.get("causal", True), w.get("window"), w.get("chunk"), w.get("prefix", False)),
            rotary=positions.rotary,
            qk_norm=None if over == "none" else self.norm,
            qk_norm_over="width" if over == "width" else "head",
            bias=positions.bias,
            relative=positions.relative,
            clip=w.get("clip"),
            scale=w.get("score_scale"),
            soft_cap=w.get("score_cap"),
            qkv_bias=w.get("qkv_bias", bias),
            out_bias=bias,
            dropout=dropout,
        )

    def _mlp(self) -> MlpSpec:
        w = self.words
        activation, bias = w.get("activation", "silu"), w.get("bias", False)
        gated = w.get("gated", activation == "silu")  # SwiGLU is what SiLU comes with
        # A gate is a third matrix: two thirds of the width keep the count of weights (Shazeer 2020).
        usual = -(-8 * self.d_model // 24) * 8 if gated else 4 * self.d_model
        return MlpSpec(w.get("d_ff", usual), activation, gated=gated, bias=bias, out_bias=bias)

    def _experts(self) -> MoeSpec | None:
        value, at = self.words.get("experts"), f"{self.words.at}/experts"
        if value is None:
            return None
        if isinstance(value, int):
            value = {"n_experts": value}
        n = value.get("n_experts", 2) if isinstance(value, Mapping) else 2
        return read(MoeSpec, value, at, expert=self._mlp(), top_k=min(2, n) if isinstance(n, int) else 2)
