"""What a pass must cost: bytes over how fast memory is read, and operations over how fast they are done.

The larger of the two is the floor (Williams, Waterman & Patterson 2009, "Roofline"); the two limits are measured in
the same minutes as what is compared with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutaway.measure import cache_bytes, step_bytes
from cutaway.model import Model


@dataclass(frozen=True)
class Machine:
    """Bytes and operations a second."""

    bytes_per_s: float
    operations_per_s: float

    def seconds(self, nbytes: float, operations: float) -> float:
        """The floor of a pass."""
        return max(nbytes / self.bytes_per_s, operations / self.operations_per_s)


def matrices(model: Model) -> tuple[int, int]:
    """Weights that every token is multiplied with: of the layers, and of the head."""
    layers = sum(p.numel() for p in model.transformer.decoder.parameters() if p.dim() == 2)
    return layers, model.spec.vocab_size * model.spec.d_model


def scores(model: Model, keys: int) -> int:
    """Operations of one query in all layers: a product with each key, and one with each value."""
    layers = (layer.attention for layer in model.spec.decoder.layers)
    return sum(4 * a.n_heads * a.d_head * min(keys, a.mask.window or keys) for a in layers)


def step(model: Model, machine: Machine, context: int, rows: int = 1) -> float:
    """Seconds of a token in each row, after so much context."""
    layers, head = matrices(model)
    nbytes = step_bytes(model.transformer) + rows * cache_bytes(model.spec, context, 4)
    return machine.seconds(nbytes, rows * (2 * (layers + head) + scores(model, context)))


def prompt(model: Model, machine: Machine, length: int) -> float:
    """Seconds of a prompt, for its last logits."""
    layers, head = matrices(model)
    operations = 2 * layers * length + 2 * head + sum(scores(model, n) for n in range(1, length + 1))
    return machine.seconds(step_bytes(model.transformer) + cache_bytes(model.spec, length, 4), operations)
