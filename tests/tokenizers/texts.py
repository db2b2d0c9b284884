"""Seeded random texts of every kind that has ever split a tokenizer's opinion."""

from __future__ import annotations

import random

FIXED = [
    "",
    " ",
    "  ",
    "Hello",
    " Hello",
    " Việt",
    "\n\n",
    "a\n\nb\r\n\r\nc",
    "12345",
    "3.14 and 1,000,000",
    "don't DON'T we'll I'Ve ſ'ſ it'ſ",
    "a  b   c    d" + " " * 40 + "e",
    "\t\t\tx\ty",
    "para\u2029graph\u2028line",
    "1314151",
    "a🙂 b",
    "你好",
    "e\u0301 é",
    "👩‍👩‍👧‍👦👍🏽🇩🇪",
    "\u200b\ufeff\u00a0\u3000",
    "\x00\x01\x7f",
    "ⅣⅧ ²³¼ ٣٤٥ ४५",
    "▁ ▁▁ a▁b",
    "<0x41> <0x0A>",
    "snake_case camelCase HTTPServer",
]

# First and one past the last code point, in hexadecimal.
_SCRIPTS = [
    tuple(int(end, 16) for end in span.split("-"))
    for span in """
    20-7F 20-7F 20-7F A0-180 370-400 400-500 590-600 600-700 900-980 E00-E80 10D0-1100 1E00-1F00 2000-2070 20A0-20C0
    2150-2190 3040-3100 4E00-9FFF AC00-D7A4 300-370 FF00-FFF0 1F300-1F650 1D400-1D500 20000-20100 E000-E010
    """.split()  # noqa: SIM905
]
_WORDS = """
the of and to in is that it was for on are with as his they be at one have this from or had by hot but some what
don't I'll we've it's DON'T naïve Zürich über façade Привет мир שלום مرحبا नमस्ते สวัสดี こんにちは 世界 안녕하세요
if(x==1){return;} https://a.b/c?d=e&f foo_bar FooBar 123 4567 89.01 1e-9 C++ e.g. $5.00 #tag @me <b> </b> 🙂🙃 👨‍👩‍👧
""".split()  # noqa: SIM905
_GAPS = [*("    "), "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", " " * 9, "\u00a0", "\u3000", "\n" * 5, ""]


def random_texts(count: int, seed: int = 0) -> list[str]:
    """``count`` texts, the fixed ones first."""
    rng = random.Random(seed)
    made = list(FIXED)
    while len(made) < count:
        parts = []
        for _ in range(rng.randint(1, 12)):
            kind = rng.random()
            if kind < 0.45:
                parts.append(rng.choice(_WORDS))
            elif kind < 0.6:
                low, high = rng.choice(_SCRIPTS)
                parts.append("".join(chr(rng.randrange(low, high)) for _ in range(rng.randint(1, 8))))
            elif kind < 0.7:
                parts.append("".join(rng.choice("0123456789") for _ in range(rng.randint(1, 9))))
            elif kind < 0.75:
                parts.append(rng.choice(".,;:!?-_/'\"()<>[]{}|") * rng.randint(1, 4))
            elif kind < 0.8:
                code = rng.randrange(0x110000)
                parts.append("" if 0xD800 <= code < 0xE000 else chr(code))
            parts.append(rng.choice(_GAPS))
        made.append("".join(parts))
    return made[:count]
