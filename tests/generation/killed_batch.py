"""Run by test_batch_file.py in a process of its own: a batch is killed at every call that touches the disk.

One import, then a fork for each run: the child counts its calls and kills itself at one of them, within a write after
half of it. The next child goes on. Prints what it tried as JSON.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cutaway

N = 7  # prompts
CALLS = ("open", "write", "fsync", "ftruncate", "replace", "unlink")
HOW: dict[str, Any] = {"batch": 2, "max_tokens": 2, "temperature": 1.0, "seed": 3, "logprobs": 1}


def dies_at(limit: int) -> None:
    """Make this process kill itself at its ``limit``-th call."""
    count = 0

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count == limit:
                if name == "write":
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **more)

        return call

    for name in CALLS:
        setattr(os, name, wrapped(name, getattr(os, name)))


def in_a_child(work: Callable[[], object], limit: int = 0) -> bool:
    """Whether it came to its end."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            if limit:
                dies_at(limit)
            work()
            os._exit(0)
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


def main(folder: Path, work: Path) -> None:
    torch.set_num_threads(1)
    model = cutaway.load(folder)
    source, out = work / "prompts.jsonl", work / "out" / "answers.jsonl"
    source.write_text("".join(json.dumps({"prompt": "the end"[: i % 7 + 1], "id": i}) + "\n" for i in range(N)))

    def run() -> None:
        model.generate_file(source, out, **HOW)

    def clean() -> None:
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir()

    def left() -> set[str]:
        return {path.name for path in out.parent.iterdir() if not path.name.endswith(".tmp")}

    clean()
    assert in_a_child(run)
    wanted, record = out.read_bytes(), Path(f"{out}.run").read_bytes()
    points, torn, partial, limit = 0, 0, 0, 1
    while True:
        clean()
        if in_a_child(run, limit):
            break
        points += 1
        held = out.read_bytes() if out.exists() else b""
        assert wanted.startswith(held)  # whole lines, and perhaps a part of the next
        torn += not held.endswith(b"\n") and bool(held)
        partial += 0 < held.count(b"\n") < N
        assert in_a_child(run)
        assert out.read_bytes() == wanted, limit
        assert Path(f"{out}.run").read_bytes() == record
        assert left() == {"answers.jsonl", "answers.jsonl.run"}
        limit += 1
    chance, deaths = random.Random(0), 0
    for _ in range(3):  # killed again and again
        clean()
        while not in_a_child(run, chance.randint(4, limit)):
            deaths += 1
            assert wanted.startswith(out.read_bytes() if out.exists() else b"")
        assert out.read_bytes() == wanted
    print(json.dumps({"points": points, "torn": torn, "partial": partial, "deaths": deaths}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
