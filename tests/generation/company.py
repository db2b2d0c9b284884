"""A prompt alone and in a batch: whether the tokens are the same, and whether the bits are."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cutaway.generation.generate import Generation
from cutaway.generation.logits import uniform
from cutaway.model import Model
from cutaway.models import Transformer

MakePrompt: TypeAlias = Callable[[random.Random, int], list[int]]
NEAR_TIE = 1e-3
EDGE = 1e-5  # logits of a batch and of its rows differ by up to 4e-5, and running sums by a part of that


@torch.no_grad()
def uncached(model: Transformer, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids]))[0].float()


def same(model: Model, prompt: list[int], one: Generation, other: Generation, drawn: int | None = None) -> int:
    """The house's rule: the same tokens, but that a tie nearer than 1e-3 may fall either way. Gives the ties.

    Where tokens are drawn from the plain softmax (with the seed ``drawn``), a tie is a draw on the edge between two.
    """
    for place, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if a != b:
            logits = uncached(model.transformer, prompt + one.tokens[:place])[-1]
            if drawn is not None:
                edges = logits.double().softmax(-1).cumsum(-1)
                off = float((edges - uniform(drawn, 0, len(prompt) + place)).abs().min())
                assert off < EDGE, (place, one.tokens, other.tokens)
                print(f"a draw at token {place}: {off:.1e} from an edge")
                return 1
            best = logits.topk(2).values
            assert best[0] - best[1] < NEAR_TIE, (place, one.tokens, other.tokens)
            print(f"near-tie at token {place}: {float(best[0] - best[1]):.1e} apart")
            return 1
    assert len(one.tokens) == len(other.tokens)
    assert one.finish_reason == other.finish_reason
    return 0


def bits(one: Generation) -> list[tuple[int, bytes]]:
    """Each token with its log-probability, bit by bit."""
    assert one.logprobs is not None
    return [(entry.token, struct.pack("<d", entry.logprob)) for entry in one.logprobs]


@dataclass
class Count:
    """What trials found.

    Attributes:
        batches, rows, tokens: how much was compared.
        ties: rows that part at a near-tie.
        differ: tokens whose log-probability is not the same bits, up to where a row parts.
    """

    batches: int = 0
    rows: int = 0
    tokens: int = 0
    ties: int = 0
    differ: int = 0

    def __str__(self) -> str:
        return (
            f"{self.batches} batches, {self.rows} rows alone, {self.tokens} tokens: "
            f"{self.ties} near-ties, {self.differ} log-probabilities of other bits"
        )


def nonsense(model: Model) -> MakePrompt:
    """A prompt of random ids."""
    return lambda chance, n: [chance.randrange(3, model.spec.vocab_size) for _ in range(n)]


def batches(
    model: Model,
    n: int,
    *,
    deterministic: bool,
    prompt: MakePrompt,
    longest: Sequence[int] = (40,),
    alone: int = 32,
    max_tokens: int = 4,
) -> Count:
    """Batches of 1 to 32 ragged prompts, greedy and drawn in turns, against some of their rows alone.

    Args:
        deterministic: tokens and bits must be the same; otherwise the tokens must, but for near-ties.
        prompt: makes one of so many tokens.
        longest: prompts have one token to so many, in turns.
        alone: most rows of a batch that are run alone.
    """
    count, chance = Count(), random.Random(0)
    for trial in range(n):
        most = longest[trial // 2 % len(longest)]
        prompts = [prompt(chance, chance.randint(1, most)) for _ in range(chance.randint(1, 32))]
        drawn = trial if trial % 2 else None
        how: dict[str, Any] = {"temperature": 0.0 if drawn is None else 1.0, "seed": trial, "max_tokens": max_tokens}
        together = model.generate(prompts, logprobs=0, deterministic=deterministic, **how)
        for place in chance.sample(range(len(prompts)), min(alone, len(prompts))):
            single = model.generate(prompts[place], logprobs=0, deterministic=deterministic, **how)
            if deterministic:
                assert bits(single) == bits(together[place]), (trial, place)
            else:
                count.ties += same(model, prompts[place], together[place], single, drawn)
            pairs = zip(bits(single), bits(together[place]), strict=False)
            differ = [a[1] != b[1] for a, b in pairs if a[0] == b[0]]
            count.differ += sum(differ)
            count.tokens += len(single.tokens)
            count.rows += 1
        count.batches += 1
    return count
