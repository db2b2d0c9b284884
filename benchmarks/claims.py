"""What is to be shown: each row, whom ours is measured beside, and how far it is to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# How a claim is reckoned → its sign, and whether more is better.
KINDS = {"times": "≥", "at most": "≤", "share": "≥", "first": "≤"}


@dataclass(frozen=True)
class Claim:
    """One line of the table.

    Attributes:
        row: what is measured.
        result: the file in ``results`` that it is read from.
        peer: whom ours is compared with.
        reach: the ratio asked for.
        kind: ``times``: how many times as fast as the peer, or as short. ``at most``: of what the peer takes.
            ``share``: of what the memory could read. ``first``: of the time of `import torch` and 1.5 times the peer's.
        mine: ours, where there are several.
    """

    row: str
    result: str
    peer: str
    reach: float
    kind: str = "times"
    mine: str = "cutaway"

    def ratios(self, result: Mapping[str, Any]) -> list[float]:
        """Round by round."""
        values = result["values"]
        if self.kind == "share":
            return list(result["limit"]["shares"])
        rounds = list(zip(values[self.mine], values[self.peer], strict=True))
        if self.kind == "first":
            imports = values["import torch"]
            return [a / (torch + 1.5 * b) for (a, b), torch in zip(rounds, imports, strict=True)]
        rate = result["unit"].endswith("/s")
        return [a / b if rate or self.kind == "at most" else b / a for a, b in rounds]

    def met(self, ratio: float) -> bool:
        """Whether a median reaches it."""
        return ratio >= self.reach if KINDS[self.kind] == "≥" else ratio <= self.reach


CLAIMS = (
    Claim("decode, SmolLM2 Q4_1 file", "decode-q4_1", "llama.cpp", 1.25),
    Claim("decode, Q8_0", "decode-q8_0", "llama.cpp", 1.3),
    Claim("decode, F16", "decode-f16", "llama.cpp", 1.1),
    Claim("decode, fp32", "decode-f32", "llama.cpp", 1.0),
    Claim("decode, fp32", "decode-f32", "transformers", 3.0),
    Claim("decode, fp32", "decode-f32", "the memory", 0.8, "share"),
    Claim("decode, Gemma 3 270M Q4_K_M file", "decode-gemma", "llama.cpp", 1.1),
    Claim("prefill 512, Q4_1", "prefill-q4_1", "llama.cpp", 1.5),
    Claim("prefill 512, Q8_0", "prefill-q8_0", "llama.cpp", 1.2),
    Claim("prefill 512, exact beside int8", "prefill-exact", "CTranslate2 int8", 0.7),
    Claim("prefill 512, int8 mode", "prefill-int8", "CTranslate2 int8", 1.0),
    Claim("batch of 8, decode, Q8_0", "batch-q8_0-8", "CTranslate2 int8", 1.0),
    Claim("batch of 32, decode, Q8_0", "batch-q8_0-32", "CTranslate2 int8", 1.0),
    Claim("batch of 8, decode, int8 mode", "batch-int8-8", "CTranslate2 int8", 1.0),
    Claim("batch of 32, decode, int8 mode", "batch-int8-32", "CTranslate2 int8", 1.0),
    Claim("batch of 8, decode, fp32", "batch-f32-8", "transformers", 3.0),
    Claim("batch of 32, decode, fp32", "batch-f32-32", "transformers", 2.0),
    Claim("batch of 8, decode, Q8_0", "batch-q8_0-8", "llama.cpp", 1.0),
    Claim("batch of 32, decode, Q8_0", "batch-q8_0-32", "llama.cpp", 1.0),
    Claim("batch of 8, decode, Q4_1", "batch-q4_1-8", "llama.cpp", 1.0),
    Claim("batch of 32, decode, Q4_1", "batch-q4_1-32", "llama.cpp", 1.0),
    Claim("first token of a cold process, Q4_1 file", "first-token", "llama.cpp", 1.0, "first"),
    Claim("first token of a cold process, Q4_1 file", "first-token", "transformers", 8.0),
    Claim("MiniLM, 1,000 sentences of 16 tokens", "encode-short", "sentence-transformers", 1.4),
    Claim("MiniLM, 1,000 sentences of 16 tokens", "encode-short", "ONNX Runtime", 1.2),
    Claim("MiniLM, 200 texts of 256 tokens", "encode-long", "sentence-transformers", 1.05),
    Claim("MiniLM, 200 texts of 256 tokens", "encode-long", "ONNX Runtime", 1.05),
    Claim("memory, 2,048 tokens, without imports and weights", "memory", "llama.cpp", 1.5, "at most"),
    Claim("deterministic mode, one stream, Q4_1", "deterministic-q4_1", "cutaway", 0.9, mine="deterministic"),
)
