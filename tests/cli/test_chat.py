"""``cutaway chat``: one question, a script of lines, and a person at a terminal."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cutaway
from cutaway.cli.conversation import Conversation, Leave
from cutaway.errors import CutawayError

Call = Callable[..., Any]


def test_one_question_is_answered_through_the_template(call: Call, folder: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    wanted = cutaway.load(folder).generate(messages, max_tokens=9, temperature=0).text
    done = call("chat", "hi", "-m", folder, "-n", 9, "-t", 0)
    assert (done.code, done.out, done.err) == (0, wanted + "\n", "")
    assert call("chat", "-", "-m", folder, "-n", 9, "-t", 0, stdin=b"hi\n").out == done.out
    value = call("chat", "hi", "-m", folder, "-n", 9, "-t", 0, "--json", "--system", "be brief").json
    assert value["messages"][0] == {"role": "system", "content": "be brief"}
    assert value["messages"][2]["content"] == value["text"]
    assert value["text"] != wanted  # the system message was read


def test_lines_of_a_script_are_one_conversation(call: Call, folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    script = f"one\n\n/set temperature 0\n/set max-tokens 5\ntwo\n/save {saved}\n/exit\nthree\n"
    done = call("chat", "-m", folder, "-n", 5, "-t", 0, stdin=script.encode())
    assert done.code == 0
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert done.out == "".join(m["content"] + "\n" for m in messages if m["role"] == "assistant")
    model = cutaway.load(folder)
    assert messages[3]["content"] == model.generate(messages[:3], max_tokens=5, temperature=0).text


def test_an_error_ends_a_script_with_its_code(call: Call, folder: Path) -> None:
    done = call("chat", "-m", folder, "-n", 3, stdin=b"/nonsense\nhi\n")
    assert (done.code, done.out) == (2, "")
    assert "no such command" in done.err
    assert call("chat", "-m", folder, stdin=b"").code == 3


def test_what_chat_cannot_do(call: Call, base_folder: Path, folder: Path) -> None:
    done = call("chat", "hi", "-m", base_folder)
    assert done.code == 3
    assert "cutaway run" in done.err
    assert call("chat", "--json", "-m", folder).code == 2
    assert call("chat", "", "-m", folder, "-n", 2).code in (0, 3)


@pytest.fixture
def talk(folder: Path) -> tuple[Conversation, list[str], list[str]]:
    pieces: list[str] = []
    said: list[str] = []
    model = cutaway.load(folder)
    return Conversation(model, None, {"max_tokens": 4, "temperature": 0}, pieces.append, said.append), pieces, said


def test_commands(talk: tuple[Conversation, list[str], list[str]], tmp_path: Path) -> None:
    chat, _, said = talk
    chat.answer("one")
    first = list(chat.messages)
    chat.answer("two")
    chat.command("/undo")
    assert chat.messages == first
    assert chat.command("/retry") == "one"
    assert chat.messages == []
    chat.answer("one")
    assert chat.messages == first

    chat.command("/system be kind")
    assert chat.messages[0] == {"role": "system", "content": "be kind"}
    chat.command("/system")
    assert said[-1] == "be kind"
    chat.command(f"/save {tmp_path / 'x.json'}")
    chat.command("/clear")
    assert chat.messages == [{"role": "system", "content": "be kind"}]
    chat.command(f"/load {tmp_path / 'x.json'}")
    assert chat.messages[1:] == first
    chat.command("/system none")
    assert chat.messages == first
    for what in ("template", "info", "tokens"):
        said.clear()
        chat.command(f"/show {what}")
        assert said
    assert said[-1].endswith(" tokens")
    chat.command("/help")
    assert "/retry" in said[-1]
    said.clear()
    chat.command("/set")
    assert any(line.split() == ["max_tokens", "4"] for line in said)
    chat.command("/set top_k 3")
    chat.command("/set top_k none")
    chat.command("/set stop the end")
    said.clear()
    chat.command("/set")
    assert "'the end'" in said[-1]
    with pytest.raises(Leave):
        chat.command("/exit")


def test_what_was_said_is_not_read_again(folder: Path) -> None:
    """Not after an answer that was stopped halfway either."""
    model = cutaway.load(folder)
    model.transformer.warned_length = True

    def show(piece: str) -> None:
        if stopped:
            raise KeyboardInterrupt

    for dtype in (None, "int8"):
        options = {"max_tokens": 8, "temperature": 0, **({"kv_dtype": dtype} if dtype else {})}
        chat, stopped = Conversation(model, "be kind", dict(options), show, print), False
        before = 0
        for question in ("one", "two", "three"):
            answer = chat.answer(question)
            assert answer is not None
            assert answer.timing is not None
            # Nothing of the last question, or of what came before it.
            assert answer.timing.prompt_tokens <= answer.usage.prompt_tokens - before + 1
            before = answer.usage.prompt_tokens
            assert answer.text == model.generate(chat.messages[:-1], **options).text
            assert answer.usage.prompt_tokens == len(model.encode_prompt(chat.messages[:-1]))
        stopped = True
        assert chat.answer("four") is None
        stopped = False
        again = chat.answer("five")
        assert again is not None
        assert again.text == model.generate(chat.messages[:-1], **options).text


NONSENSE = """\
/
/undo
/retry
/set x 1
/set top_p 7
/set top_k many
/set temperature
/show
/show x
/save
/load
/load /nowhere/x
/save /nowhere/x
/hlep"""


@pytest.mark.parametrize("line", NONSENSE.splitlines())
def test_commands_that_make_no_sense_change_nothing(talk: tuple[Conversation, list[str], list[str]], line: str) -> None:
    chat, _, _ = talk
    with pytest.raises(CutawayError):
        chat.command(line)
    assert chat.messages == []
    assert chat._options == {"max_tokens": 4, "temperature": 0}


def test_files_that_are_no_conversation(talk: tuple[Conversation, list[str], list[str]], tmp_path: Path) -> None:
    chat, _, _ = talk
    for text in ("", "[]", "{}", "\xff", *(f'{{"messages": {x}}}' for x in ("3", '[{"role": "user"}]', '[["a"]]'))):
        path = tmp_path / "talk.json"
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(CutawayError):
            chat.command(f"/load {path}")


def test_ctrl_c_stops_an_answer_and_keeps_what_came(
    talk: tuple[Conversation, list[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cutaway.generation.streamed import Stream

    def pieces(self: Stream) -> str:
        if getattr(pieces, "done", False):
            raise KeyboardInterrupt
        pieces.done = True  # type: ignore[attr-defined]
        return "half"

    monkeypatch.setattr(Stream, "__next__", pieces)
    chat, _, _ = talk
    assert chat.answer("why?") is None
    assert chat.messages[-1] == {"role": "assistant", "content": "half"}


def test_a_person_at_a_terminal(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Any] = ["hi", KeyboardInterrupt(), "  ", "/nonsense", '"""two', 'lines"""', "/show tokens", EOFError()]
    prompts: list[str] = []

    def typed(prompt: str = "") -> str:
        prompts.append(prompt)
        line = lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    monkeypatch.setattr(builtins, "input", typed)
    done = call("chat", "-m", folder, "-n", 3, "-t", 0, stdin_tty=True, stdout_tty=True)
    assert done.code == 0
    assert prompts[0] == ">>> "
    assert "... " in prompts
    assert "Ctrl-D" in done.err
    assert "no such command" in done.err
    assert len(done.out.splitlines()) >= 2
