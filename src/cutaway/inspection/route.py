"""Which parts the stream is the sum of, at any of its points."""

from __future__ import annotations

from dataclasses import dataclass

from cutaway.errors import NameNotFound, RequestError
from cutaway.inspection.linear import INSTEAD
from cutaway.models import Transformer
from cutaway.modules.attention import Attention
from cutaway.modules.block import Block, Branch
from cutaway.spec.names import match


@dataclass(frozen=True, slots=True)
class Route:
    """The parts whose sum the stream is at some point.

    Attributes:
        stack: ``"encoder"`` or ``"decoder"``.
        embed: the embedding's scope.
        branches: name and module of each, in order.
        end: the name of the stream there.
    """

    stack: str
    embed: str
    branches: tuple[tuple[str, Branch], ...]
    end: str

    @property
    def feeds(self) -> dict[str, None]:
        """Names of the feed-forward branches, experts among them."""
        return {name: None for name, branch in self.branches if not isinstance(branch.body, Attention)}

    @property
    def attentions(self) -> dict[str, None]:
        """Names of the branches that attend."""
        return {name: None for name, branch in self.branches if isinstance(branch.body, Attention)}


def route_to(model: Transformer, at: str | None) -> Route:
    """What comes before a point of the stream.

    Raises:
        NameNotFound: there is no such point.
        RequestError: a norm of the stream itself comes before it.
    """
    points: dict[str, tuple[str, int]] = {}
    before: dict[str, list[tuple[str, Branch]]] = {}
    for stack in model.spec.stacks:
        branches = before.setdefault(stack, [])
        for i, block in enumerate(model.get_submodule(f"{stack}.layers").children()):
            assert isinstance(block, Block)
            points[f"{stack}.layers.{i}.resid_in"] = (stack, len(branches))
            for name, branch in block.branches.items():
                assert isinstance(branch, Branch)
                branches.append((f"{stack}.layers.{i}.{name}", branch))
                points[f"{stack}.layers.{i}.{name}.resid"] = (stack, len(branches))
    end = [name for name, (stack, _) in points.items() if stack == model.spec.main][-1]
    found = match([end if at is None else at], points)
    if len(found) > 1:
        raise NameNotFound("several points match", field="at", expected="one", got=len(found), hint=f"{found[0]}, …")
    stack, n = points[found[0]]
    for name, branch in before[stack][:n]:
        if branch.spec.post_norm is not None:
            what = "the stream is no sum of what was added to it: a norm follows each addition (post_norm)"
            raise RequestError(what, field=name, hint=INSTEAD)
    own = model.spec.source is not None and stack == "encoder"
    return Route(stack, "source_embed" if own else "embed", tuple(before[stack][:n]), found[0])
