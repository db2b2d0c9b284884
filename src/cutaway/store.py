"""Models in and out: load one, build one, save one.

What only building or saving needs is imported there: who loads a model does not wait for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cutaway.checkpoints.load import Checkpoint, dtype_named, loading
from cutaway.checkpoints.progress import Progress
from cutaway.checkpoints.resolve import resolve
from cutaway.checkpoints.sentence import read_sentence
from cutaway.collecting import uncollected
from cutaway.errors import RequestError
from cutaway.generation.checks import whole
from cutaway.kernels import rounds
from cutaway.model import Model
from cutaway.spec import GenerationSettings, ModelSpec
from cutaway.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from cutaway.checkpoints.quantised import Losses


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
        dtype: of the weights; by default float32 on a CPU and what is stored on a GPU. A GGUF's matrices stay in the
            form that the file has, by default on a CPU: they give the same numbers, take no gradient, and need the
            native kernels (``cutaway doctor``). ``"float32"`` makes plain numbers of them, for training.
        device: by default a GPU if there is one.
        quantize: what matrices become as they are read, on a CPU: ``"q8_0"``, ``"q5_1"``, ``"q5_0"``, ``"q4_1"``,
            ``"q4_0"``, ``"q6_k"``, ``"q5_k"`` or ``"q4_k"``. Where a row is not whole blocks of 256, a type of 32.
            Experts are matrices too; the routers that choose them stay numbers.
            ``"int8"`` is ``"q8_0"`` with products of whole numbers: what is multiplied by a matrix is rounded to 8
            bits too, which is faster where many tokens are read and no longer exact (``cutaway bench --quantize int8``
            measures what it costs). Where gradients are wanted its products are those of ``"q8_0"``, not rounded.
            A file does not hold the mode: what was saved is loaded with ``quantize="int8"`` again.
        revision: branch, tag or commit of a hub id.
        offline: use only what is here.
        mmap: map safetensors instead of reading them into private memory; the file must then not change.
        ignore: config keys to leave unread.
        progress: told (done, total, label) while downloading and loading.

    Raises:
        CutawayError: see :mod:`cutaway.errors`. Nothing is ever half loaded.
    """
    if isinstance(ignore, str):
        raise RequestError("not a list of keys", field="ignore", expected=f"({ignore!r},)", got=ignore)
    resolved = resolve(source, revision=revision, offline=offline, progress=progress)
    report = None if progress is None else (lambda done, total: progress(done, total, f"loading {resolved.path.name}"))
    with uncollected():
        weights = loading(
            resolved, dtype=dtype, device=device, quantize=quantize, mmap=mmap, ignore=ignore, progress=report
        )
        with weights as checkpoint:
            tokenizer = _vocabulary_of(checkpoint)
    settings = checkpoint.settings
    if tokenizer is not None:
        settings = _with_ends(settings, tokenizer.eos_ids)
    sentence = read_sentence(checkpoint.path) if checkpoint.path.is_dir() else None
    return Model(checkpoint.transformer, tokenizer, settings, checkpoint, sentence)


def _vocabulary_of(checkpoint: Checkpoint) -> Tokenizer | None:
    """What turns text into ids, if the checkpoint has it."""
    spec = checkpoint.transformer.spec
    rows = spec.source_vocab_size or spec.vocab_size  # a text is read by the source's table, where that is another
    if not checkpoint.metadata:
        from cutaway.tokenizers.load import from_folder

        return from_folder(checkpoint.path, vocab_rows=rows)
    from cutaway.tokenizers.gguf import from_gguf, has_vocabulary

    if not has_vocabulary(checkpoint.metadata):
        return None
    return from_gguf(checkpoint.metadata, checkpoint.types, vocab_rows=rows)


def _with_ends(settings: GenerationSettings, eos_ids: Iterable[int]) -> GenerationSettings:
    """What ends an answer is the union of all that name something."""
    return replace(settings, eos_ids=tuple(sorted({*settings.eos_ids, *eos_ids})))


def build(
    recipe: ModelSpec | Mapping[str, Any] | str | PathLike[str],
    *,
    seed: int = 0,
    tokenizer: Tokenizer | str | PathLike[str] | None = None,
) -> Model:
    """Make a new model, its weights drawn at random.

    Args:
        recipe: a few words (see :mod:`cutaway.spec.recipe`) as a dict, YAML text or a YAML file; or a whole spec.
        seed: same seed, same weights.
        tokenizer: what turns text into ids, or a folder that has one. A recipe that leaves ``vocab_size`` out takes
            it from there, and its end token ends an answer.

    Raises:
        ConfigError: a word or value that makes no sense, by its pointer.
        LimitExceeded, ResourceError: larger than any model, or than this machine.

    >>> model = build({"d_model": 32, "n_heads": 4, "layers": 2, "vocab_size": 64, "positions": "alibi"})
    >>> model.logits([1, 2, 3]).shape
    torch.Size([1, 3, 64])
    """
    from cutaway.checkpoints.recipe import read_recipe
    from cutaway.models.init import built
    from cutaway.spec.check import check
    from cutaway.spec.recipe import expand

    whole("seed", seed, -(2**63), 2**63 - 1)
    given: object = recipe
    if not isinstance(given, (ModelSpec, Mapping, str, PathLike)):
        wanted = "words, YAML, a YAML file or a ModelSpec"
        raise RequestError("not a recipe", field="recipe", expected=wanted, got=given)
    words = read_recipe(recipe) if isinstance(recipe, (str, PathLike)) else recipe
    cutter = _tokenizer(tokenizer)
    if isinstance(words, ModelSpec):
        check(words)
        spec = words
    else:
        spec = expand(words if cutter is None else {"vocab_size": cutter.vocab_size, **words})
    rows = spec.source_vocab_size or spec.vocab_size
    if cutter is not None and cutter.vocab_size > rows:
        what = "the tokenizer has tokens that the model has no rows for"
        raise RequestError(what, field="vocab_size", expected=f"≥ {cutter.vocab_size}", got=rows)
    ends = GenerationSettings() if cutter is None else GenerationSettings(eos_ids=cutter.eos_ids)
    return Model(built(spec, seed), cutter, ends)


def _tokenizer(given: object) -> Tokenizer | None:
    from cutaway.tokenizers.load import from_folder

    if given is None or isinstance(given, Tokenizer):
        return given
    wanted = "a folder with a tokenizer.json, or a loaded model's tokenizer"
    if not isinstance(given, (str, PathLike)):
        hint = "Save it into a folder as tokenizer.json and name the folder."
        raise RequestError("not a tokenizer", field="tokenizer", expected=wanted, got=type(given).__name__, hint=hint)
    named = Path(given).name == "tokenizer.json"
    folder = Path(given).parent if named else Path(given)
    found = from_folder(folder) if folder.is_dir() else None
    if found is None:
        raise RequestError("there is no tokenizer", field="tokenizer", expected=wanted, got=str(folder))
    return found


def save(
    model: Model,
    path: str | PathLike[str],
    *,
    format: str = "hf",
    dtype: torch.dtype | str | None = None,
    quantize: str | None = None,
    verify: bool = True,
    losses: Losses | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a model, whole or not at all, file by file.

    Args:
        model: what to save.
        path: a folder, or for GGUF a file; saving over what was loaded is safe.
        format: ``"hf"``, a Hugging Face folder in the words of the model's family; ``"gguf"``, one file for llama.cpp;
            ``"cutaway"``, a folder of our own that holds any spec.
        dtype: of the matrices in a GGUF, fp32, fp16 or bf16; by default the model's own, as in a folder. Blocks that
            a model was loaded with, or loaded as, stay as they are in a GGUF and in our own format.
        quantize: what matrices become in a GGUF or in our own format: ``"q8_0"`` … ``"q4_k"``, one type for all, or
            a mix of llama.cpp's, ``"q4_k_m"`` (see :mod:`cutaway.formats.mixes`). Matrices of the type stay as they
            are; where a row is not whole blocks, a narrower block takes their place, or no block.
        verify: read what was written back and compare it, bit by bit, before it takes its name.
        losses: filled with what quantizing cost, type by type.
        progress: told (done, total, label).

    Raises:
        RequestError: another format, or one that the model has no words in.
        UnsupportedModelError, ConfigError, TokenizerError: something of the model that the format cannot say, by name.
        DtypeError: a number that a block cannot hold, by the tensor's name.
        StorageError: the disk refused; what was there stays.
    """
    from cutaway.checkpoints.gguf_save import form_of, save_gguf
    from cutaway.checkpoints.save import save_folder
    from cutaway.checkpoints.sentence import sentence_files
    from cutaway.formats.mixes import mix_named
    from cutaway.formats.paths import usable_path
    from cutaway.tokenizers.gguf_write import gguf_vocabulary
    from cutaway.tokenizers.save import companions

    if not isinstance(model, Model):
        raise RequestError("not a model", field="model", expected="what load or build gave", got=model)
    usable_path(path, wanted="a folder, or a file for GGUF")
    if rounds(model.transformer):
        warnings.warn(
            "a file holds the Q8_0 weights of int8, but not that products round: load it with quantize='int8'",
            stacklevel=2,
        )
    number, mix = dtype_named(dtype), None if quantize is None else mix_named(quantize)
    if mix is not None and number is not None:
        raise RequestError("says otherwise than quantize", field="dtype", expected=None, got=dtype)
    said = None if progress is None else (lambda done, total: progress(done, total, f"writing {Path(path).name}"))
    if format == "gguf":
        form_of(model.spec)
        vocabulary = gguf_vocabulary(model.tokenizer, model.spec.vocab_size, eos_ids=model.settings.eos_ids)
        return save_gguf(
            model.transformer,
            Path(path),
            vocabulary,
            dtype=number,
            quantize=mix,
            verify=verify,
            losses=losses,
            progress=said,
        )
    if format not in ("hf", "cutaway"):
        raise RequestError("unknown format", field="format", expected="hf, gguf or cutaway", got=format)
    if mix is not None and format == "hf":
        hint = "save(model, path, format='gguf'), or 'cutaway', which holds any model"
        raise RequestError("a Hugging Face folder holds no blocks", field="quantize", got=quantize, hint=hint)
    if number not in (None, model.transformer.dtype):
        raise RequestError("a folder holds the weights as they are", field="dtype", expected=None, got=dtype)
    files, own = companions(model.tokenizer, model.settings), format == "cutaway"
    also = {} if model.sentence is None else sentence_files(model.sentence, model.spec.d_model)
    save_folder(
        model.transformer,
        Path(path),
        model._checkpoint,
        files,
        also=also,
        own=own,
        quantize=mix,
        verify=verify,
        losses=losses,
        progress=said,
    )
