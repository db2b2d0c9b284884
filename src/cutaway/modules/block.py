"""One layer: branches that read the residual stream and add to it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from cutaway.modules.attention import Attention, LayerInputs
from cutaway.modules.mlp import Mlp
from cutaway.modules.moe import Moe
from cutaway.modules.norm import Norm, norm_or_identity
from cutaway.modules.part import Named, Part
from cutaway.modules.tap import Tap
from cutaway.shapes import Stream
from cutaway.spec import AttentionSpec, BlockSpec, BranchSpec, MlpSpec, MoeSpec
from cutaway.spec.names import branch_names


class Branch(Part):
    """``x ← post_norm( x + scale · out_norm( body( pre_norm(source) ) ) )``

    Args:
        spec: its body and norms.
        d_model: width of the residual stream.
    """

    def __init__(self, spec: BranchSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.pre_norm = norm_or_identity(spec.pre_norm, d_model)
        self.body = _body(spec.body, d_model)
        self.out_norm = norm_or_identity(spec.out_norm, d_model)
        self.post_norm = norm_or_identity(spec.post_norm, d_model)

    def read(self, source: Stream, tap: Tap | None = None) -> Stream:
        """What the body gets: the source through the pre-norm. Taps ``norm_scale`` where there is one."""
        return self.pre_norm(source, tap) if isinstance(self.pre_norm, Norm) else source

    def forward(self, x: Stream, y: Stream, inputs: LayerInputs, tap: Tap | None = None) -> Stream:
        """Add to ``x`` what comes of ``y``, which was read. Taps ``in``, ``body``, ``out``, ``resid``."""
        if tap is not None:
            y = tap("in", y)
        y = self.body(y, inputs, tap) if isinstance(self.body, Attention) else self.body(y, tap)
        if tap is not None:
            y = tap("body", y)
        y = self.out_norm(y)
        if self.spec.scale != 1.0:
            y = y * self.spec.scale
        if self.spec.dropout:
            y = F.dropout(y, self.spec.dropout, self.training)
        if tap is not None:
            y = tap("out", y)
        x = self.post_norm(x + y)
        return x if tap is None else tap("resid", x)


class Block(Part):
    """The branches in order; side by side when the spec is parallel.

    Args:
        spec: its branches.
        d_model: width of the residual stream.
    """

    def __init__(self, spec: BlockSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.branches = Named({branch.name: Branch(branch, d_model) for branch in spec.branches})

    def forward(self, x: Stream, inputs: LayerInputs, tap: Tap | None = None) -> Stream:
        """Taps ``resid_in``, then each branch's under its name."""
        if tap is not None:
            x = tap("resid_in", x)
        start = y = x
        for i, (name, branch) in enumerate(self.branches.items()):
            assert isinstance(branch, Branch)
            inner = None if tap is None else tap.at(name)
            if i == 0 or not self.spec.shared_norm:
                y = branch.read(start if self.spec.parallel else x, inner)
            x = branch(x, y, inputs, inner)
        return x

    @property
    def last(self) -> str:
        """The branch whose stream leaves."""
        return self.spec.branches[-1].name

    def looked_into(self, tap: Tap) -> bool:
        """Whether anything is wanted between the stream that enters and the one that leaves."""
        inner = {branch: tap.at(branch.name) for branch in self.spec.branches}
        return any(
            scope.wants(name)
            for branch, scope in inner.items()
            if scope is not None
            for name in branch_names(branch)
            if (branch.name, name) != (self.last, "resid")
        )

    def read(self, memory: Stream, tap: Tap | None = None) -> tuple[Tensor, Tensor] | None:
        """What the block will ask of an encoder's output; None where it has no cross-attention."""
        for name, branch in self.branches.items():
            if isinstance(branch, Branch) and isinstance(branch.body, Attention) and branch.body.spec.cross:
                return branch.body.read(memory, None if tap is None else tap.at(name))
        return None


def _body(spec: AttentionSpec | MlpSpec | MoeSpec, d_model: int) -> Attention | Mlp | Moe:
    match spec:
        case AttentionSpec():
            return Attention(spec, d_model)
        case MlpSpec():
            return Mlp(spec, d_model)
        case MoeSpec():
            return Moe(spec, d_model)
