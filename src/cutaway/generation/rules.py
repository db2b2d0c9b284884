"""Rules about which token may come next: each a pure function on logits. [rows, vocab] → the same

They ban (−inf) or force (0, everything else −inf), and are those of transformers' ``logits_process``, in its order.
Lengths count a text as the decoder holds it: prompt and answer, or an encoder–decoder's start token and answer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cutaway.generation.logits import NEVER


def no_repeat_ngram(logits: Tensor, texts: Sequence[Sequence[int]], n: int) -> Tensor:
    """Ban what would complete an n-gram that the text has already (Paulus et al. 2017)."""
    banned: list[list[int]] = []
    for text in texts:
        ids = list(text)
        end = ids[len(ids) - n + 1 :] if len(ids) >= n else []  # n − 1 tokens, which the next would complete
        starts = range(len(ids) - n + 1)
        banned.append([ids[i + n - 1] for i in starts if ids[i : i + n - 1] == end])
    return _ban_each(logits, banned)


def bad_words(logits: Tensor, texts: Sequence[Sequence[int]], words: Sequence[Sequence[int]]) -> Tensor:
    """Ban each word's last token where the text ends with the rest of it."""
    return _ban_each(
        logits,
        [[word[-1] for word in words if list(text[len(text) - len(word) + 1 :]) == list(word[:-1])] for text in texts],
    )


def ban(logits: Tensor, ids: Collection[int], where: Sequence[bool]) -> Tensor:
    """Ban tokens in the rows where that holds."""
    return _ban_each(logits, [list(ids) if here else [] for here in where])


def force(logits: Tensor, ids: Collection[int], where: Sequence[bool]) -> Tensor:
    """Leave only these tokens, at 0, in the rows where that holds."""
    rows = torch.tensor(where, device=logits.device)[:, None]
    only = torch.full_like(logits[:1], NEVER)
    only[:, list(ids)] = 0
    return torch.where(rows, only, logits)


def _ban_each(logits: Tensor, banned: Sequence[Sequence[int]]) -> Tensor:
    """Ban each row's own tokens."""
    rows = [row for row, ids in enumerate(banned) for _ in ids]
    if not rows:
        return logits
    tokens = [token for ids in banned for token in ids]
    if logits.device.type == "cpu" and logits.dtype is torch.float32 and not logits.requires_grad:  # see logits.greedy
        array = logits.numpy().copy()
        array[rows, tokens] = NEVER
        return torch.from_numpy(array)
    out = logits.clone()
    out[rows, tokens] = NEVER
    return out


@dataclass(frozen=True, slots=True)
class Rules:
    """Which rules hold in a call.

    Attributes:
        no_repeat_ngram_size: no n-gram twice; 0 for no such rule.
        bad_words: token sequences that never come; one that is only an end token is left out, as in transformers.
        min_length: no end token before the text, prompt included, is that long.
        min_tokens: nor before the answer is.
        forced_bos_id: the first token of all, after a prompt of one token.
        forced_eos_ids: the only tokens to choose from where the answer may have no more than one.
        suppress_ids, begin_suppress_ids: tokens that never come; that are not the first of an answer.
    """

    no_repeat_ngram_size: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_length: int = 0
    min_tokens: int = 0
    forced_bos_id: int | None = None
    forced_eos_ids: tuple[int, ...] = ()
    suppress_ids: tuple[int, ...] = ()
    begin_suppress_ids: tuple[int, ...] = ()

    def apply(
        self,
        logits: Tensor,
        prompts: Sequence[Sequence[int]],
        produced: Sequence[Sequence[int]],
        rooms: Sequence[int | None],
        ends: Collection[int],
    ) -> Tensor:
        """Logits as the rules leave them. [rows, vocab] → the same

        Args:
            prompts, produced: each row's tokens so far.
            rooms: most tokens that a row's answer may have; None where nobody says.
            ends: tokens that end an answer.
        """
        x, begun = logits, [len(p) for p in prompts]
        lengths = [len(p) + len(q) for p, q in zip(prompts, produced, strict=True)]
        if self.no_repeat_ngram_size or self.bad_words:
            texts = [[*p, *q] for p, q in zip(prompts, produced, strict=True)]
            if self.no_repeat_ngram_size:
                x = no_repeat_ngram(x, texts, self.no_repeat_ngram_size)
            x = bad_words(x, texts, [word for word in self.bad_words if not (len(word) == 1 and word[0] in ends)])
        if self.min_length or self.min_tokens:
            early = [n < self.min_length or len(q) < self.min_tokens for n, q in zip(lengths, produced, strict=True)]
            x = ban(x, ends, early)
        if self.forced_bos_id is not None:
            x = force(x, (self.forced_bos_id,), [n == 1 for n in lengths])
        if self.forced_eos_ids:
            last = [len(q) + 1 == room for q, room in zip(produced, rooms, strict=True)]
            x = force(x, self.forced_eos_ids, last)
        if self.suppress_ids:
            x = ban(x, self.suppress_ids, [True] * len(lengths))
        if self.begin_suppress_ids:
            # After a lone start token the first is the forced one, and the answer begins with the second.
            later = self.forced_bos_id is not None
            first = [n == b + (later and b == 1) for n, b in zip(lengths, begun, strict=True)]
            x = ban(x, self.begin_suppress_ids, first)
        return x
