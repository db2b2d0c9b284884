"""What every player shares: tasks come in as lines of JSON, answers go out the same way."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any


def play(facts: Mapping[str, Any], tasks: Mapping[str, Callable[..., dict[str, Any]]], out: Any) -> None:
    """Answer until the input ends."""

    def say(value: Mapping[str, Any]) -> None:
        print(json.dumps(value), file=out, flush=True)

    say(facts)
    for line in sys.stdin:
        words = json.loads(line)
        say(tasks[words.pop("do")](**words))


def peak() -> int:
    """The most memory this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
