"""What people try first, and what the error then tells them to do."""

from __future__ import annotations

from typing import Any

import pytest

from cutaway.errors import CutawayError
from cutaway.model import Model
from cutaway.tokenizers.chat import ChatTemplate
from tests.generation.test_constrain import byte_level, over


class City:
    """A class where its schema is wanted."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return over(byte_level(tmp_path_factory.mktemp("bytes")))


@pytest.mark.parametrize(
    ("call", "arguments", "options", "says"),
    [
        ("logits", ["a text"], {}, "tokenizer.encode"),
        ("score", [["one", "two"]], {}, "One text at a time"),
        ("generate", [{"role": "user", "content": "hi"}], {}, "in a list"),
        ("generate", ["x"], {"schema": City}, "model_json_schema"),
        ("generate", ["x"], {"schema": "city.json"}, "not a file's name"),
        ("generate", ["x"], {"schema": {"type": "nope"}}, "json_schema.md"),
        ("generate", ["x"], {"regex": "("}, "Rust's regex"),
        ("generate", ["x"], {"grammar": "start: foo"}, "syntax.md"),
        ("generate", ["x"], {"draft": "smollm2"}, "cutaway.load('smollm2')"),
        ("generate", ["x"], {"session": "talk.safetensors"}, "Session.load"),
        ("generate", ["x"], {"past_key_values": None}, "session"),
        ("generate", ["x"], {"max_new_tokens": 5}, "max_tokens"),
    ],
)
def test_a_hint(model: Model, call: str, arguments: list[Any], options: dict[str, Any], says: str) -> None:
    with pytest.raises(CutawayError) as caught:
        getattr(model, call)(*arguments, **options)
    assert says in (caught.value.hint or "")


def test_a_number_as_a_text_is_shown_as_one(model: Model) -> None:
    for name, value in (("temperature", "0.5"), ("max_tokens", "5"), ("deterministic", "yes")):
        with pytest.raises(CutawayError, match=f"got '{value}'"):
            model.generate("x", **{name: value})


def test_a_message_without_content() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m['role'] }}: {{ m['content'].strip() }}{% endfor %}")
    with pytest.raises(CutawayError) as caught:
        template.render([{"role": "user"}])
    assert "a role and a content" in (caught.value.hint or "")
