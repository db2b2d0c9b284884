"""Model: the object people hold. It only hands on to the rooms before it.

Rooms that a model which only writes does without are imported where they are handed to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

import torch
from torch import Tensor

from cutaway.cache import KvDtype
from cutaway.checkpoints.load import Checkpoint
from cutaway.errors import RequestError
from cutaway.formats.files import StrPath
from cutaway.generation import asynchronous
from cutaway.generation.asynchronous import AsyncStream
from cutaway.generation.inputs import rows_of, texts_of, texts_or_pairs_of
from cutaway.generation.options import Options, takes_options
from cutaway.generation.progress import Report, Tally, meter
from cutaway.generation.streamed import Stream, check_one
from cutaway.generation.voice import Message, Prompt, Voice, as_asked
from cutaway.models import Transformer
from cutaway.spec import GenerationSettings, ModelSpec
from cutaway.spec.sentence import SentenceSettings
from cutaway.tasks.whole import Ragged, final
from cutaway.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from cutaway.generation.batch_file import FileReport
    from cutaway.generation.score import Score
    from cutaway.inside import Inside
    from cutaway.inspection import Edit, Trace
    from cutaway.tasks.blanks import Candidate

__all__ = ["Ids", "Message", "Model", "Prompt"]

Ids: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | Tensor


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
        if all(stack.runners is None for stack in (transformer.encoder, transformer.decoder)):  # not compiled
            transformer.use_kernels()
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
        top: int = 0,
        deterministic: bool = False,
        kv_dtype: KvDtype | None = None,
    ) -> Score:
        """Log-probability of each token of a text (or of ids); of an encoder–decoder, of a target for a source.

        Args:
            text: what is scored, or the source.
            target: of an encoder–decoder, what is scored, without the token that answers begin with.
            top: how many of the likeliest tokens to report at each place.
            deterministic, kv_dtype: as :meth:`generate` with these words reports; with the former, the same bits.

        Raises:
            RequestError: nothing to score, or no tokenizer for a text.
        """
        from cutaway.generation.score import score

        return score(self._voice, text, target, top=top, deterministic=deterministic, kv_dtype=kv_dtype)

    # ── text ─────────────────────────────────────────────────────────────────────────────────────────────

    @takes_options
    def generate(
        self, prompt: Prompt | Sequence[Prompt], *, progress: Report | bool | None = None, **options: Unpack[Options]
    ) -> Any:
        """Continue a prompt, or several at once.

        A model whose rotary positions change with the length (LongRoPE, dynamic NTK) reads the whole prompt as long
        or short as it is. Where the answer outgrows the original length, what was read before stays as it was read.
        ``torch.autocast`` of the caller's is off in here.

        Args:
            prompt: a text, messages (``[{"role": …, "content": …}, …]``), ids, or a list of any of these. Strings
                that look like control tokens are plain text. An empty text starts from the tokenizer's BOS.
            progress: called with a :class:`~cutaway.generation.progress.Tally` before each pass; True shows a line.
            **options: see :class:`cutaway.generation.options.Options`.

        Returns:
            A :class:`Generation`; a list of them for a list of prompts or n > 1 (n for each prompt, in order).

        Raises:
            RequestError: an argument that makes no sense, by name.
            ContextExceeded: a prompt longer than a learned table of positions.
        """
        run = self._voice.run(prompt, **options)
        with meter(progress) as report:
            run.watch = None if report is None else lambda rows: report(Tally.of(rows))
            for _ in run:
                pass
        return as_asked(run.results(), prompt, options)

    @takes_options
    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Continue one prompt and hand out text as it is finished, character by character whole.

        Takes the arguments of :meth:`generate`. The pieces joined are its ``text``; ``.result`` is the
        :class:`Generation` so far.
        """
        check_one(prompt, options)
        return Stream(self._voice.run(prompt, **options))

    @takes_options
    async def agenerate(self, prompt: Prompt | Sequence[Prompt], **options: Unpack[Options]) -> Any:
        """As :meth:`generate`, for an event loop, which goes on meanwhile: see ``generation.asynchronous``."""
        return as_asked(await asynchronous.generate(self._voice, prompt, **options), prompt, options)

    @takes_options
    def astream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """As :meth:`stream`, for ``async for``. Leaving the loop ends the run before its next pass."""
        check_one(prompt, options)
        return AsyncStream(self._voice, prompt, **options)

    @takes_options
    def generate_file(
        self,
        source: StrPath,
        out: StrPath,
        *,
        batch: int | None = None,
        restart: bool = False,
        progress: Report | bool | None = None,
        **options: Unpack[Options],
    ) -> FileReport:
        """Answer a file of prompts: a JSON object a line, in the order of the prompts.

        Killed at any moment, the same call goes on, and the file ends with the same bytes. Meanwhile nobody else may
        write there. ``OUT.run`` says what it was made of and with; ``OUT.lock`` is there while somebody works.

        Args:
            source: JSON lines with ``prompt`` (a text, or ids) or ``messages``, perhaps ``id`` and options of their
                own; or a text a line (see :class:`~cutaway.generation.prompt_file.PromptFile`); ``-`` is standard
                input. All of it is checked before the first is answered.
            out: where answers go; ``-`` prints them, and keeps nothing to go on from.
            batch: prompts that are answered together; None for what was said before, or 8. Another number, or another
                ``draft``, may go on with what is there: the rest is then the same but for near-ties, with
                ``deterministic`` the same tokens and bits.
            restart: throw away what is there.
            progress: as for :meth:`generate`.
            **options: as for :meth:`generate`. The prompt of index i, from 0, is drawn with ``seed`` + i, unless its
                line has a ``seed``; without one, a first call draws it and later ones go on with that.

        Raises:
            DatasetError: a line is no prompt, or asks for something that makes no sense; the path has the line.
            ContextExceeded: a prompt longer than a learned table of positions.
            ResumeMismatch: what is there was made of other prompts, with another model or other settings, by name.
            LockedError: another process is writing there.
            StorageError: the disk refuses. What was written stays.
        """
        from cutaway.generation.batch_file import generate_file

        return generate_file(self._voice, source, out, batch=batch, restart=restart, progress=progress, **options)

    def encode_prompt(self, prompt: Prompt, field: str = "prompt") -> list[int]:
        """The ids that a prompt stands for: text, messages through the chat template, or ids as they are.

        Args:
            field: what an error calls it.

        Raises:
            RequestError: nothing there, or no tokenizer for it.
            TemplateError: messages that the chat template refuses, or no template.
        """
        return self._voice.ids(prompt, field)

    @property
    def _voice(self) -> Voice:
        """What generating takes of this model, as it is now."""
        return Voice(self.transformer, self.tokenizer, self.settings)

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
        from cutaway.tasks.vectors import embed

        found = texts_of(texts)
        tokenizer = self._voice.cutter("texts")
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
        from cutaway.tasks.labels import classify

        labels = classify(self.transformer, self._voice.cutter("texts"), texts_or_pairs_of(texts))
        return labels[0] if isinstance(texts, (str, tuple)) else labels

    def tag(self, texts: str | Sequence[str]) -> Any:
        """The labelled parts of a text, with the characters they are at; a list of such lists for several texts.

        Returns:
            A list of :class:`cutaway.tasks.labels.Span`, or one for each text.

        Raises:
            RequestError: the model does not label tokens.
        """
        from cutaway.tasks.labels import tag

        found = tag(self.transformer, self._voice.cutter("texts"), texts_of(texts))
        return found[0] if isinstance(texts, str) else found

    def fill(self, text: str, *, top: int = 5) -> list[list[Candidate]]:
        """The likeliest tokens for each blank of a text, the best first: a list for each blank.

        Args:
            text: with the tokenizer's mask token (``[MASK]`` or ``<mask>``) wherever there is a blank.
            top: candidates for each.

        Raises:
            RequestError: there is no blank, or the model does not fill any.
        """
        from cutaway.tasks.blanks import fill

        (found,) = texts_of([text])
        return fill(self.transformer, self._voice.cutter("text"), found, top)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def inside(self) -> Inside[Model]:
        """Lenses, attribution, circuits, embeddings, comparison: see :class:`cutaway.inside.Inside`."""
        from cutaway.inside import Inside

        return Inside(self._voice, lambda made: Model(made, self.tokenizer, self.settings, None, self.sentence))

    def trace(
        self,
        prompt: Prompt | Sequence[Prompt],
        *names: str,
        edits: Mapping[str, Edit] | None = None,
        max_tokens: int = 0,
        target: Ids | None = None,
        start: tuple[str, Tensor] | None = None,
        stop: bool = False,
        grad: bool = False,
        **options: Any,
    ) -> Trace:
        """Run a prompt, or several, and keep the quantities that ``names`` match, through every cached step.

        Where texts differ in length, a row's own tokens come first and then NaN: ``trace.row(i)`` is one without.

        Args:
            prompt: as for :meth:`generate`: an empty text is the tokenizer's BOS alone.
            names: names or patterns (``decoder.layers.*.attn.weights``); ``cutaway show --taps`` lists them.
            edits: name or pattern → function of the tensor, called in every pass: for the prompt, then for one token
                after another; or one of ``cutaway.inspection.edits``, which know heads, positions and neurons, such
                as ``zero(heads=3)``. Later tokens see what it gives back.
            max_tokens: tokens to go on with, as :meth:`generate` does at temperature 0 without beams. A row that ends
                before is not read further.
            target: of an encoder–decoder, ids that the decoder reads for each prompt, its start token included; by
                default that token alone.
            start: the name of a layer's ``resid_in``, and the stream to begin there with: nothing before is run.
            stop: end after the last of ``names``: nothing after it is run.
            grad: keep the graph, for gradients of what is kept; not of a model loaded as ``int8``.
            **options: how tokens are chosen and what form they have, as for :meth:`generate`.

        Raises:
            NameNotFound: a pattern matches nothing; the hint has the nearest names.
            RequestError: something makes no sense, by name; an edit that takes hold of nothing.
        """
        from cutaway.inspection.running import traced

        how: Any = {"start": start, "stop": stop, "grad": grad, **options}
        return traced(self._voice, prompt, names, edits, max_tokens, target, **how)
