"""SentencePiece's BPE as a list of merges.

SentencePiece joins, again and again, the two neighbours whose union is the piece with the best
score, the leftmost first. That is BPE over all ways of cutting a piece in two, ranked by the
score of the piece (Kudo & Richardson 2018, https://arxiv.org/abs/1808.06226). Of two cuts of
one piece, the longer left half ranks first, as in the published tokenizer.json files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["merges_from_scores", "scores_from_merges"]


def merges_from_scores(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All merges among the pieces ``ids``, best first; ``scores`` is indexed by id.

    Only pieces that text may become belong in ``ids``: a merge that makes a control token would
    let people type it.

    >>> merges_from_scores({"a": 0, "b": 1, "ab": 2, "aba": 3}, [0.0, 0.0, -2.0, -1.0])
    [('ab', 'a'), ('a', 'b')]
    """
    found: list[tuple[float, int, str, str]] = []
    for piece, index in ids.items():
        score = -scores[index]
        for cut in range(len(piece) - 1, 0, -1):
            left = piece[:cut]
            if left in ids and (right := piece[cut:]) in ids:
                found.append((score, -cut, left, right))
    found.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in found]


def scores_from_merges(ids: Mapping[str, int], merges: Sequence[tuple[str, str]], size: int) -> list[float]:
    """Scores that give these merges, if any do: 0 for the best pieces, then −1, −2, …

    A piece's merges stand together in the list; those of pieces with one score may be mixed.

    Args:
        ids: pieces that text may become.
        merges: best first.
        size: how many scores; what is not in ``ids`` gets 0.

    >>> scores_from_merges({"a": 0, "b": 1, "ab": 2, "aba": 3}, [("ab", "a"), ("a", "b")], 4)
    [-2.0, -2.0, -1.0, 0.0]
    """
    last = {left + right: rank for rank, (left, right) in enumerate(merges)}
    score, end = 0.0, -1
    found: dict[str, float] = {}
    for rank, (left, right) in enumerate(merges):
        piece = left + right
        if rank > end and rank:
            score -= 1
        end = max(end, last[piece])
        found[piece] = score
    scores = [0.0] * size
    worst = score - 1 if merges else 0.0
    for piece, index in ids.items():
        scores[index] = found.get(piece, worst)
    return scores
