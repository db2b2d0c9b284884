"""From a model and what a call says to a run: what every way of generating begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, Unpack

from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.checks import check_ids
from cutaway.generation.drafting import drafting
from cutaway.generation.generate import Run
from cutaway.generation.inputs import is_list, plain
from cutaway.generation.ongoing import ongoing
from cutaway.generation.options import Options
from cutaway.generation.params import resolve
from cutaway.generation.result import Generation
from cutaway.generation.sampling import Sampling
from cutaway.models import Transformer
from cutaway.spec import GenerationSettings
from cutaway.tokenizers.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Tensor


@dataclass(frozen=True, slots=True)
class Voice:
    """What it takes to generate.

    Attributes:
        model: computes what comes next.
        tokenizer: turns text into ids and back; None where there are only ids.
        settings: what the checkpoint says about generating.
    """

    model: Transformer
    tokenizer: Tokenizer | None
    settings: GenerationSettings

    def must_generate(self) -> None:
        """Refuse a model that does not say what comes next.

        Raises:
            RequestError: it is one.
        """
        spec = self.model.spec
        if not spec.generates:
            hint = "Encoders have embed, classify, tag and fill."
            raise RequestError("this model does not say what comes next", field="model", got=spec.family, hint=hint)

    def sampling(self, **options: Unpack[Options]) -> Sampling:
        """A call's options over the checkpoint's own settings, checked."""
        return resolve(self.settings, self.model.spec.vocab_size, **options)

    def run(self, prompt: Prompt | Sequence[Prompt], **options: Unpack[Options]) -> Run:
        """One prompt or several, ready to be continued.

        Raises:
            RequestError: an option or a prompt that makes no sense, by name.
            ContextExceeded: a prompt longer than a learned table of positions.
        """
        self.must_generate()
        sampling = self.sampling(**options)
        return self.run_ids(self.all_ids(prompt), sampling, options)

    def run_ids(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        options: Options,
        each: Sequence[Sampling] | None = None,
    ) -> Run:
        """The same of ids: prompts, or what an encoder–decoder answers.

        Args:
            sampling: what the options come to.
            options: say who guesses ahead, and what goes on.
            each: as for ``Run``.
        """
        draft, most = options.get("draft"), options.get("draft_tokens")
        ahead = drafting(draft, most, self.model, self.tokenizer, sampling.num_beams)
        session = ongoing(options.get("session"), self.model, sampling, len(prompts))
        if self.model.spec.source is None:
            return Run(self.model, self.tokenizer, prompts, sampling, None, each, ahead, session)
        return Run(self.model, self.tokenizer, [self.start()] * len(prompts), sampling, prompts, each, ahead)

    def all_ids(self, prompt: Prompt | Sequence[Prompt]) -> list[list[int]]:
        """The ids of one prompt, or of each of several."""
        if not is_list(prompt):
            return [self.ids(prompt)]  # type: ignore[arg-type]
        return [self.ids(one, f"prompt/{i}") for i, one in enumerate(plain(prompt))]

    def ids(self, prompt: Prompt, field: str = "prompt") -> list[int]:
        """The ids that a prompt stands for: text, messages through the chat template, or ids as they are.

        Args:
            field: what an error calls it.

        Raises:
            RequestError: nothing there, or no tokenizer for it.
            TemplateError: messages that the chat template refuses, or no template.
        """
        items = plain(prompt)
        if isinstance(items, str):
            tokenizer = self.cutter(field)
            ids = tokenizer.encode(items)
            if not ids and tokenizer.bos_id is None:
                hint = "This model has no token to begin a text with."
                raise RequestError("the prompt is empty", field=field, hint=hint)
            return ids or [tokenizer.bos_id]  # type: ignore[list-item]
        if not isinstance(items, (list, tuple)):
            listed = "Messages come in a list, one alone too." if isinstance(items, Mapping) else None
            wanted = "text, messages or token ids"
            raise RequestError("not a prompt", field=field, expected=wanted, got=items, hint=listed)
        if not items:
            raise RequestError("the prompt is empty", field=field)
        if all(isinstance(item, Mapping) for item in items):
            return self.cutter(field).chat(items)
        return check_ids(items, self.model.spec.source_vocab_size or self.model.spec.vocab_size, field)

    def start(self) -> list[int]:
        """What an encoder–decoder's answers begin with.

        Raises:
            RequestError: the checkpoint does not say.
        """
        start = self.settings.decoder_start_id
        if start is None and self.tokenizer is not None:
            start = self.tokenizer.bos_id
        if start is None:
            hint = "model.settings = dataclasses.replace(model.settings, decoder_start_id=…); a config says it too."
            raise RequestError("nothing says what an answer begins with", field="decoder_start_token_id", hint=hint)
        return [start]

    def cutter(self, field: str) -> Tokenizer:
        """The tokenizer.

        Raises:
            RequestError: there is none, for what is called ``field``.
        """
        if self.tokenizer is None:
            ids = field.partition("/")[0] in ("prompt", "text", "target") and self.model.spec.generates
            hint = "Give token ids instead." if ids else "Load it from a folder that has one, or set model.tokenizer."
            raise RequestError("this model came without a tokenizer", field=field, hint=hint)
        return self.tokenizer


def as_asked(results: list[Generation], prompt: Prompt | Sequence[Prompt], options: Options) -> Any:
    """One answer for one prompt, a list of them for a list of prompts or for several answers."""
    return results if is_list(prompt) or options.get("n", 1) > 1 else results[0]
