"""Model: the object people hold. It only hands on to the rooms before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from cutaway.checkpoints.load import Checkpoint
from cutaway.errors import RequestError
from cutaway.generation.checks import check_ids
from cutaway.generation.generate import Run
from cutaway.generation.inputs import is_list, plain, rows_of, texts_of, texts_or_pairs_of
from cutaway.generation.params import Words
from cutaway.generation.params import resolve as resolve_sampling
from cutaway.generation.sampling import Sampling
from cutaway.generation.score import Score, score_ids
from cutaway.generation.session import read_sources
from cutaway.generation.streamed import Stream
from cutaway.inspection import Edit, Trace, trace
from cutaway.models import Transformer
from cutaway.spec import GenerationSettings, ModelSpec
from cutaway.spec.sentence import SentenceSettings
from cutaway.tasks.blanks import Candidate, fill
from cutaway.tasks.labels import classify, tag
from cutaway.tasks.vectors import embed
from cutaway.tasks.whole import Ragged, final
from cutaway.tokenizers.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Tensor
Ids: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | Tensor
_SETTINGS = frozenset(signature(resolve_sampling).parameters) - {"own", "vocab_size"}
# What others call it.
_ELSEWHERE = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "do_sample": "temperature (0 is greedy)",
    "num_return_sequences": "n",
    "bad_words_ids": "bad_words",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "edits": "model.trace, which takes edits and max_tokens",
}


class Model:
    """A transformer with its tokenizer and its defaults for generating.

    Made by :func:`cutaway.load` or :func:`cutaway.build`.
    """

    def __init__(
        self,
        transformer: Transformer,
        tokenizer: Tokenizer | None = None,
        settings: GenerationSettings | None = None,
        checkpoint: Checkpoint | None = None,
        sentence: SentenceSettings | None = None,
    ) -> None:
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.settings = settings or GenerationSettings()
        self.sentence = sentence  # how the checkpoint makes one vector of a text, if it says so
        self._checkpoint = checkpoint

    @property
    def spec(self) -> ModelSpec:
        """What the model is made of, as frozen data."""
        return self.transformer.spec

    @property
    def origin(self) -> str:
        """Where it came from, in words; empty for a model built here."""
        return "" if self._checkpoint is None else self._checkpoint.origin

    def __repr__(self) -> str:
        spec = self.spec
        n = sum(p.numel() for p in self.transformer.parameters())
        layers = " + ".join(str(len(stack.layers)) for stack in spec.stacks.values())
        facts = [spec.family, f"{layers} layers", f"d_model {spec.d_model}", f"{n:,} parameters"]
        return f"Model({', '.join([*facts, *([self.origin] if self.origin else [])])})"

    # ── numbers ──────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def logits(self, ids: Ids, *, target: Ids | None = None) -> Tensor | list[Tensor]:
        """Scores of every next token, for every token of a text; of a classifier, scores of its labels.

        Args:
            ids: one text ([n] → [1, n, vocab]), several of one length ([batch, n] → [batch, n, vocab]), or
                several of different lengths (→ a list of [n_i, vocab]).
            target: of an encoder–decoder, what the decoder reads, its start token included; ``ids`` are the source,
                and the result has the target's shape.

        Raises:
            RequestError: no ids, one outside the vocabulary, or a model that scores nothing.
            ContextExceeded: more tokens than a learned table has positions.
        """
        if target is None and self.spec.source is not None:
            hint = "Give target=, or use generate."
            raise RequestError("an encoder–decoder scores a target for a source", field="target", got=None, hint=hint)
        return self._final(ids, target).scored(self.transformer)

    @torch.no_grad()
    def hidden(self, ids: Ids, *, target: Ids | None = None) -> Tensor | list[Tensor]:
        """The stream after the last norm: shapes as :meth:`logits`, with d_model for vocab.

        Of an encoder–decoder, the decoder's for a target, and the encoder's without one.
        """
        return self._final(ids, target).rows()

    def _final(self, ids: Ids, target: Ids | None) -> Ragged:
        rows = rows_of(ids, "ids", self.spec.source_vocab_size or self.spec.vocab_size)
        targets = None if target is None else rows_of(target, "target", self.spec.vocab_size)
        return final(self.transformer, rows, targets)

    def score(
        self,
        text: str | Sequence[int],
        *,
        target: str | Sequence[int] | None = None,
        deterministic: bool = False,
    ) -> Score:
        """Log-probability of each token of a text (or of ids); of an encoder–decoder, of a target for a source.

        Args:
            text: what is scored, or the source.
            target: of an encoder–decoder, what is scored, without the token that answers begin with.
            deterministic: the same bits as :meth:`generate` with this word reports.

        Raises:
            RequestError: nothing to score, or no tokenizer for a text.
        """
        self._must_generate()
        ids = self.encode_prompt(text, "text")
        if (target is None) is not (self.spec.source is None):
            what = "an encoder–decoder scores a target for a source, other models score one text"
            raise RequestError(what, field="target", got=target)
        if target is None:
            return Score(ids, score_ids(self.transformer, ids, steady=deterministic))
        if isinstance(target, str):
            mine = self._tokenizer("target").target.encode(target)
        else:
            mine = check_ids(plain(target), self.spec.vocab_size, "target")
        source = read_sources(self.transformer, [ids], steady=deterministic)
        return Score(mine, score_ids(self.transformer, [*self._start(), *mine], source, steady=deterministic)[1:])

    # ── text ─────────────────────────────────────────────────────────────────────────────────────────────

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_tokens: int | Literal["auto"] | None = "auto",
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        frequency_penalty: float | None = None,
        presence_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        bad_words: Words | None = None,
        no_repeat_ngram_size: int | None = None,
        min_tokens: int | None = None,
        stop: str | int | Sequence[str | int] | None = None,
        seed: int | None = None,
        n: int = 1,
        logprobs: int | None = None,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        early_stopping: bool | str | None = None,
        deterministic: bool = False,
        schema: Mapping[str, Any] | str | bool | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        choices: Sequence[str] | None = None,
        **unknown: Any,
    ) -> Any:
        """Continue a prompt, or several at once.

        A model whose rotary positions change with the length (LongRoPE, dynamic NTK) reads the whole prompt as long
        or short as it is. Where the answer outgrows the original length, what was read before stays as it was read.

        Args:
            prompt: a text, messages (``[{"role": …, "content": …}, …]``), ids, or a list of any of these. Strings
                that look like control tokens are plain text. An empty text starts from the tokenizer's BOS.
            max_tokens: most tokens to produce; None for as many as the model was trained for; "auto" for the
                checkpoint's ``max_new_tokens``, or an encoder–decoder's ``max_length``, or else 256.
            temperature: 0 is greedy; None is the checkpoint's own setting, as for the next ones.
            top_k, top_p, min_p: keep the k best; the likeliest that reach p; those at least p times as likely as
                the best. They come in this order, after the temperature.
            repetition_penalty: > 1 makes tokens of prompt and answer less likely again.
            frequency_penalty, presence_penalty: taken off for each time, and once, a token was produced.
            logit_bias: token id → added to its logit.
            bad_words: texts, token ids or lists of these that are not produced, beside the checkpoint's own.
            no_repeat_ngram_size: no sequence of so many tokens comes twice in prompt and answer.
            min_tokens: before so many, no end token and no id of ``stop`` is chosen. A stop text ends at any time.
            stop: texts or token ids that end the answer, beside the checkpoint's own end tokens.
            seed: same seed, same draw, whatever else is in the batch.
            n: answers to each prompt; of beams, the best so many of them.
            logprobs: how many likeliest tokens to report at each place; 0 reports the chosen ones only.
            num_beams: > 1 searches for the likeliest answers, so many at a time, as transformers does; that goes
                with no temperature and no stop texts. A temperature > 0 and no ``num_beams`` draws, whatever the
                checkpoint's own number is. None is the checkpoint's own, as for the next ones.
            length_penalty: answers are compared by log-probability / length ** this; > 0 is for longer ones.
            early_stopping: True ends at ``num_beams`` answers, False when the best running one, as long as it is,
                is no better than those, "never" when none could be at any length.
            deterministic: the same request gives the same tokens and the same bits of every log-probability, alone or
                in any batch, whatever was kept of its beginning, with any number of threads. It costs time, and is
                refused where this machine or this model cannot keep it.
            schema, regex, grammar, choices: the whole answer is JSON of this schema (a mapping, JSON text, or True for
                any JSON), matches this expression (Rust's syntax), this grammar (Lark, as llguidance takes it), or is
                one of these texts. One of the four, without beams; needs ``pip install 'cutaway[grammar]'``. What
                ends at ``max_tokens`` or at a stop text (``stop``) may be cut short.

        Returns:
            A :class:`Generation`; a list of them for a list of prompts or n > 1 (n for each prompt, in order).

        Raises:
            RequestError: an argument that makes no sense, by name.
            ContextExceeded: a prompt longer than a learned table of positions.
        """
        run = self._run(
            prompt,
            **unknown,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            logit_bias=logit_bias,
            bad_words=bad_words,
            no_repeat_ngram_size=no_repeat_ngram_size,
            min_tokens=min_tokens,
            stop=stop,
            seed=seed,
            n=n,
            logprobs=logprobs,
            num_beams=num_beams,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            deterministic=deterministic,
            schema=schema,
            regex=regex,
            grammar=grammar,
            choices=choices,
        )
        for _ in run:
            pass
        results = run.results()
        return results if is_list(prompt) or n > 1 else results[0]

    def stream(self, prompt: Prompt, **arguments: Any) -> Stream:
        """Continue one prompt and hand out text as it is finished, character by character whole.

        Takes the arguments of :meth:`generate`. The pieces joined are its ``text``; ``.result`` is the
        :class:`Generation` so far.
        """
        if is_list(prompt):
            raise RequestError("one prompt is streamed at a time", field="prompt", hint="Use generate for a list.")
        if arguments.get("n", 1) != 1:
            raise RequestError("one answer is streamed at a time", field="n", expected=1, got=arguments["n"])
        return Stream(self._run(prompt, **arguments))

    def _run(self, prompt: Prompt | Sequence[Prompt], **arguments: Any) -> Run:
        self._must_generate()
        for name in arguments.keys() - _SETTINGS:
            near = _ELSEWHERE.get(name) or next(iter(get_close_matches(name, _SETTINGS, n=1)), None)
            raise RequestError("unknown argument", field=name, hint=near and f"Did you mean {near}?")
        sampling = resolve_sampling(self.settings, self.spec.vocab_size, **arguments)
        read = self._encode_prompts(prompt)
        if self.spec.source is None:
            return Run(self.transformer, self.tokenizer, read, sampling)
        return Run(self.transformer, self.tokenizer, [self._start()] * len(read), sampling, read)

    def _start(self) -> list[int]:
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

    def _greedy(self) -> Sampling:
        """As the checkpoint's own rules have it, without a draw."""
        return resolve_sampling(self.settings, self.spec.vocab_size, temperature=0, num_beams=1)

    def _must_generate(self) -> None:
        if not self.spec.generates:
            hint = "Encoders have embed, classify, tag and fill."
            raise RequestError(
                "this model does not say what comes next", field="model", got=self.spec.family, hint=hint
            )

    def _encode_prompts(self, prompt: Prompt | Sequence[Prompt]) -> list[list[int]]:
        """The ids of one prompt, or of each of several."""
        if not is_list(prompt):
            return [self.encode_prompt(prompt)]  # type: ignore[arg-type]
        return [self.encode_prompt(one, f"prompt/{i}") for i, one in enumerate(plain(prompt))]

    def encode_prompt(self, prompt: Prompt, field: str = "prompt") -> list[int]:
        """The ids that a prompt stands for: text, messages through the chat template, or ids as they are.

        Args:
            field: what an error calls it.

        Raises:
            RequestError: nothing there, or no tokenizer for it.
            TemplateError: messages that the chat template refuses, or no template.
        """
        items = plain(prompt)
        if isinstance(items, str):
            tokenizer = self._tokenizer(field)
            ids = tokenizer.encode(items)
            if not ids and tokenizer.bos_id is None:
                hint = "This model has no token to begin a text with."
                raise RequestError("the prompt is empty", field=field, hint=hint)
            return ids or [tokenizer.bos_id]  # type: ignore[list-item]
        if not isinstance(items, (list, tuple)):
            raise RequestError("not a prompt", field=field, expected="text, messages or token ids", got=items)
        if not items:
            raise RequestError("the prompt is empty", field=field)
        if all(isinstance(item, Mapping) for item in items):
            return self._tokenizer(field).chat(items)
        return check_ids(items, self.spec.source_vocab_size or self.spec.vocab_size, field)

    def _tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            ids = field.partition("/")[0] in ("prompt", "text", "target") and self.spec.generates
            hint = "Give token ids instead." if ids else "Load it from a folder that has one, or set model.tokenizer."
            raise RequestError("this model came without a tokenizer", field=field, hint=hint)
        return self.tokenizer

    # ── encoders ─────────────────────────────────────────────────────────────────────────────────────────

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pool: str | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
    ) -> Tensor:
        """A vector for each text, in fp32: [len(texts), d_model].

        A text's vector does not depend on what it is embedded with. Where the checkpoint says how many tokens its
        vectors are made of, longer texts are cut there, with a warning.

        Args:
            texts: one or several.
            pool: the ``"mean"`` of the tokens' vectors, the first token's (``"cls"``), the ``"last"`` token's, or the
                largest number of each channel (``"max"``); None for the checkpoint's own, or else the mean.
            normalize: bring vectors to length one; None for the checkpoint's own way.
            prompt: the name of a text of the checkpoint's that is put before each.

        Raises:
            RequestError: no tokenizer, an unknown pooling or prompt.
            ContextExceeded: a text that is longer than the model can read.
        """
        found = texts_of(texts)
        tokenizer = self._tokenizer("texts")
        return embed(
            self.transformer,
            tokenizer,
            found,
            self.sentence or SentenceSettings(),
            pool=pool,
            normalize=normalize,
            prompt=prompt,
        )

    def classify(self, texts: Any) -> Any:
        """The labels of a text with their probabilities, the likeliest first; a list of such lists for several texts.

        Args:
            texts: one or several; a pair of texts is a tuple of two.

        Returns:
            A list of :class:`cutaway.tasks.labels.Label`, or one for each text.

        Raises:
            RequestError: the model does not label whole texts.
        """
        labels = classify(self.transformer, self._tokenizer("texts"), texts_or_pairs_of(texts))
        return labels[0] if isinstance(texts, (str, tuple)) else labels

    def tag(self, texts: str | Sequence[str]) -> Any:
        """The labelled parts of a text, with the characters they are at; a list of such lists for several texts.

        Returns:
            A list of :class:`cutaway.tasks.labels.Span`, or one for each text.

        Raises:
            RequestError: the model does not label tokens.
        """
        found = tag(self.transformer, self._tokenizer("texts"), texts_of(texts))
        return found[0] if isinstance(texts, str) else found

    def fill(self, text: str, *, top: int = 5) -> list[list[Candidate]]:
        """The likeliest tokens for each blank of a text, the best first: a list for each blank.

        Args:
            text: with the tokenizer's mask token (``[MASK]`` or ``<mask>``) wherever there is a blank.
            top: candidates for each.

        Raises:
            RequestError: there is no blank, or the model does not fill any.
        """
        (found,) = texts_of([text])
        return fill(self.transformer, self._tokenizer("text"), found, top)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────

    def trace(
        self,
        prompt: Prompt | Sequence[Prompt],
        *names: str,
        edits: Mapping[str, Edit] | None = None,
        max_tokens: int = 0,
        target: Ids | None = None,
    ) -> Trace:
        """Run a prompt and keep the quantities that ``names`` match, through every cached step.

        Args:
            prompt: as for :meth:`generate`; several texts must be of equal length.
            names: names or patterns (``decoder.layers.*.attn.weights``); ``cutaway show --taps`` lists them.
            edits: name or pattern → function of the tensor; later tokens see what it gives back. A function is
                called in every pass: for the prompt, then for one token after another.
            max_tokens: tokens to go on with, as :meth:`generate` does at temperature 0 without beams.
            target: of an encoder–decoder, ids that the decoder reads for each prompt, its start token included; by
                default that token alone.

        Raises:
            NameNotFound: a pattern matches nothing; the hint has the nearest names.
        """
        ids = self._encode_prompts(prompt)
        if self.spec.source is None:
            if target is not None:
                raise RequestError("this model reads one text, not a source and a target", field="target", got=target)
            return trace(self.transformer, ids, names, edits, max_tokens, sampling=self._greedy())
        targets = [self._start()] * len(ids) if target is None else rows_of(target, "target", self.spec.vocab_size)
        return trace(self.transformer, targets, names, edits, max_tokens, sources=ids, sampling=self._greedy())
