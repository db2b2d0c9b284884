"""From scores to the next token: each step a pure function on logits. [rows, vocab] → the same

The order is transformers': penalties and biases, then temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cutaway.errors import RequestError

NEVER = float("-inf")


def repetition_penalty(logits: Tensor, seen: Sequence[Sequence[int]], penalty: float) -> Tensor:
    """Make tokens already seen, the prompt's among them, less likely: divide what is positive, multiply what is not.

    How often a token was seen does not matter (Keskar et al. 2019).
    """
    out = logits.clone()
    for row, ids in enumerate(seen):
        index = torch.tensor(sorted(set(ids)), dtype=torch.long, device=logits.device)
        scores = logits[row, index]
        out[row, index] = torch.where(scores > 0, scores / penalty, scores * penalty)
    return out


def count_penalties(logits: Tensor, produced: Sequence[Sequence[int]], frequency: float, presence: float) -> Tensor:
    """Take off ``frequency`` for each time, and ``presence`` once, that a token was produced (not the prompt's)."""
    counts = torch.zeros_like(logits)
    for row, ids in enumerate(produced):
        index = torch.tensor(ids, dtype=torch.long, device=logits.device)
        counts[row] = torch.bincount(index, minlength=logits.shape[1]).to(logits.dtype)
    return logits - frequency * counts - presence * (counts > 0)


def logit_bias(logits: Tensor, bias: Mapping[int, float]) -> Tensor:
    """Add a constant to some tokens."""
    out = logits.clone()
    index = torch.tensor(list(bias), dtype=torch.long, device=logits.device)
    out[:, index] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
    return out


def temperature(logits: Tensor, value: float) -> Tensor:
    """Sharpen (< 1) or flatten (> 1)."""
    return logits / value


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k best, and what ties with the last of them."""
    if k >= logits.shape[1]:
        return logits
    last = logits.topk(k).values[:, -1:]
    return logits.masked_fill(logits < last, NEVER)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest tokens whose probabilities reach p, at least one (Holtzman et al. 2020)."""
    ordered, index = logits.sort(dim=-1)  # the least likely first
    drop = ordered.softmax(-1).cumsum(-1) <= 1 - p
    drop[:, -1] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(1, index, drop), NEVER)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens at least p times as likely as the best (Nguyen et al. 2024)."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), NEVER)


def greedy(logits: Tensor) -> list[int]:
    """The best token of each row; of equals, the first."""
    out: list[int] = logits.argmax(-1).tolist()
    return out


def sample(logits: Tensor, keys: Sequence[tuple[int, int, int]]) -> list[int]:
    """Draw one token a row from the softmax.

    Args:
        logits: [rows, vocab]
        keys: each row's (seed, choice, position): the draw depends on these and on the row's own logits,
            not on its neighbours.
    """
    probabilities = logits.double().softmax(-1).cpu().numpy()
    return [int(_draw(row, uniform(*key))) for row, key in zip(probabilities, keys, strict=True)]


def _draw(probabilities: np.ndarray[tuple[int], np.dtype[np.float64]], u: float) -> int:
    # Where the running sum first exceeds u; what has no probability is never chosen.
    sums = np.cumsum(probabilities)
    return int(np.searchsorted(sums, u * sums[-1], side="right").clip(max=np.flatnonzero(probabilities)[-1]))


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that is a function of its arguments (Philox, Salmon et al. 2011)."""
    bits = np.random.Philox(key=np.array([seed & (2**64 - 1), choice], dtype=np.uint64), counter=position)
    return float(np.random.Generator(bits).random())


def check_finite(logits: Tensor) -> None:
    """Refuse logits that no token can be chosen from.

    Raises:
        RequestError: a row has NaN or +inf, or nothing but −inf.
    """
    best = logits.amax(-1)
    if not bool(torch.isfinite(best).all()) or bool(logits.isnan().any()):
        raise RequestError(
            "the model's logits hold NaN or infinity, so no token can be chosen",
            hint="Check the weights for NaN or infinity (`cutaway show MODEL TENSOR`), or use float32.",
        )
