"""Which models have slopes: all but those whose products round what they multiply."""

from __future__ import annotations

import torch

from cutaway.errors import RequestError
from cutaway.kernels import rounds
from cutaway.models import Transformer


def check_slopes(model: Transformer, field: str) -> None:
    """Refuse gradients of products of whole numbers: what was differentiated would not be what the model computes.

    Weights that are stored in blocks are no hindrance: a product with them is a product with the numbers they are.

    Args:
        model: of which gradients are asked.
        field: what asks for them.

    Raises:
        RequestError: it was loaded as ``int8``; or in ``torch.inference_mode``, where nobody keeps a graph, or is now.
    """
    if torch.is_inference_mode_enabled():
        what, hint = "no gradient is kept in torch.inference_mode", "Ask outside of it; torch.no_grad is no hindrance."
        raise RequestError(what, field=field, hint=hint)
    if any(weight.is_inference() for weight in model.parameters()):
        what, hint = "the model's weights were made in torch.inference_mode", "Load it outside of that."
        raise RequestError(what, field=field, hint=hint)
    if rounds(model):
        what = "rounded products (int8) have no gradient"
        hint = 'load(…, dtype="float32") has them; so has quantize="q8_0", of the same weights.'
        raise RequestError(what, field=field, expected="a model loaded otherwise", got="int8", hint=hint)
