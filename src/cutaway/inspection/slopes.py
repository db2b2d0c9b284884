"""Which models have slopes: all but those whose products round what they multiply."""

from __future__ import annotations

from cutaway.errors import RequestError
from cutaway.kernels import Stored
from cutaway.models import Transformer


def check_slopes(model: Transformer, field: str) -> None:
    """Refuse gradients of products of whole numbers: what was differentiated would not be what the model computes.

    Weights that are stored in blocks are no hindrance: a product with them is a product with the numbers they are.

    Args:
        model: of which gradients are asked.
        field: what asks for them.

    Raises:
        RequestError: it was loaded as ``int8``.
    """
    if any(isinstance(weight, Stored) and weight.rounds for weight in model.parameters()):
        what = "rounded products (int8) have no gradient"
        hint = 'load(…, dtype="float32") has them; so has quantize="q8_0", of the same weights.'
        raise RequestError(what, field=field, expected="a model loaded otherwise", got="int8", hint=hint)
