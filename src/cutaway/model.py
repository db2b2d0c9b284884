"""Model: the object people hold. It only hands on to the rooms before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cutaway.checkpoints.load import Checkpoint, load_checkpoint
from cutaway.checkpoints.progress import Progress
from cutaway.checkpoints.resolve import resolve
from cutaway.checkpoints.save import save_folder
from cutaway.errors import ContextExceeded, RequestError
from cutaway.generation.generate import Generation, Run, check_ids, score_ids
from cutaway.generation.params import resolve as resolve_sampling
from cutaway.generation.session import warn_once
from cutaway.inspection import Edit, Trace, trace
from cutaway.models import Transformer
from cutaway.spec import GenerationSettings, ModelSpec
from cutaway.tokenizers.gguf import from_gguf
from cutaway.tokenizers.load import from_folder
from cutaway.tokenizers.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Tensor
Ids: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | Tensor
_LATER = {"num_beams": 1, "schema": None, "deterministic": False}


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a text is, token by token.

    Attributes:
        tokens: its ids, a first token that the tokenizer adds included.
        logprobs: log-probability of each given those before; None for the first.
    """

    tokens: list[int]
    logprobs: list[float | None]

    @property
    def total(self) -> float:
        """Log-probability of the whole after its first token."""
        return sum(value for value in self.logprobs if value is not None)


class Model:
    """A transformer with its tokenizer and its defaults for generating. Made by :func:`cutaway.load`."""

    def __init__(
        self,
        transformer: Transformer,
        tokenizer: Tokenizer | None = None,
        settings: GenerationSettings | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.settings = settings or GenerationSettings()
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
        return f"Model({spec.family}, {spec.n_layers} layers, d_model {spec.d_model}, {n:,} parameters, {self.origin})"

    # ── numbers ──────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def logits(self, ids: Ids) -> Tensor | list[Tensor]:
        """Scores of every next token, for every token of a text.

        Args:
            ids: one text ([n] → [1, n, vocab]), several of one length ([batch, n] → [batch, n, vocab]), or
                several of different lengths (→ a list of [n_i, vocab]).

        Raises:
            RequestError: no ids, or one outside the vocabulary.
            ContextExceeded: more tokens than a learned table has positions.
        """
        return self._whole(ids, head=True)

    @torch.no_grad()
    def hidden(self, ids: Ids) -> Tensor | list[Tensor]:
        """The stream after the last norm: shapes as :meth:`logits`, with d_model for vocab."""
        return self._whole(ids, head=False)

    def _whole(self, ids: Ids, head: bool) -> Tensor | list[Tensor]:
        rows = self._rows(ids)
        width = max(map(len, rows))
        padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        lengths = torch.tensor([len(row) for row in rows])[:, None]
        steps = torch.arange(width)[None]
        hidden = self.transformer.hidden(padded, torch.where(steps < lengths, steps, -1))
        out = self.transformer.unembed(hidden) if head else hidden
        if all(len(row) == width for row in rows):
            return out
        return [out[i, : len(row)] for i, row in enumerate(rows)]

    def _rows(self, ids: Ids) -> list[list[int]]:
        values = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        if not values:
            raise RequestError("no ids", field="ids", expected="a list of ints, or a list of such lists", got=values)
        nested = [list(v) if isinstance(v, (list, tuple)) else v for v in values]
        rows: list[Any] = nested if isinstance(nested[0], list) else [nested]
        if not all(isinstance(row, list) for row in rows):
            raise RequestError("ids and lists of ids are mixed", field="ids", expected="one or the other")
        checked = [check_ids(row, self.spec.vocab_size) for row in rows]
        self._check_length(max(map(len, checked)))
        return checked

    def _check_length(self, longest: int) -> None:
        limit = self.spec.position_limit
        if limit is not None and longest > limit:
            raise ContextExceeded(
                "longer than the model's table of positions", field="ids", expected=f"at most {limit} tokens", got=longest
            )
        if longest > self.spec.max_positions:
            warn_once(self.transformer, longest)

    def score(self, text: str | Sequence[int]) -> Score:
        """Log-probability of each token of a text (or of ids).

        Raises:
            RequestError: nothing to score, or no tokenizer for a text.
        """
        ids = self.encode_prompt(text)
        self._check_length(len(ids))
        return Score(ids, score_ids(self.transformer, ids))

    # ── text ─────────────────────────────────────────────────────────────────────────────────────────────

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_tokens: int = 256,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        frequency_penalty: float | None = None,
        presence_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        stop: str | Sequence[str | int] | None = None,
        seed: int | None = None,
        n: int = 1,
        logprobs: int | None = None,
        **later: Any,
    ) -> Any:
        """Continue a prompt, or several at once.

        Args:
            prompt: a text, messages (``[{"role": …, "content": …}, …]``), ids, or a list of any of these. Strings
                that look like control tokens are plain text. An empty text starts from the tokenizer's BOS.
            max_tokens: most tokens to produce.
            temperature: 0 is greedy; None is the checkpoint's own setting, as for the next ones.
            top_k, top_p, min_p: keep the k best, the likeliest that reach p, those at least p times as likely as the best.
            repetition_penalty: > 1 makes tokens of prompt and answer less likely again.
            frequency_penalty, presence_penalty: taken off for each time, and once, a token was produced.
            logit_bias: token id → added to its logit.
            stop: texts or token ids that end the answer, beside the checkpoint's own end tokens.
            seed: same seed, same draw, whatever else is in the batch.
            n: answers to each prompt.
            logprobs: how many likeliest tokens to report at each place; 0 reports the chosen ones only.

        Returns:
            A :class:`Generation`; a list of them for a list of prompts or n > 1 (n for each prompt, in order).

        Raises:
            RequestError: an argument that makes no sense, by name.
            ContextExceeded: a prompt longer than a learned table of positions.
        """
        several = self._is_list(prompt)
        run = self._run(
            list(prompt) if several else [prompt],
            later,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            logit_bias=logit_bias,
            stop=stop,
            seed=seed,
            n=n,
            logprobs=logprobs,
        )
        for _ in run:
            pass
        results = run.results()
        return results if several or n > 1 else results[0]

    def stream(self, prompt: Prompt, **arguments: Any) -> Stream:
        """Continue one prompt and hand out text as it is finished, character by character whole.

        Takes the arguments of :meth:`generate`. The pieces joined are its ``text``; ``.result`` is the
        :class:`Generation` so far.
        """
        if self._is_list(prompt):
            raise RequestError("one prompt is streamed at a time", field="prompt", hint="Use generate for a list.")
        later = {name: arguments.pop(name) for name in _LATER if name in arguments}
        if arguments.get("n", 1) != 1:
            raise RequestError("one answer is streamed at a time", field="n", expected=1, got=arguments["n"])
        return Stream(self._run([prompt], later, **arguments))

    def _run(self, prompts: Sequence[Any], later: Mapping[str, Any], **arguments: Any) -> Run:
        for name, value in later.items():
            if name not in _LATER:
                raise RequestError("unknown argument", field=name)
            if value != _LATER[name]:
                raise RequestError("not supported yet", field=name, expected=_LATER[name], got=value)
        sampling = resolve_sampling(self.settings, self.spec.vocab_size, **arguments)
        return Run(self.transformer, self.tokenizer, [self.encode_prompt(prompt) for prompt in prompts], sampling)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """The ids that a prompt stands for: text, messages through the chat template, or ids as they are.

        Raises:
            RequestError: nothing there, or no tokenizer for it.
            TemplateError: messages that the chat template refuses, or no template.
        """
        if isinstance(prompt, Tensor):
            prompt = prompt.tolist()
        if isinstance(prompt, str):
            ids = self._tokenizer().encode(prompt)
            bos = self._tokenizer().bos_id
            return ids if ids or bos is None else [bos]
        items: list[Any] = list(prompt)
        if not items:
            raise RequestError("the prompt is empty", field="prompt")
        if all(isinstance(item, Mapping) for item in items):
            return self._tokenizer().chat(items)
        return check_ids(items, self.spec.vocab_size)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model came without a tokenizer", field="prompt", hint="Give token ids instead.")
        return self.tokenizer

    @staticmethod
    def _is_list(prompt: Any) -> bool:
        """Whether this is a list of prompts rather than one."""
        return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], (str, list, tuple, Tensor))

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────

    def trace(
        self,
        prompt: Prompt | Sequence[Sequence[int]],
        *names: str,
        edits: Mapping[str, Edit] | None = None,
        max_tokens: int = 0,
    ) -> Trace:
        """Run a prompt and keep the quantities that ``names`` match, through every cached step.

        Args:
            prompt: as for :meth:`generate`; several texts must be of equal length.
            names: names or patterns (``decoder.layers.*.attn.weights``); ``cutaway show --taps`` lists them.
            edits: name or pattern → function of the tensor; later tokens see what it gives back.
            max_tokens: tokens to go on with, greedily.

        Raises:
            NameNotFound: a pattern matches nothing; the hint has the nearest names.
        """
        several = self._is_list(prompt)
        ids = [self.encode_prompt(p) for p in prompt] if several else [self.encode_prompt(prompt)]  # type: ignore[arg-type]
        self._check_length(max(map(len, ids)) + max_tokens)
        return trace(self.transformer, ids, names, edits, max_tokens)


class Stream:
    """Text of one generation as it comes. Iterate once; ``result`` is complete afterwards."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pieces = iter(run)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while True:
            _, piece = next(self._pieces)
            if piece:
                return piece

    @property
    def result(self) -> Generation:
        """What has come so far."""
        return self._run.results()[0]


def load(
    source: str | PathLike[str] = "smollm2",
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    quantize: str | None = None,
    revision: str | None = None,
    offline: bool = False,
    mmap: bool = False,
    ignore: Iterable[str] = (),
    progress: Progress | None = None,
) -> Model:
    """Load a model.

    Args:
        source: a hub id (``owner/name``, ``owner/name@revision``), a folder, a ``.gguf`` or ``.safetensors`` file, or
            a name of the catalogue (``cutaway models``).
        dtype: of the weights; by default float32 on a CPU and what is stored on a GPU.
        device: by default a GPU if there is one.
        quantize: not supported yet.
        revision: branch, tag or commit of a hub id.
        offline: use only what is here.
        mmap: map safetensors instead of reading them into private memory; the file must then not change.
        ignore: config keys to leave unread.
        progress: told (done, total, label) while downloading and loading.

    Raises:
        CutawayError: see :mod:`cutaway.errors`. Nothing is ever half loaded.
    """
    if quantize is not None:
        raise RequestError("not supported yet", field="quantize", expected=None, got=quantize)
    resolved = resolve(source, revision=revision, offline=offline, progress=progress)
    report = None if progress is None else (lambda done, total: progress(done, total, f"loading {resolved.path.name}"))
    checkpoint = load_checkpoint(resolved, dtype=dtype, device=device, mmap=mmap, ignore=ignore, progress=report)
    rows = checkpoint.transformer.spec.vocab_size
    tokenizer: Tokenizer | None
    if checkpoint.metadata:
        has_one = "tokenizer.ggml.model" in checkpoint.metadata
        tokenizer = from_gguf(checkpoint.metadata, checkpoint.types, vocab_rows=rows) if has_one else None
    else:
        tokenizer = from_folder(checkpoint.path, vocab_rows=rows)
    settings = checkpoint.settings
    if tokenizer is not None:
        settings = _with_ends(settings, tokenizer.eos_ids)
    return Model(checkpoint.transformer, tokenizer, settings, checkpoint)


def _with_ends(settings: GenerationSettings, eos_ids: Iterable[int]) -> GenerationSettings:
    """What ends an answer is the union of all that name something."""
    return replace(settings, eos_ids=tuple(sorted({*settings.eos_ids, *eos_ids})))


def save(model: Model, path: str | PathLike[str], *, format: str = "hf") -> None:
    """Write a model as a Hugging Face folder, whole or not at all, file by file.

    Args:
        model: what to save.
        path: the folder; saving over the one that was loaded is safe.
        format: ``"hf"``; others come later.

    Raises:
        RequestError: another format.
        StorageError: the disk refused; what was there stays.
    """
    if format != "hf":
        raise RequestError("this format is not supported yet", field="format", expected="hf", got=format)
    save_folder(model.transformer, Path(path), model._checkpoint)
