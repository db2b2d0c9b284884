"""A conversation: its messages, its settings, and the commands that begin with a slash. Knows no terminal."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cutaway.cli.sampling import stream
from cutaway.cli.text import counted, look_at_stdout, visible
from cutaway.errors import ConfigError, RequestError
from cutaway.formats.strict_json import to_json

if TYPE_CHECKING:
    from cutaway.generation.generate import Generation
    from cutaway.generation.session import Session
    from cutaway.model import Model

HELP = """\
/help                        this
/system [TEXT]               show or set the system message; /system none removes it
/set [NAME VALUE]            list the settings, or change one: /set temperature 0.7, /set temperature none
/show template|info|tokens   the chat template; the model; the conversation as the model reads it
/undo                        forget the last question and its answer
/retry                       answer the last question again
/save FILE    /load FILE     keep the conversation, or go on with one
/clear                       forget everything but the system message
/exit                        leave (so does Ctrl-D; Ctrl-C stops an answer)
A text over several lines goes between two lines of three double quotes."""

_NUMBERS: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "max_tokens": int,
    "seed": int,
}
COMMANDS = ("help", "system", "set", "show", "undo", "retry", "save", "load", "clear", "exit")


class Leave(Exception):
    """The person wants to go."""


class Conversation:
    """Messages and how to answer them.

    Args:
        model: what answers.
        system: its instructions, if any.
        options: arguments of ``Model.stream``.
        show: is given each piece of an answer.
        say: is given what a command has to say.
    """

    def __init__(
        self,
        model: Model,
        system: str | None,
        options: dict[str, Any],
        show: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._model = model
        self._options = options
        self._piece = show
        self._say = say
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.load_s = 0.0  # seconds that loading the model took
        self._session: Session | None = None

    @property
    def max_tokens(self) -> int:
        """Most tokens of an answer, as it is set now."""
        return int(self._options.get("max_tokens", 256))

    def answer(self, text: str) -> Generation | None:
        """Ask, and keep question and answer.

        None where Ctrl-C cut the answer short: what had come is kept; where nothing had, the question is forgotten.

        Raises:
            CutawayError: the template or the model refuses; the question is then forgotten.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []

        def show(piece: str) -> None:
            pieces.append(piece)
            self._piece(piece)

        result: Generation | None = None
        try:
            result = stream(self._model, self.messages, self._going_on(), show)
        except KeyboardInterrupt:
            if not pieces:
                self.messages.pop()
                return None
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        return result

    def _going_on(self) -> dict[str, Any]:
        """Arguments of ``Model.stream``, with a session, so that what was said before is not read again."""
        from cutaway.generation.params import resolve
        from cutaway.generation.session import Session

        model, options = self._model, dict(self._options)
        if model.spec.source is not None or resolve(model.settings, model.spec.vocab_size, **options).num_beams > 1:
            return options
        if self._session is None:
            self._session = Session(model.transformer, kv_dtype=options.get("kv_dtype"))
        return {**options, "session": self._session}

    def command(self, line: str) -> str | None:
        """Do what a line with a slash says. Gives back a question to ask again, for /retry.

        Raises:
            Leave: for /exit.
            CutawayError: it makes no sense, or cannot be done.
        """
        word, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if word in ("exit", "quit", "bye"):
            raise Leave
        if word not in COMMANDS:
            near = difflib.get_close_matches(word, COMMANDS, n=1)
            raise RequestError(
                "no such command", got=line.split()[0], hint=f"did you mean /{near[0]}?" if near else "/help lists them"
            )
        done = getattr(self, f"_{word}")(rest)
        return done if isinstance(done, str) else None

    def _help(self, rest: str) -> None:
        self._say(HELP)

    def _system(self, rest: str) -> None:
        system = self.messages[0] if self.messages and self.messages[0]["role"] == "system" else None
        if not rest:
            self._say("no system message" if system is None else system["content"])
            return
        others = self.messages[1:] if system else self.messages
        self.messages = others if rest == "none" else [{"role": "system", "content": rest}, *others]

    def _set(self, rest: str) -> None:
        from cutaway.generation.params import resolve

        if not rest:
            chosen = resolve(self._model.settings, self._model.spec.vocab_size, **self._options)
            for name in _NUMBERS:
                drawn = name == "seed" and "seed" not in self._options
                self._say(f"{name:<19} {'anew each time' if drawn else getattr(chosen, name)}")
            self._say(f"{'stop':<19} {', '.join(map(repr, chosen.stop)) or 'none'}")
            return
        name, _, value = rest.partition(" ")
        name, value = name.replace("-", "_").rstrip("="), value.strip().removeprefix("=").strip()
        if name != "stop" and name not in _NUMBERS:
            raise RequestError("no such setting", got=name, expected=", ".join([*_NUMBERS, "stop"]))
        if not value:
            raise RequestError("a value is missing", field=name, hint=f"/set {name} VALUE, or /set {name} none")
        changed = {key: old for key, old in self._options.items() if key != name}
        if value != "none":
            try:
                changed[name] = [value] if name == "stop" else _NUMBERS[name](value)
            except ValueError:
                raise RequestError("not a number", field=name, got=value) from None
        resolve(self._model.settings, self._model.spec.vocab_size, **changed)  # refuses what makes no sense
        self._options = changed

    def _show(self, rest: str) -> None:
        if rest not in ("template", "info", "tokens"):
            raise RequestError("nothing to show", got=rest or None, expected="template, info or tokens")
        tokenizer = self._model.tokenizer
        if rest == "info" or tokenizer is None:
            self._say(repr(self._model))
            turns = sum(message["role"] == "user" for message in self.messages)
            self._say(
                f"{counted(turns, 'question')} so far; {counted(self._model.spec.max_positions, 'token')} of context"
            )
        elif rest == "template":
            self._say("none" if tokenizer.chat_template is None else tokenizer.chat_template.source)
        else:
            ids = self._model.encode_prompt(self.messages)
            look = look_at_stdout()
            wall = "|" if look.plain else "│"
            self._say(wall.join(visible(piece.text, look) for piece in tokenizer.pieces(ids)))
            self._say(counted(len(ids), "token"))

    def _clear(self, rest: str) -> None:
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def _undo(self, rest: str) -> str | None:
        asked = self._last_question()
        if asked is None:
            raise RequestError("there is nothing to take back")
        self._say(f"forgotten: {self.messages[asked]['content']}")
        del self.messages[asked:]
        return None

    def _retry(self, rest: str) -> str:
        asked = self._last_question()
        if asked is None:
            raise RequestError("there is no question yet")
        question = self.messages[asked]["content"]
        del self.messages[asked:]
        return question

    def _last_question(self) -> int | None:
        places = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        return places[-1] if places else None

    def _save(self, rest: str) -> None:
        from cutaway.formats.files import atomic_write

        if not rest:
            raise RequestError("a file's name is missing", hint="/save FILE")
        settings = {name: value for name, value in self._options.items() if not name.startswith("draft")}
        value = {"model": self._model.origin, "messages": self.messages, "settings": settings}
        with atomic_write(rest) as file:
            file.write((to_json(value, indent=2) + "\n").encode("utf-8", "backslashreplace"))
        self._say(f"saved {counted(len(self.messages), 'message')} to {rest}")

    def _load(self, rest: str) -> None:
        from cutaway.formats.files import read_json

        if not rest:
            raise RequestError("a file's name is missing", hint="/load FILE")
        value = read_json(rest, limit=64 << 20, error=ConfigError)
        messages: Any = value.get("messages") if isinstance(value, dict) else None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise ConfigError("is not a saved conversation", path=rest, field="/messages", hint="/save writes one")
        self.messages = [{"role": m["role"], "content": m["content"]} for m in messages]
        self._say(f"loaded {counted(len(self.messages), 'message')} from {rest}")


def _is_message(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return value.get("role") in ("system", "user", "assistant") and isinstance(value.get("content"), str)
