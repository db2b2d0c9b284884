"""What verbs say besides: names, sizes and counts as people write them. Imports nothing heavy."""

from __future__ import annotations

import sys

from cutaway.look import Cell, Look, bar, cut, safe, table, visible, width

__all__ = ["Cell", "Look", "bar", "counted", "cut", "loose", "nbytes", "rounded", "safe", "table", "visible", "width"]


def loose(pattern: str) -> str:
    """A pattern as people mean it: plain text anywhere in a name, one with wildcards at its end.

    >>> loose("attn.q"), loose("layers.1.*norm")
    ('*attn.q*', '*layers.1.*norm')
    """
    return f"*{pattern}" if any(letter in pattern for letter in "*?[") else f"*{pattern}*"


def nbytes(count: float) -> str:
    """
    >>> nbytes(98_362_432)
    '93.8 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"


def counted(count: int, thing: str) -> str:
    """
    >>> counted(1, "token"), counted(2048, "token")
    ('1 token', '2,048 tokens')
    """
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def rounded(count: int) -> str:
    """
    >>> rounded(134_515_008), rounded(576)
    ('134.5M', '576')
    """
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def look_at_stdout(*, to_file: bool = False) -> Look:
    """What standard output can show now."""
    return Look.of(sys.stdout, terminal=not to_file)
