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

Layers make a decoder. There are two other kinds of model, with the same words for a layer:

::

    layers: 6            encoder_layers: 6                    an encoder–decoder: the decoder also reads the source
    source_vocab_size: 32000                                  the source's own table; left out, the two share one
    kind: encoder        layers: 6                            an encoder that guesses masked tokens; the same in other
                                                              words: ``layers: 0, encoder_layers: 6``
    types: 2                                                  … whose tokens have a type, say the first or second text
    labels: [bad, good]  pool: first                          scores of labels rather than of tokens: for the text, by
                                                              its first token, its last or the mean; for each token,
                                                              where the word is none
    pool: mean                                                no labels: one vector for a text
    head_transform: true head_bias: true                      BERT's: a matrix, curve and norm before the scores, and a
                                                              shift after; before labels, a matrix and tanh

What the paper of 2017 has is ``{norm: layer, where: post, positions: sinusoidal, activation: relu, bias: true,
embed_scale: 22.627, layers: 6, encoder_layers: 6, d_model: 512, n_heads: 8}``. An object says more of labels too:
``labels: {labels: [a, b], kind: multi}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, Literal

from cutaway.errors import ConfigError
from cutaway.spec.attention import AttentionSpec, MaskRule
from cutaway.spec.block import BlockSpec, BranchSpec
from cutaway.spec.check import MOST_LAYERS, check
from cutaway.spec.mlp import MlpSpec, MoeSpec
from cutaway.spec.model import EmbeddingSpec, ModelSpec, StackSpec
from cutaway.spec.norm import NormSpec
from cutaway.spec.recipe_head import read_head
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
        if words.get(key) is None and not (key == "layers" and words.get("encoder_layers")):
            raise ConfigError("missing", field=f"/{key}", hint=f"A recipe says at least {', '.join(NEEDED)}.")
    d_model = words.get("d_model")
    n_encoder, n_decoder = _sizes(words)
    whole = _Layer(Words({key: value for key, value in recipe.items() if key in LAYER}, LAYER, ""), d_model)
    norm, table = whole.norm, whole.positions.table(words.get("max_positions", 2048))
    layers = [_Layer(inner, d_model) for inner in _by_layer(words, recipe, max(n_encoder, n_decoder))]
    dropout, both = words.get("dropout", 0.0), bool(n_encoder and n_decoder)
    for key in ("source_vocab_size",) if not both else ("types",):
        if words.get(key) is not None:
            wanted = "an encoder and a decoder" if not both else "one stack"
            raise ConfigError("has no use here", field=f"/{key}", expected=wanted, got=words.get(key))
    embedding = EmbeddingSpec(
        scale=words.get("embed_scale", 1.0),
        positions=table,
        norm=norm if words.get("embed_norm", False) else None,
        dropout=dropout,
        types=words.get("types", 0),
    )
    # After post-norms the stream is normed already.
    last = norm if any(layer.where in ("pre", "out", "sandwich") for layer in layers) else None

    def stack(n: int, encodes: bool) -> StackSpec:
        blocks = [layer.block(dropout, encodes, crosses=both and not encodes) for layer in layers]
        return StackSpec(tuple(islice(cycle(blocks), n)), last) if n else StackSpec()

    spec = ModelSpec(
        family="cutaway",
        vocab_size=words.get("vocab_size"),
        d_model=d_model,
        max_positions=words.get("max_positions", 2048),
        embedding=embedding,
        decoder=stack(n_decoder, encodes=False),
        head=read_head(words, whole.words, whole.norm, "last" if n_decoder else "first"),
        encoder=stack(n_encoder, encodes=True),
        source=embedding if both else None,
        source_vocab_size=words.get("source_vocab_size"),
    )
    check(spec)
    return spec


def _sizes(words: Words) -> tuple[int, int]:
    """Layers of the encoder and of the decoder."""
    n, n_encoder = words.get("layers", 0), words.get("encoder_layers", 0)
    for key, value in (("layers", n), ("encoder_layers", n_encoder)):
        if value > MOST_LAYERS:
            what, most = "more layers than any model has", f"≤ {MOST_LAYERS}"
            raise ConfigError(what, field=f"/{key}", expected=most, got=value)
    if not n and not n_encoder:
        raise ConfigError("a model has layers", field="/layers", expected="a whole number > 0", got=n)
    match words.get("kind"):
        case "encoder" if n and n_encoder:
            raise ConfigError("says that there is no decoder", field="/kind", expected="layers: 0", got="encoder")
        case "encoder":
            return n or n_encoder, 0
        case "decoder" if n_encoder:
            raise ConfigError(
                "says that there is no encoder", field="/kind", expected="encoder_layers: 0", got="decoder"
            )
        case _:
            return n_encoder, n


def _by_layer(words: Words, recipe: Mapping[str, Any], most: int) -> list[Words]:
    """The recipe of each entry of the pattern: the whole one's words under the entry's own.

    ``most`` is how many layers the larger stack has.
    """
    shared = {key: value for key, value in recipe.items() if key in LAYER}
    pattern = words.get("pattern", ["local"])
    if len(pattern) > most:
        raise ConfigError("longer than there are layers", field="/pattern", expected=most, got=pattern)
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
        return self._positions(not self.words.get("causal", True))

    def _positions(self, both_ways: bool) -> Positions:
        value = self.words.get("positions", "rotary")
        return read_positions(value, self.d_head, f"{self.words.at}/positions", both_ways)

    def block(self, dropout: float, encodes: bool = False, crosses: bool = False) -> BlockSpec:
        """The layer as a spec.

        Args:
            dropout: everywhere.
            encodes: whether a token reads those after it, whatever else is said.
            crosses: whether it reads a source.
        """
        w, norm, where = self.words, self.norm, self.where
        parallel, shared = w.get("parallel", False), w.get("shared_norm", False)
        before, on_output = where in ("pre", "sandwich"), where in ("out", "sandwich")
        moe = self._experts()
        bodies: dict[str, AttentionSpec | MlpSpec | MoeSpec] = {"attn": self._attention(dropout, encodes)}
        if crosses:
            bodies["cross"] = _crossing(self._attention(dropout, encodes))
        bodies["mlp" if moe is None else "moe"] = moe or self._mlp()
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

    def _attention(self, dropout: float, encodes: bool) -> AttentionSpec:
        w = self.words
        causal = w.get("causal", True) and not encodes
        positions = self._positions(not causal)
        bias, over = w.get("bias", False), w.get("qk_norm", "none")
        n_heads = w.get("n_heads")
        return AttentionSpec(
            n_heads,
            w.get("n_kv_heads", n_heads),
            self.d_head,
            mask=MaskRule(causal, w.get("window"), w.get("chunk"), w.get("prefix", False) and not encodes),
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


def _crossing(spec: AttentionSpec) -> AttentionSpec:
    """The attention to a source that goes with an attention to the text itself: all of it, from no distance."""
    return replace(spec, mask=MaskRule(causal=False), rotary=None, bias=None, relative=None, cross=True)
