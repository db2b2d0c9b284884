"""Twenty varied prompts of 1 to about 700 tokens: prose, code, digits, other scripts, emoji, nonsense."""

from __future__ import annotations

LONG = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families, that he is considered as the rightful property "
    "of some one or other of their daughters. "
)
PROMPTS = [
    "A",
    "The",
    "The Eiffel Tower is in",
    "The cow says",
    "2 + 2 =",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "import numpy as np\n\nx = np.linspace(0, 1, 100)\n",
    "Liste de courses : du pain, du fromage,",
    "Das Wetter in Berlin ist heute",
    "東京は日本の",
    "Москва — столица",
    "😀😃😄 emoji are",
    "1234567890 9876543210 3.14159 0x7f",
    "   leading spaces and\n\n\nblank lines\t\ttabs",
    '{"name": "Ada", "age": 36, "languages": ["English", "French"], "email":',
    "Q: What is the capital of Australia?\nA:",
    LONG * 3 + "Mr. Bennet",
    LONG * 7 + "The family",
    LONG * 9 + "It was then that",
]
