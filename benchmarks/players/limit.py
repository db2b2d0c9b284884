"""The machine itself: how fast a large buffer is read and a large matrix multiplied, in the same rounds as the rest."""

from __future__ import annotations

import time
from typing import Any

from stage import THREADS, outlet, play

out = outlet()
import torch  # noqa: E402

torch.set_num_threads(THREADS)
buffer = torch.ones(1 << 28)  # 1 GiB, far more than any cache holds
square = torch.ones(2048, 2048)


def best(call: Any) -> float:
    """Seconds, the least of three: what it can do, not what its neighbours let it."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def limits(**_: Any) -> dict[str, Any]:
    """Bytes and operations a second."""
    return {
        "bytes_per_s": buffer.nbytes / best(buffer.amax),
        "operations_per_s": 2 * 2048**3 / best(lambda: square @ square),
    }


tasks = dict.fromkeys(("decode", "prefill", "embed", "limits"), limits)
play({"version": f"torch {torch.__version__}"}, tasks, out)
