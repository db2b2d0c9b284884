"""One layer: named branches on the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from cutaway.spec.attention import AttentionSpec
from cutaway.spec.mlp import MlpSpec, MoeSpec
from cutaway.spec.norm import NormSpec


@dataclass(frozen=True, slots=True)
class BranchSpec:
    """What reads the stream, computes, and adds to it.

    ::

        x ← post_norm( x + scale · out_norm( body( pre_norm(source) ) ) )

    Attributes:
        name: ``"attn"``, ``"cross"``, ``"mlp"`` or ``"moe"``.
        body: what is computed.
        pre_norm, out_norm, post_norm: the three optional norms.
        scale: constant on what is added (Granite).
        dropout: share of the added vector dropped in training.
    """

    name: str
    body: AttentionSpec | MlpSpec | MoeSpec
    pre_norm: NormSpec | None = None
    out_norm: NormSpec | None = None
    post_norm: NormSpec | None = None
    scale: float = 1.0
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """The branches of a layer, in order.

    Attributes:
        branches: applied one after the other, or side by side when ``parallel``.
        parallel: every branch reads the block's input rather than the stream as it stands.
        shared_norm: the first branch's ``pre_norm`` serves all of them, in a parallel block (GPT-J, Phi).
    """

    branches: tuple[BranchSpec, ...]
    parallel: bool = False
    shared_norm: bool = False

    @property
    def attention(self) -> AttentionSpec:
        """The block's self-attention."""
        for branch in self.branches:
            if isinstance(branch.body, AttentionSpec) and not branch.body.cross:
                return branch.body
        raise LookupError("this block has no attention")

    @property
    def cross(self) -> AttentionSpec | None:
        """Its attention to what an encoder read, if there is one."""
        bodies = (branch.body for branch in self.branches)
        return next((body for body in bodies if isinstance(body, AttentionSpec) and body.cross), None)
