"""One list of options: its names, types and documentation reach every place that shows them."""

from __future__ import annotations

import inspect
import re

import pytest

from cutaway.errors import RequestError
from cutaway.generation.options import DEFAULTS, Options
from cutaway.generation.params import resolve
from cutaway.model import Model
from cutaway.spec import GenerationSettings

# What programs outside this repository call: see "Public contract" in the design.
CONTRACT = [
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "stop",
    "seed",
    "n",
    "num_beams",
    "logprobs",
    "schema",
    "deterministic",
]


def test_help_lists_every_option() -> None:
    """In the signature with its default, and in the text with its meaning."""
    for method in (Model.generate, Model.stream):
        parameters = inspect.signature(method).parameters
        assert set(Options.__annotations__) <= set(parameters)
        assert parameters["max_tokens"].default == "auto"
        assert parameters["n"].default == 1
        assert parameters["temperature_last"].default is False
        assert parameters["deterministic"].default is False
        assert {parameters[name].default for name in Options.__annotations__ if name not in DEFAULTS} == {None}
    text = inspect.getdoc(Model.generate) or ""
    for name in Options.__annotations__:
        assert re.search(rf"^ {{4}}(\w+, )*{name}(, \w+)*: ", text, re.M), name
    assert "**options" not in text
    assert set(CONTRACT) <= set(Options.__annotations__)


def test_an_option_that_there_is_not() -> None:
    for name, hint in (("temprature", "temperature"), ("max_new_tokens", "max_tokens"), ("zzz", None)):
        with pytest.raises(RequestError) as caught:
            resolve(GenerationSettings(), 10, **{name: 1})  # type: ignore[misc]
        assert caught.value.field == name
        assert (hint or "") in (caught.value.hint or "")
