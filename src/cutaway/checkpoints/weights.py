"""Filling a model from a file's tensors, with nothing missing, left over, or of another shape."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from cutaway.errors import DtypeError, ShapeMismatch
from cutaway.formats.quantise import quantise, type_for
from cutaway.formats.quants import BlockType
from cutaway.formats.rules import Drop, Tie, WeightRule, by_rows
from cutaway.kernels import Stored, stored_matrix, together
from cutaway.kernels.pages import in_large_pages
from cutaway.models import Transformer
from cutaway.modules.linear import Linear
from cutaway.modules.moe import Moe

Progress: TypeAlias = Callable[[int, int], None]
_WRAPPERS = ("_orig_mod.", "module.")  # what torch.compile and data-parallel training put before every name
_MOST_NAMED, _NAMES_WIDTH = 10, 220


class TensorSource(Protocol):
    """Named tensors in a file or several."""

    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str) -> Tensor: ...
    def raw(self, name: str) -> tuple[Tensor, int] | None:
        """The rows of a matrix as they are stored, and the format's number, where kernels can read them so."""
        ...


class PlainNames:
    """A source's tensors under the names that rules give them."""

    def __init__(self, source: TensorSource, base_prefix: str = "") -> None:
        self._source = source
        self._stored = by_plain_name(source.names(), base_prefix)

    def names(self) -> list[str]:
        """Every tensor."""
        return [*self._stored]

    def read(self, name: str) -> Tensor:
        """One tensor, as stored."""
        return self._source.read(self._stored[name])


def fill(
    model: Transformer,
    rules: Sequence[WeightRule],
    source: TensorSource,
    *,
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    base_prefix: str = "",
    progress: Progress | None = None,
    keep: bool = False,
    quantize: BlockType | None = None,
    rounded: bool = False,
) -> None:
    """Give every parameter of ``model`` (built without memory) its tensor.

    All names and shapes are compared before the first tensor is read.

    Args:
        model: on the meta device.
        rules: how the source's tensors become the model's.
        source: where they are.
        path: for messages.
        dtype, device: what the parameters become.
        base_prefix: tried before a name where the body was saved without its head.
        progress: told (bytes done, bytes in all), of the model rather than the file.
        keep: leave matrices in the form that they are stored in, where kernels can read that.
        quantize: what matrices become, those whose rows are whole blocks.
        rounded: whether what these are multiplied by is rounded too.

    Raises:
        ShapeMismatch: a tensor is missing, unexpected, or of another shape; names up to ten, and counts.
    """
    own = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    uncovered = set(own) - {name for rule in rules for name in rule.ours}
    assert not uncovered, f"no rule fills {sorted(uncovered)}"
    used, stored = compare_names(rules, source, path=path, base_prefix=base_prefix)
    for rule in used:
        _compare_shapes(rule, own, source, stored, path)

    given: dict[str, Tensor] = {}
    keeping = matrices(model) if keep and quantize is None else frozenset()
    rounding = quantizable(model) if quantize is not None else frozenset()
    sizes = [sum(math.prod(own[name]) for name in rule.ours) * dtype.itemsize for rule in used]
    for done, rule in enumerate(used):
        if rule.ours:
            kept = _kept(rule, own, source, stored) if keeping.issuperset(rule.ours) and by_rows(rule) else None
            tensors = kept or rule.load(tuple(_read(source, stored[name], path) for name in rule.theirs))
            for name, tensor in zip(rule.ours, tensors, strict=True):
                given[name] = tensor if kept else tensor.to(device=device, dtype=dtype)
                kind = type_for(quantize, tensor.shape[-1]) if quantize is not None and name in rounding else None
                if kind is not None:
                    made = stored_matrix(_quantised(given[name], kind, name, path), kind.id, tensor.shape[-1])
                    given[name] = together(made) if rounded else made
        if progress is not None:
            progress(sum(sizes[: done + 1]), sum(sizes))
    for rule in used:
        if isinstance(rule, Tie):
            _compare_tied(rule, given[rule.same_as], _read(source, stored[rule.theirs[0]], path), path)
    left = [name for rule in used if isinstance(rule, Drop) and rule.learned for name in rule.theirs]
    if left:
        warnings.warn(f"{path}: left behind, as this model has no use for them: {', '.join(left)}", stacklevel=2)
    if quantize is not None:
        _say_what_stays(given, rounding, quantize, path)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not isinstance(given[name], Stored))
    model.load_state_dict(given, assign=True)
    in_large_pages(model.parameters())


def _say_what_stays(given: Mapping[str, Tensor], rounding: frozenset[str], kind: BlockType, path: str) -> None:
    """Warn of matrices that are numbers still: those whose rows are not whole blocks."""
    stay = {name: given[name] for name in given if name in rounding and not isinstance(given[name], Stored)}
    size = sum(x.nbytes for x in stay.values())
    if stay:
        warnings.warn(
            f"{path}: {len(stay)} matrices of {size / 2**20:,.1f} MiB stay as numbers beside {kind.name}, as their"
            f" rows are not whole blocks: {', '.join([*stay][:3])}{', …' if len(stay) > 3 else ''}",
            stacklevel=2,
        )


def _quantised(numbers: Tensor, kind: BlockType, name: str, path: str) -> Tensor:
    try:
        return quantise(numbers, kind)
    except DtypeError as error:
        raise DtypeError(error.what, path=path, field=name, expected=error.expected, got=error.got) from error


def matrices(model: Transformer) -> frozenset[str]:
    """Parameters that are only multiplied by and looked up in, so that they may stay as a file has them."""
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Linear)}
    experts = {f"{name}.{part}" for name in _mixtures(model) for part in ("gate", "up", "down")}
    return frozenset(linear | experts | {"embed.tokens", "source_embed.tokens", "head.weight"})


def quantizable(model: Transformer) -> frozenset[str]:
    """Those of :func:`matrices` that may be rounded: all but routers, which are small and choose, as in llama.cpp."""
    return matrices(model) - {f"{name}.router.weight" for name in _mixtures(model)}


def _mixtures(model: Transformer) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Moe)]


def _kept(
    rule: WeightRule, own: dict[str, tuple[int, ...]], source: TensorSource, stored: dict[str, str]
) -> tuple[Tensor, ...] | None:
    """A rule's tensors in the form that they are stored in, or None where that is not to be had."""
    raw = [source.raw(stored[name]) for name in rule.theirs]
    there = [pair for pair in raw if pair is not None]
    formats = {number for _, number in there}
    if len(there) < len(raw) or len(formats) != 1:
        return None
    rows = rule.load(tuple(tensor for tensor, _ in there))
    (number,) = formats
    return tuple(stored_matrix(part, number, own[name][-1]) for name, part in zip(rule.ours, rows, strict=True))


def compare_names(
    rules: Sequence[WeightRule], source: TensorSource, *, path: str, base_prefix: str = ""
) -> tuple[list[WeightRule], dict[str, str]]:
    """The rules that apply, and the source's own name of each tensor, if none is missing and none left over.

    Raises:
        ShapeMismatch: a tensor is missing or unexpected; names up to ten, and counts.
    """
    stored = by_plain_name(source.names(), base_prefix)
    # Rules whose tensors are optional (ties, drops) count only where they meet one.
    used = [rule for rule in rules if rule.ours or any(name in stored for name in rule.theirs)]
    missing = [name for rule in used for name in rule.theirs if name not in stored]
    known = {name for rule in rules for name in rule.theirs}
    unexpected = [full for name, full in stored.items() if name not in known]
    if missing or unexpected:
        kinds = [(kind, names) for kind, names in (("missing", missing), ("unexpected", unexpected)) if names]
        said = [_listed(kind, names, _NAMES_WIDTH // len(kinds)) for kind, names in kinds]
        error = ShapeMismatch("; ".join(said), path=path, field=(missing or unexpected)[0])
        error.hint = "The file belongs to another model, or is incomplete. Nothing was loaded."
        if unexpected and not missing:
            error.hint = "A tensor that nobody reads means that the model would not be the one that was saved."
        raise error
    return used, stored


def by_plain_name(names: Iterable[str], base_prefix: str) -> dict[str, str]:
    """Name without wrappers → name in the file."""
    stripped = {name: name for name in names}
    while wrapper := next((w for w in _WRAPPERS if stripped and all(name.startswith(w) for name in stripped)), None):
        stripped = {name[len(wrapper) :]: full for name, full in stripped.items()}
    if base_prefix and not any(name.startswith(base_prefix) for name in stripped):
        # A head beside a bare body keeps its own name.
        stripped = {name if name.startswith("lm_head") else base_prefix + name: full for name, full in stripped.items()}
    # A norm's weight and shift as they were called at first; where both names are there, the old one is a stranger.
    today = {name: name.replace("LayerNorm.gamma", "LayerNorm.weight") for name in stripped}
    today = {name: new.replace("LayerNorm.beta", "LayerNorm.bias") for name, new in today.items()}
    return {name if today[name] in stripped else today[name]: full for name, full in stripped.items()}


def _listed(kind: str, names: list[str], width: int) -> str:
    shown = names[:_MOST_NAMED]
    while len(shown) > 1 and len(", ".join(shown)) > width:  # an error is one line of bounded length
        shown.pop()
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} {kind}: {', '.join(shown)}{more}"


def _compare_shapes(
    rule: WeightRule, own: dict[str, tuple[int, ...]], source: TensorSource, stored: dict[str, str], path: str
) -> None:
    shapes = [source.shape(stored[name]) for name in rule.theirs if name in stored]
    if isinstance(rule, Tie):
        wanted, got = [own[rule.same_as]], shapes
    else:
        try:
            loaded = rule.load(tuple(torch.empty(shape, device="meta") for shape in shapes))
            got = [tuple(tensor.shape) for tensor in loaded]
        except (RuntimeError, ValueError, IndexError):
            got = []
        wanted = [own[name] for name in rule.ours]
    if got != wanted:
        right = _before(rule, wanted)
        names = [name for name in rule.theirs if name in stored]
        name, expected, shape = next(
            (row for row in zip(names, right, shapes, strict=True) if row[1] != row[2]), (names[0], right[0], shapes[0])
        )
        raise ShapeMismatch("wrong shape", path=path, field=name, expected=list(expected), got=list(shape))


def _before(rule: WeightRule, wanted: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The stored shapes that would have been right."""
    if isinstance(rule, Tie):
        return wanted
    return [tuple(t.shape) for t in rule.save(tuple(torch.empty(shape, device="meta") for shape in wanted))]


def _read(source: TensorSource, name: str, path: str) -> Tensor:
    tensor = source.read(name)
    if not tensor.dtype.is_floating_point:
        raise DtypeError("weights are floating point", path=path, field=name, got=str(tensor.dtype))
    return tensor


def _compare_tied(rule: Tie, ours: Tensor, theirs: Tensor, path: str) -> None:
    if not torch.equal(ours, theirs.to(device=ours.device, dtype=ours.dtype)):
        what = f"differs from {rule.same_as}, though the two are tied"
        error = ShapeMismatch(what, path=path)
        error.field = rule.theirs[0]
        error.hint = "Set tie_word_embeddings to false in the config if the output matrix is its own."
        raise error
