"""From scores to the next token: each step a pure function on logits. [rows, vocab] → the same

The order is transformers': penalties and biases, the rules of ``rules.py``, the form of the answer
(``constrain.py``), then temperature, top-k, top-p, min-p; or these three first, where a call says ``temperature_last``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

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
        index = torch.tensor(list(set(ids)), dtype=torch.long, device=logits.device)
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
    """Sharpen (< 1) or flatten (> 1). The best is moved to 0 first, in fp64, so that no division overflows."""
    x = logits.double()
    return ((x - x.amax(-1, keepdim=True)) / value).float()


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k best, and what ties with the last of them."""
    if k >= logits.shape[1]:
        return logits
    last = logits.topk(k).values[:, -1:]
    return logits.masked_fill(logits < last, NEVER)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest tokens whose probabilities reach p, at least one (Holtzman et al. 2020)."""
    if p >= 1:
        return logits
    out = torch.full_like(logits, NEVER)
    for row, probabilities in enumerate(logits.softmax(-1)):
        # Those below an equal share of 1 − p go in any case; mostly so few are left that sorting them costs nothing.
        index = (probabilities > 0.999 * (1 - p) / len(probabilities)).nonzero()[:, 0]
        # By logits, of which two may have one probability; of equals, the first is kept.
        place = logits[row, index].argsort(descending=True, stable=True)
        ordered = probabilities[index][place].double()
        before = ordered.cumsum(0) - ordered
        kept = index[place[: max(1, int((before < p).sum()))]]
        out[row, kept] = logits[row, kept]
    return out


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens at least p times as likely as the best (Nguyen et al. 2024)."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), NEVER)


def greedy(logits: Tensor) -> list[int]:
    """The best token of each row; of equals, the first."""
    x = logits.detach()
    if _light(x):
        return [int(row.argmax()) for row in x.numpy()]
    best: list[int] = x.argmax(-1).tolist()
    return best


def _light(logits: Tensor) -> bool:
    """Whether numpy can look through them: several times as fast as PyTorch, and the code for it is smaller.

    Between two steps little of it is in the processor's caches, which the weights have just gone through.
    """
    return logits.device.type == "cpu" and logits.dtype is torch.float32


def highest(logits: Tensor) -> list[float]:
    """The best score of each row; NaN where there is one."""
    x = logits.detach()
    if _light(x):
        return [float(row[row.argmax()]) for row in x.numpy()]
    best: list[float] = x.amax(-1).tolist()
    return best


def sample(logits: Tensor, keys: Sequence[tuple[int, int, int]]) -> list[int]:
    """Draw one token a row from the softmax.

    Args:
        logits: [rows, vocab]
        keys: each row's (seed, choice, position): the draw depends on these and on the row's own logits,
            not on its neighbours.
    """
    sums = logits.double().softmax(-1).cpu().cumsum(-1)
    total = sums[:, -1:].contiguous()
    u = torch.tensor([[uniform(*key)] for key in keys], dtype=torch.float64)
    # Where the running sum first exceeds u, but never past the last token that has a probability.
    place = torch.searchsorted(sums, u * total, right=True)
    last = torch.searchsorted(sums, total)
    out: list[int] = torch.minimum(place, last)[:, 0].tolist()
    return out


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that is a function of its arguments (Philox, Salmon et al. 2011)."""
    bits = np.random.Philox(key=np.array([seed & (2**64 - 1), choice], dtype=np.uint64), counter=position)
    return (int(bits.random_raw()) >> 11) * 2.0**-53


def check_finite(logits: Tensor, changed: bool = False, dead_ends: bool = False) -> None:
    """Refuse logits that no token can be chosen from.

    Args:
        logits: [rows, vocab]
        changed: whether penalties, biases and rules were applied to what the model said.
        dead_ends: a row may have nothing but −inf.

    Raises:
        RequestError: a row has NaN or +inf, or nothing but −inf.
    """
    best = highest(logits)
    if not all(isfinite(x) or (dead_ends and x == NEVER) for x in best):
        if changed and NEVER in best:
            raise RequestError("what is forbidden, suppressed and forced leaves no token to choose")
        if changed:
            raise RequestError("penalties and biases so large leave no token to choose", field="logit_bias")
        raise RequestError(
            "the model's logits hold NaN or infinity, so no token can be chosen",
            hint="Check the weights for NaN or infinity (`cutaway show MODEL TENSOR`), or use float32.",
        )
