"""Model: the object people hold. It only hands on to the rooms before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from cutaway.checkpoints.gguf_save import save_gguf
from cutaway.checkpoints.load import Checkpoint, dtype_named, load_checkpoint
from cutaway.checkpoints.progress import Progress
from cutaway.checkpoints.recipe import read_recipe
from cutaway.checkpoints.resolve import resolve
from cutaway.checkpoints.save import save_folder
from cutaway.errors import RequestError
from cutaway.generation.generate import Generation, Run, score_ids
from cutaway.generation.params import check_ids
from cutaway.generation.params import resolve as resolve_sampling
from cutaway.generation.session import check_length, padded
from cutaway.inspection import Edit, Trace, trace
from cutaway.models import Transformer
from cutaway.models.init import built
from cutaway.spec import GenerationSettings, ModelSpec
from cutaway.spec.check import check
from cutaway.spec.recipe import expand
from cutaway.tokenizers.gguf import from_gguf, has_vocabulary
from cutaway.tokenizers.gguf_write import gguf_vocabulary
from cutaway.tokenizers.load import from_folder
from cutaway.tokenizers.save import companions
from cutaway.tokenizers.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Tensor
Ids: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | Tensor
_SETTINGS = frozenset(signature(resolve_sampling).parameters) - {"own", "vocab_size"}
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
    """A transformer with its tokenizer and its defaults for generating.

    Made by :func:`cutaway.load` or :func:`cutaway.build`.
    """

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
        check_length(self.transformer, max(map(len, rows)), "ids")
        table, counts = padded(rows)
        steps = torch.arange(table.shape[1])
        hidden = self.transformer.hidden(table, torch.where(steps < counts, steps, -1))
        out = self.transformer.unembed(hidden) if head else hidden
        if bool((counts == counts[0]).all()):
            return out
        return [out[i, : len(row)] for i, row in enumerate(rows)]

    def _rows(self, ids: Ids) -> list[list[int]]:
        values = _plain(ids)
        if not isinstance(values, (list, tuple)):
            raise RequestError("no ids", field="ids", expected="a list of ints, or a list of such lists", got=values)
        rows = [_plain(value) for value in values]
        nested = [isinstance(row, (list, tuple)) for row in rows]
        if not any(nested):
            return [check_ids(rows, self.spec.vocab_size, "ids")]
        if not all(nested):
            raise RequestError("ids and lists of ids are mixed", field="ids", expected="one or the other")
        return [check_ids(row, self.spec.vocab_size, f"ids/{i}") for i, row in enumerate(rows)]

    def score(self, text: str | Sequence[int]) -> Score:
        """Log-probability of each token of a text (or of ids).

        Raises:
            RequestError: nothing to score, or no tokenizer for a text.
        """
        ids = self.encode_prompt(text)
        return Score(ids, score_ids(self.transformer, ids))

    # ── text ─────────────────────────────────────────────────────────────────────────────────────────────

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_tokens: int | None = 256,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        frequency_penalty: float | None = None,
        presence_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        stop: str | int | Sequence[str | int] | None = None,
        seed: int | None = None,
        n: int = 1,
        logprobs: int | None = None,
        **later: Any,
    ) -> Any:
        """Continue a prompt, or several at once.

        A model whose rotary positions change with the length (LongRoPE, dynamic NTK) reads the whole prompt as long
        or short as it is. Where the answer outgrows the original length, what was read before stays as it was read.

        Args:
            prompt: a text, messages (``[{"role": …, "content": …}, …]``), ids, or a list of any of these. Strings
                that look like control tokens are plain text. An empty text starts from the tokenizer's BOS.
            max_tokens: most tokens to produce; None for as many as the model was trained for.
            temperature: 0 is greedy; None is the checkpoint's own setting, as for the next ones.
            top_k, top_p, min_p: keep the k best; the likeliest that reach p; those at least p times as likely as
                the best. They come in this order, after the temperature.
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
        run = self._run(
            prompt,
            **later,
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
        return results if self._is_list(prompt) or n > 1 else results[0]

    def stream(self, prompt: Prompt, **arguments: Any) -> Stream:
        """Continue one prompt and hand out text as it is finished, character by character whole.

        Takes the arguments of :meth:`generate`. The pieces joined are its ``text``; ``.result`` is the
        :class:`Generation` so far.
        """
        if self._is_list(prompt):
            raise RequestError("one prompt is streamed at a time", field="prompt", hint="Use generate for a list.")
        if arguments.get("n", 1) != 1:
            raise RequestError("one answer is streamed at a time", field="n", expected=1, got=arguments["n"])
        return Stream(self._run(prompt, **arguments))

    def _run(self, prompt: Prompt | Sequence[Prompt], **arguments: Any) -> Run:
        for name in arguments.keys() - _SETTINGS:
            if name not in _LATER:
                raise RequestError("unknown argument", field=name)
            if (value := arguments.pop(name)) != _LATER[name]:
                raise RequestError("not supported yet", field=name, expected=_LATER[name], got=value)
        sampling = resolve_sampling(self.settings, self.spec.vocab_size, **arguments)
        return Run(self.transformer, self.tokenizer, self._encode_prompts(prompt), sampling)

    def _encode_prompts(self, prompt: Prompt | Sequence[Prompt]) -> list[list[int]]:
        """The ids of one prompt, or of each of several."""
        if not self._is_list(prompt):
            return [self.encode_prompt(prompt)]  # type: ignore[arg-type]
        return [self.encode_prompt(one, f"prompt/{i}") for i, one in enumerate(_plain(prompt))]

    def encode_prompt(self, prompt: Prompt, field: str = "prompt") -> list[int]:
        """The ids that a prompt stands for: text, messages through the chat template, or ids as they are.

        Args:
            field: what an error calls it.

        Raises:
            RequestError: nothing there, or no tokenizer for it.
            TemplateError: messages that the chat template refuses, or no template.
        """
        items = _plain(prompt)
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
        return check_ids(items, self.spec.vocab_size, field)

    def _tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model came without a tokenizer", field=field, hint="Give token ids instead.")
        return self.tokenizer

    @staticmethod
    def _is_list(prompt: Any) -> bool:
        """Whether this is a list of prompts rather than one."""
        items = _plain(prompt)
        return isinstance(items, (list, tuple)) and bool(items) and isinstance(_plain(items[0]), (str, list, tuple))

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────

    def trace(
        self,
        prompt: Prompt | Sequence[Prompt],
        *names: str,
        edits: Mapping[str, Edit] | None = None,
        max_tokens: int = 0,
    ) -> Trace:
        """Run a prompt and keep the quantities that ``names`` match, through every cached step.

        Args:
            prompt: as for :meth:`generate`; several texts must be of equal length.
            names: names or patterns (``decoder.layers.*.attn.weights``); ``cutaway show --taps`` lists them.
            edits: name or pattern → function of the tensor; later tokens see what it gives back. A function is
                called in every pass: for the prompt, then for one token after another.
            max_tokens: tokens to go on with, greedily.

        Raises:
            NameNotFound: a pattern matches nothing; the hint has the nearest names.
        """
        ids = self._encode_prompts(prompt)
        return trace(self.transformer, ids, names, edits, max_tokens, self.settings.eos_ids)


def _plain(ids: Any) -> Any:
    """Lists for tensors and arrays."""
    return ids.tolist() if isinstance(ids, (Tensor, np.ndarray)) else ids


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
        has_one = has_vocabulary(checkpoint.metadata)
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


def build(recipe: ModelSpec | Mapping[str, Any] | str | PathLike[str], *, seed: int = 0) -> Model:
    """Make a new model, its weights drawn at random.

    Args:
        recipe: a few words (see :mod:`cutaway.spec.recipe`) as a dict, YAML text or a YAML file; or a whole spec.
        seed: same seed, same weights.

    Raises:
        ConfigError: a word or value that makes no sense, by its pointer.
        LimitExceeded, ResourceError: larger than any model, or than this machine.

    >>> model = build({"d_model": 32, "n_heads": 4, "layers": 2, "vocab_size": 64, "positions": "alibi"})
    >>> model.logits([1, 2, 3]).shape
    torch.Size([1, 3, 64])
    """
    if isinstance(recipe, ModelSpec):
        check(recipe)
        return Model(built(recipe, seed))
    words = recipe if isinstance(recipe, Mapping) else read_recipe(recipe)
    return Model(built(expand(words), seed))


def save(
    model: Model,
    path: str | PathLike[str],
    *,
    format: str = "hf",
    dtype: torch.dtype | str | None = None,
    verify: bool = True,
) -> None:
    """Write a model, whole or not at all, file by file.

    Args:
        model: what to save.
        path: a folder, or for GGUF a file; saving over what was loaded is safe.
        format: ``"hf"``, a Hugging Face folder in the words of the model's family; ``"gguf"``, one file for llama.cpp;
            ``"cutaway"``, a folder of our own that holds any spec.
        dtype: of the matrices in a GGUF, fp32, fp16 or bf16; by default the model's own, as in a folder.
        verify: read what was written back and compare it, bit by bit, before it takes its name.

    Raises:
        RequestError: another format, or one that the model has no words in.
        UnsupportedModelError, ConfigError, TokenizerError: something of the model that the format cannot say, by name.
        StorageError: the disk refused; what was there stays.
    """
    number = dtype_named(dtype)
    if format == "gguf":
        vocabulary = gguf_vocabulary(model.tokenizer, model.spec.vocab_size, eos_ids=model.settings.eos_ids)
        return save_gguf(model.transformer, Path(path), vocabulary, dtype=number, verify=verify)
    if format not in ("hf", "cutaway"):
        raise RequestError("unknown format", field="format", expected="hf, gguf or cutaway", got=format)
    if number not in (None, model.transformer.dtype):
        raise RequestError("a folder holds the weights as they are", field="dtype", expected=None, got=dtype)
    files, own = companions(model.tokenizer, model.settings), format == "cutaway"
    save_folder(model.transformer, Path(path), model._checkpoint, files, own=own, verify=verify)
