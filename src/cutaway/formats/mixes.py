"""Which type each matrix of a quantized model gets: one for all of them, or one of llama.cpp's mixes.

A type's name alone means that type for every matrix (``llama-quantize --pure``). The mixes give the matrices that
suffer most more bits, as ``llama_tensor_get_type_impl`` does:
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-quant.cpp
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from cutaway.errors import RequestError
from cutaway.formats.quantise import QUANTISED
from cutaway.formats.quants import BLOCK_TYPES, BlockType
from cutaway.spec import HeadSpec, ModelSpec, MoeSpec

# llama.cpp's number for a file mostly of one type (general.file_type).
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32}
FILE_TYPES |= {"Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18}
FILE_TYPES |= {"Q4_K": 15, "Q5_K": 17}  # there is no number for one type alone
MIXES = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q5_K_S")
PLAIN = ("F16", "BF16", "F32")
_ALIASES = {"FP32": "F32", "FLOAT32": "F32", "FP16": "F16", "FLOAT16": "F16", "BFLOAT16": "BF16", "Q8": "Q8_0"}
_DEEP = 80  # layers from which on llama.cpp takes a model with shared keys for its 70B
_EIGHT = 8  # experts of a model whose attention is so small a part of it that more bits there cost little


@dataclass(frozen=True, slots=True)
class Mix:
    """What the matrices of a file become.

    Attributes:
        name: in capitals, as llama.cpp has it.
        base: the type of most of them.
    """

    name: str
    base: BlockType

    @property
    def file_type(self) -> int:
        """What a GGUF says of itself."""
        return FILE_TYPES[self.name]

    def type_of(self, ours: Iterable[str], spec: ModelSpec) -> BlockType:
        """The type of a matrix that holds these of the model's parameters, whatever its width."""
        if self.name not in MIXES:
            return self.base
        found = {self._one(name, spec) for name in ours}
        return BLOCK_TYPES[max(found)]  # q·k·v in one matrix are treated as v is; a later name has more bits

    def _one(self, name: str, spec: ModelSpec) -> str:
        tied = isinstance(spec.head, HeadSpec) and spec.head.tied
        if name == "head.weight" or (tied and name == "embed.tokens"):
            return "Q6_K"
        stack, _, rest = name.partition(".layers.")
        if stack not in spec.stacks:
            return self.base.name
        i, n = int(rest.partition(".")[0]), len(spec.stacks[stack].layers)
        more = i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
        medium = self.name.endswith("_M")
        if _has_eight(spec) and (kind := _beside_eight(name, self.base)) is not None:
            return kind
        if name.endswith(".v.weight"):
            if medium and more:
                return "Q6_K"
            attention = spec.stacks[stack].layers[i].attention
            shared = n == _DEEP and attention.n_kv_heads < attention.n_heads
            return "Q5_K" if shared or (self.name == "Q4_K_S" and i < 4) else self.base.name
        if name.endswith((".mlp.body.down.weight", ".moe.body.down")):
            if medium and more:
                return "Q6_K"
            return "Q5_K" if self.name == "Q4_K_S" and i < n // 8 else self.base.name
        return self.base.name


def _has_eight(spec: ModelSpec) -> bool:
    bodies = (branch.body for stack in spec.stacks.values() for layer in stack.layers for branch in layer.branches)
    return any(isinstance(body, MoeSpec) and body.n_experts == _EIGHT for body in bodies)


def _beside_eight(name: str, base: BlockType) -> str | None:
    """What llama.cpp gives attention's matrices in a mix of a model with eight experts (it means Mixtral)."""
    if name.endswith((".attn.body.k.weight", ".attn.body.v.weight")):
        return "Q8_0"
    return "Q5_K" if name.endswith(".attn.body.out.weight") and base.name == "Q4_K" else None


def mix_named(name: object, *, field: str = "quantize") -> Mix:
    """A type or mix by its name, in any case: ``q8_0``, ``Q4_K_M``, ``f16``.

    Raises:
        RequestError: there is none, or none that is written.
    """
    wanted = [*MIXES, *QUANTISED, *PLAIN]
    word = name.upper().replace("-", "_") if isinstance(name, str) else ""
    word = _ALIASES.get(word, word)
    if word not in wanted:
        near = difflib.get_close_matches(word, wanted, n=2, cutoff=0.6)
        hint = f"did you mean {' or '.join(near).lower()}?" if near else None
        raise RequestError("no such type", field=field, expected=", ".join(wanted).lower(), got=name, hint=hint)
    return Mix(word, BLOCK_TYPES[word.removesuffix("_M").removesuffix("_S")])


def file_type(types: Iterable[tuple[BlockType, int]]) -> int:
    """What a GGUF says of itself where nobody asked for a type: the one that most of its matrices' numbers have."""
    counts: dict[str, int] = {}
    for kind, numbers in types:
        counts[kind.name] = counts.get(kind.name, 0) + numbers
    most = max(counts, key=lambda name: counts[name], default="F32")
    return FILE_TYPES.get(most, FILE_TYPES["F32"])
