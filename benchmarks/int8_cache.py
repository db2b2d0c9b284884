"""What keys and values in eight bits cost: log-probability of a text, token by token, against a plain cache.

python benchmarks/int8_cache.py [MODEL] [TEXT FILE] [TOKENS]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import cutaway
from cutaway.generation.passes import CHUNK

ROOT = Path(__file__).parents[1]


@torch.no_grad()
def logits(model: cutaway.Model, ids: torch.Tensor, kv_dtype: str | None) -> tuple[torch.Tensor, int]:
    """After each token of a text that is read in pieces, and the bytes of the cache. [query, vocab]"""
    cache = model.transformer.new_cache(1, ids.shape[1], kv_dtype=kv_dtype)
    parts = [model.transformer(part, cache=cache)[0] for part in ids.split(CHUNK // 4, 1)]
    return torch.cat(parts), cache.nbytes


def main() -> None:
    """Print the cost."""
    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    path = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs/architecture.md"
    most = int(sys.argv[3]) if len(sys.argv) > 3 else 1024
    model = cutaway.load(name)
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode(path.read_text())[:most]])
    (exact, bytes_exact), (small, bytes_small) = (logits(model, ids, kind) for kind in (None, "int8"))
    both = [x[:-1].log_softmax(-1) for x in (exact, small)]
    one, two = (x.gather(1, ids[0, 1:, None])[:, 0] for x in both)
    moved = (one - two).abs()
    same = (exact.argmax(-1) == small.argmax(-1)).float().mean()
    divergence = (both[0].exp() * (both[0] - both[1])).sum(-1)
    print(f"{name}, {ids.shape[1]} tokens of {path.name}; cache {bytes_exact:,} → {bytes_small:,} bytes")
    print(
        f"mean log-probability of a token   {one.mean():.5f} → {two.mean():.5f}  (cost {one.mean() - two.mean():+.5f})"
    )
    print(f"it moves by (mean, 99%, most)     {moved.mean():.5f}  {moved.quantile(0.99):.5f}  {moved.max():.5f}")
    print(f"Kullback–Leibler divergence       {divergence.mean():.6f} nats a token, at most {divergence.max():.5f}")
    print(f"the same likeliest token          {100 * same:.2f} %")


if __name__ == "__main__":
    main()
