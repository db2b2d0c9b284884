"""What somebody may have meant who wrote an option that there is not."""

from __future__ import annotations

import click

__all__ = ["nearest_options"]

# What other programs call some of our options; an empty word where it is the argument here.
_ELSEWHERE = {
    "--n-predict": "--max-tokens",
    "--num-predict": "--max-tokens",
    "--max-length": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "--beams": "--num-beams",
    "--beam-size": "--num-beams",
    "--num-return-sequences": "--answers",
    "--best-of": "--answers",
    "--system-prompt": "--system",
    "--prompt": "",
    "--text": "",
}


def nearest_options(name: str, command: click.Command) -> list[str]:
    """Options of a command that are written nearly like ``name``, best first.

    >>> nearest_options("--max_new_tokens", click.Command("x", params=[click.Option(["-n", "--max-tokens"])]))
    ['--max-tokens']
    """
    import difflib

    options = (param for param in command.params if isinstance(param, click.Option))
    there = [word for option in options for word in option.opts if word.startswith("--")] + ["--help"]
    plain = name.lower().replace("_", "-")
    if plain in _ELSEWHERE:
        return [word for word in (_ELSEWHERE[plain],) if word in there]
    return [plain] if plain in there else difflib.get_close_matches(plain, there, n=2, cutoff=0.6)
