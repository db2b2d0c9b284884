"""What a checkpoint says about making one vector of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Pool: TypeAlias = Literal["mean", "cls", "last", "max"]


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """Defaults of ``Model.embed``.

    Attributes:
        pool: the mean of the tokens' vectors, the first token's (``"cls"``), the last token's, or the largest number
            of each channel.
        normalize: whether the vector is brought to length one.
        max_length: tokens of a text that are read, those that the tokenizer adds included; None for as many as the
            model can.
        lower: whether texts are put in lower case first.
        prompts: names of texts that may be put before what is embedded, as (name, text).
        default_prompt: the name of the one that is, if any.
    """

    pool: Pool = "mean"
    normalize: bool = False
    max_length: int | None = None
    lower: bool = False
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
