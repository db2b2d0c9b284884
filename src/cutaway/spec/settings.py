"""What a checkpoint says about generating with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """Defaults that a call's own arguments override.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps every token.
        top_p: 1 keeps every token.
        eos_ids: tokens that end an answer: the union of what config, generation config and tokenizer name.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    eos_ids: tuple[int, ...] = ()
