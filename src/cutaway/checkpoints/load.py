"""From a path to a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cutaway.checkpoints.gguf import GgufSource, read_gguf
from cutaway.checkpoints.resolve import Resolved
from cutaway.checkpoints.weights import PlainNames, compare_names, fill
from cutaway.errors import RequestError
from cutaway.formats.gguf_names import gguf_rules
from cutaway.formats.gguf_split import open_gguf
from cutaway.formats.quantise import QUANTISED
from cutaway.formats.quants import BLOCK_TYPES, BlockType
from cutaway.kernels import library, missing
from cutaway.models import Transformer
from cutaway.spec import GenerationSettings

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}

INT8 = "int8"  # Q8_0 weights, and products of whole numbers


@dataclass(slots=True)
class Checkpoint:
    """A loaded model and what came with it.

    Attributes:
        transformer: the model, in evaluation mode.
        settings: its defaults for generating.
        path: the folder or file.
        origin: where it came from, in words.
        metadata: a GGUF's key/values, vocabulary included; empty for a folder.
        types: a GGUF's declared type of each key.
    """

    transformer: Transformer
    settings: GenerationSettings
    path: Path
    origin: str
    metadata: dict[str, Any] = field(default_factory=dict)
    types: Callable[[str], str] | None = None


def load_checkpoint(resolved: Resolved, **options: Any) -> Checkpoint:
    """As :func:`loading`, with nothing else to do meanwhile."""
    with loading(resolved, **options) as checkpoint:
        pass
    return checkpoint


@contextmanager
def loading(
    resolved: Resolved,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    quantize: str | None = None,
    mmap: bool = False,
    ignore: Iterable[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Checkpoint]:
    """Build a model, and fill it when the block is left: meanwhile a GGUF's weights are on their way.

    Args:
        resolved: where it is.
        dtype: of the weights; by default fp32 on a CPU, where quantized matrices stay in the form that the file has
            if the native kernels are there to read it, and what is stored on a GPU.
        device: by default a GPU if there is one.
        quantize: what matrices become: ``q8_0``, ``q5_1`` … ``q4_k``; see ``formats.quantise``. ``int8`` is ``q8_0``
            with products of whole numbers: what is multiplied is rounded too.
        mmap: map safetensors instead of reading them into private memory: faster to open, but the file must
            not change while the model lives.
        ignore: config keys to leave unread.
        progress: told (done, in all).

    Raises:
        CutawayError: see ``errors``; nothing is ever half loaded.
    """
    target = _device(device)
    number = stated = dtype_named(dtype)
    blocks = _blocks(quantize, number, target)
    rounded = quantize is not None and quantize.lower() == INT8
    if resolved.kind == "gguf":
        with _loading_gguf(resolved, number, target, blocks, rounded, progress) as checkpoint:
            yield checkpoint
        return
    from cutaway.checkpoints.folder import FolderSource, read_config  # a GGUF does without

    folder = resolved.path if resolved.kind == "folder" else resolved.path.parent
    family, spec, settings, config = read_config(folder, ignore)
    if number is None:
        stored = DTYPES.get(str(config.get("dtype", config.get("torch_dtype"))), torch.float32)
        number = torch.float32 if target.type == "cpu" else stored
    source = FolderSource(resolved.path, mmap)
    try:
        spec = family.settle(spec, PlainNames(source, family.base_prefix))
        rules = family.rules(spec)
        # A config may claim thousands of layers: nothing is built for any that have no tensors.
        compare_names(rules, source, path=str(resolved.path), base_prefix=family.base_prefix)
        with torch.device("meta"):
            model = Transformer(spec).eval()
        yield Checkpoint(model, settings, folder, resolved.origin)
        fill(
            model,
            rules,
            source,
            path=str(resolved.path),
            dtype=number,
            device=target,
            base_prefix=family.base_prefix,
            progress=progress,
            keep=stated is None and target.type == "cpu" and library() is not None,
            quantize=blocks,
            rounded=rounded,
        )
    finally:
        source.close()


@contextmanager
def _loading_gguf(
    resolved: Resolved,
    dtype: torch.dtype | None,
    device: torch.device,
    quantize: BlockType | None,
    rounded: bool,
    progress: Callable[[int, int], None] | None,
) -> Iterator[Checkpoint]:
    path = str(resolved.path)
    keep = dtype is None and device.type == "cpu" and library() is not None
    with open_gguf(resolved.path) as file:
        family, spec, settings = read_gguf(file, path)
        source = GgufSource(file)
        if keep and quantize is None:  # else they are not in memory as they are stored
            source.read_ahead()
        with torch.device("meta"):
            model = Transformer(spec).eval()
        yield Checkpoint(model, settings, resolved.path, resolved.origin, dict(file.metadata), file.type_of)
        assert family.gguf is not None
        rules = gguf_rules(spec, list(model.state_dict()), family.gguf.alter(spec))
        fill(
            model,
            rules,
            source,
            path=path,
            dtype=dtype or torch.float32,
            device=device,
            progress=progress,
            keep=keep,
            quantize=quantize,
            rounded=rounded,
        )


def _blocks(name: str | None, dtype: torch.dtype | None, device: torch.device) -> BlockType | None:
    """The type that matrices are to have, if one was named.

    Raises:
        RequestError: there is no such type, or nothing here could compute with it.
    """
    if name is None:
        return None
    wanted = ", ".join([*QUANTISED, INT8]).lower()
    if not isinstance(name, str) or (name.upper() not in QUANTISED and name.lower() != INT8):
        raise RequestError("no such type", field="quantize", expected=wanted, got=name)
    if missing() or device.type != "cpu" or dtype not in (None, torch.float32):
        why = missing() or "blocks are for a CPU, and give fp32 numbers"
        raise RequestError("blocks need the native kernels", field="quantize", expected=None, got=name, hint=why)
    return BLOCK_TYPES["Q8_0" if name.lower() == INT8 else name.upper()]


def _device(device: torch.device | str | None) -> torch.device:
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
        if target.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError, TypeError) as error:
        why = str(error).splitlines()[0]
        raise RequestError(
            "no such device here", field="device", expected="cpu, cuda or mps", got=device, hint=why
        ) from error
    return target


def dtype_named(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype by its name; None for none and for ``"auto"``.

    Raises:
        RequestError: no dtype that weights have.
    """
    if dtype is None or dtype == "auto":
        return None
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if dtype not in DTYPES:
        raise RequestError("unknown dtype", field="dtype", expected=", ".join(DTYPES), got=dtype)
    return DTYPES[dtype]
