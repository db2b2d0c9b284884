"""Which quantities have the form of the stream, and what the head would have to be given of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from cutaway.errors import RequestError
from cutaway.inspection.listed import names_listed
from cutaway.inspection.readout import check_whole_sum, held, main_stack, spread
from cutaway.models import Transformer
from cutaway.modules.block import Block, Branch
from cutaway.modules.norm import Norm
from cutaway.spec import ModelSpec
from cutaway.spec.names import match, tap_names

Kind: TypeAlias = Literal["stream", "translated", "part"]
_BY_NUMBER = {"head_out": "head", "experts": "expert"}


@runtime_checkable
class Translator(Protocol):
    """Brings the stream at a point to the form that it has at the end: see ``tuned_lens``."""

    def knows(self, name: str) -> bool:
        """Whether there is a translation for the stream of this name."""
        ...

    def translate(self, name: str, x: Tensor) -> Tensor:
        """[..., d_model] → the same."""
        ...


def readable(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Names that the head could read: the stream on its way to it, and what is added to it."""
    every = {name: axes for name, axes in tap_names(spec).items() if axes[-1] == "d_model" and "query" in axes}
    start = ("embed.", f"{spec.main}.")
    last = ("resid_in", "resid", "out", "head_out", "experts", "tokens", "positions", "types")
    return {k: axes for k, axes in every.items() if k.startswith(start) and k.rsplit(".", 1)[1] in last}


def is_part(name: str, spec: ModelSpec) -> bool:
    """Whether this is something that is added to the stream, rather than the stream."""
    last = name.rsplit(".", 1)[1]
    return last not in ("resid_in", "resid") and name not in ("embed.out", f"{spec.main}.norm.out")


def default_points(spec: ModelSpec) -> list[str]:
    """The stream before each layer, and at the end."""
    layers = range(len(spec.stacks[spec.main].layers)) if spec.stacks else ()
    return [*(f"{spec.main}.layers.{i}.resid_in" for i in layers), f"{spec.main}.norm.out"]


def point_names(model: Transformer, patterns: Sequence[str]) -> list[str]:
    """The readable names that patterns match, in the order of the computation.

    Raises:
        NameNotFound: a pattern matches none.
        RequestError: a part of a stream that is no sum.
    """
    found = match(names_listed("at", patterns), readable(model.spec))
    for name in found:
        if is_part(name, model.spec):
            check_whole_sum(model)
            if name.startswith("embed.") and model.spec.embedding.norm is not None:
                hint = "Look at embed.out."
                raise RequestError("the embeddings' sum is normed: it has no parts", field="at", got=name, hint=hint)
    return found


def branch_of(model: Transformer, name: str) -> Branch:
    """The branch that a name such as ``decoder.layers.3.attn.z`` is of."""
    stack, _, layer, branch = name.split(".")[:4]
    block = (model.decoder if stack == "decoder" else model.encoder).layers[int(layer)]
    assert isinstance(block, Block)
    found = block.branches[branch]
    assert isinstance(found, Branch)
    return found


def short(name: str) -> str:
    """A name as a label: ``decoder.layers.3.attn.resid`` → ``3 attn.resid``, the end → ``end``."""
    parts = name.split(".")
    if parts[-2:] == ["norm", "out"] and len(parts) == 3:
        return "end"
    if len(parts) > 2 and parts[1] == "layers":
        rest = ".".join(parts[3:])
        return parts[2] if rest == "resid_in" else f"{parts[2]} {rest}"
    return name


@dataclass(frozen=True, slots=True)
class Vectors:
    """One thing to read at several positions.

    Attributes:
        name: of the quantity. label: the same with a head's or an expert's number.
        kind: how it is to be read.
        x: the stream, or of a part, what the last norm makes of it with its scale held. [position, d_model]
    """

    name: str
    label: str
    kind: Kind
    x: Tensor

    @staticmethod
    def needs(model: Transformer, names: Sequence[str]) -> list[str]:
        """What else has to be recorded to read these."""
        spec, more = model.spec, []
        parts = [name for name in names if is_part(name, spec)]
        if parts and isinstance(main_stack(model).norm, Norm):
            more.append(f"{spec.main}.norm.norm_scale")
        return [*more, *(f"{name.rsplit('.', 1)[0]}.body" for name in parts if _normed(model, name))]


def _normed(model: Transformer, name: str) -> bool:
    """Whether a part of a branch's sum goes through that branch's own norm before it is added."""
    return name.rsplit(".", 1)[1] in _BY_NUMBER and branch_of(model, name).spec.out_norm is not None


def vectors(
    model: Transformer,
    seen: Mapping[str, Tensor],
    names: Sequence[str],
    places: Sequence[int],
    tuned: Translator | None = None,
) -> list[Vectors]:
    """What of one text is to be read, in the order of the computation, the end always among it.

    Args:
        model: what was run.
        seen: what was recorded, of one row.
        names: of the quantities to read.
        places: the positions to read.
        tuned: translates the stream where it knows how.
    """
    end = f"{model.spec.main}.norm.out"
    found = []
    for name in dict.fromkeys((*names, end)):
        x = seen[name][0, list(places)]
        if not is_part(name, model.spec):
            known = tuned is not None and name != end and tuned.knows(name)
            x = tuned.translate(name, x) if known and tuned is not None else x
            found.append(Vectors(name, name, "translated" if known else "stream", x))
            continue
        last = name.rsplit(".", 1)[1]
        each = x.unbind(1) if last in _BY_NUMBER else (x,)
        for i, one in enumerate(each):
            label = f"{name}[{i}]" if last in _BY_NUMBER else name
            found.append(Vectors(name, label, "part", _added(model, seen, name, one, places)))
    return found


def _added(model: Transformer, seen: Mapping[str, Tensor], name: str, x: Tensor, places: Sequence[int]) -> Tensor:
    """What the head is given of a part: through its branch's norm and factor and the last norm, their scales held."""
    if name.rsplit(".", 1)[1] in _BY_NUMBER:
        branch = branch_of(model, name)
        if branch.spec.out_norm is not None:
            body = seen[f"{name.rsplit('.', 1)[0]}.body"][0, list(places)]
            x = held(branch.out_norm, x, spread(branch.spec.out_norm, body))
        x = x * branch.spec.scale
    norm = main_stack(model).norm
    if not isinstance(norm, Norm):
        return x
    return held(norm, x, seen[f"{model.spec.main}.norm.norm_scale"][0, list(places)]).to(x.dtype)
