"""What a form of the answer costs: a vocabulary once, a grammar once a call, a mask and a step for each token.

python benchmarks/constrain.py [MODEL]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

import cutaway
from cutaway.generation.constrain import Constraint, Guides, mask

FORMS = {
    "any JSON": Constraint("schema", "{}"),
    "an object": Constraint(
        "schema",
        json.dumps(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
                "required": ["name", "age"],
            }
        ),
    ),
    "expression": Constraint("regex", r"[A-Z][a-z]+( [A-Z][a-z]+){1,5}: [0-9]{4}-[0-9]{2}"),
}


def timed(call: Callable[[], object]) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    """Print a line for each form: random walks of 40 tokens over logits that are all alike but for noise."""
    model = cutaway.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    tokenizer, size, ends = model.tokenizer, model.spec.vocab_size, frozenset(model.settings.eos_ids)
    assert tokenizer is not None
    first = timed(lambda: Guides(FORMS["any JSON"], tokenizer, size, ends))
    print(f"vocabulary of {size:,} tokens: {first:.0f} ms, once")
    source = torch.Generator().manual_seed(0)
    for name, form in FORMS.items():
        made = timed(lambda form=form: Guides(form, tokenizer, size, ends))
        guides, masks, steps = Guides(form, tokenizer, size, ends), [], []
        for _ in range(10):
            guide = guides.new()
            for _ in range(40):
                x = torch.randn(1, size, generator=source)
                masks.append(timed(lambda x=x, guide=guide: mask(x, [guide])))
                token = int(mask(x, [guide]).argmax())
                start = time.perf_counter()
                over = guide.take(token)
                steps.append(1000 * (time.perf_counter() - start))
                if over:
                    break
        print(
            f"{name:<12} grammar {made:6.1f} ms   mask median {statistics.median(masks):.2f} ms, worst "
            f"{max(masks):.1f} ms   step median {statistics.median(steps):.2f} ms, worst {max(steps):.1f} ms"
        )
    for how in ({}, {"schema": True}):
        start, answer = time.perf_counter(), model.generate("A list:", temperature=0, max_tokens=24, **how)
        took = 1000 * (time.perf_counter() - start) / len(answer.tokens)
        print(f"{'with' if how else 'without'} a schema: {took:.1f} ms a token")


if __name__ == "__main__":
    main()
