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

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Literal

from cutaway.errors import ConfigError
from cutaway.spec.attention import AttentionSpec, MaskRule
from cutaway.spec.block import BlockSpec, BranchSpec
from cutaway.spec.check import MOST_LAYERS, check
from cutaway.spec.mlp import MlpSpec, MoeSpec
from cutaway.spec.model import EmbeddingSpec, HeadSpec, ModelSpec, StackSpec
from cutaway.spec.norm import NormSpec
from cutaway.spec.recipe_positions import Positions, read_positions
from cutaway.spec.recipe_words import LAYER, MODEL, Words
from cutaway.spec.serial import read

__all__ = ["expand"]

NEEDED = ("d_model", "n_heads", "layers", "vocab_size")
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
    words = Words(recipe, MODEL | LAYER, "")
    for key in NEEDED:
        if words.get(key) is None:
            raise ConfigError("missing", field=f"/{key}", hint=f"A recipe says at least {', '.join(NEEDED)}.")
    d_model, n_layers = words.get("d_model"), words.get("layers")
    if n_layers > MOST_LAYERS:
        raise ConfigError("more layers than any model has", field="/layers", expected=f"≤ {MOST_LAYERS}", got=n_layers)
    whole = _Layer(Words({key: value for key, value in recipe.items() if key in LAYER}, LAYER, ""), d_model)
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


def _by_layer(words: Words, recipe: Mapping[str, Any]) -> list[Words]:
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
            found.append(Words(shared | _NAMED[entry], LAYER, ""))
        else:
            own = Words(entry, LAYER, at).get("positions")
            if own is not None and read_positions(own, 2, f"{at}/positions").at_embedding:
                raise ConfigError("is one for the whole model", field=f"{at}/positions", got=own)
            found.append(Words(shared | dict(entry), LAYER, at))
    return found


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's words."""

    words: Words
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
