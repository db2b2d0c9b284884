"""An encoder that finds order numbers in messages.

    python examples/tag_orders.py [FOLDER]

Other numbers stand in the messages too: amounts, days, telephone numbers. What is printed is the share of messages,
of beginnings and ends never trained on together, in which exactly the order number is found, to the character.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from small import batches, wordpiece

import cutaway

LABELS = ["O", "B-ORDER", "I-ORDER"]
# What stands before an order number, and after it. Some messages have none.
BEFORE = ["where is my order {order}", "order {order}", "please cancel {order}", "it is about {order}",
          "my order number is {order}", "I paid {n} dollars for order {order}", "call me at {phone} about {order}",
          "the {n} chairs of order {order}", "I was charged {n} dollars for {order}", "see {order}",
          "I ordered {n} lamps, the number is {order}", "my phone number is {phone}",
          "I waited {n} days", "hello there", "thank you very much", "good morning"]  # fmt: skip
AFTER = ["", " arrived {n} days late", ", I ordered {n} by mistake", ", my phone is {phone}", " has {n} broken parts",
         " has not been shipped for {n} days", ", please call {phone}", " and that is {n} dollars too much", "?",
         ": {n} parts are missing", ", thanks for the answer of {n} minutes", " or not"]  # fmt: skip


def message(pattern: str, source: random.Random) -> tuple[str, tuple[int, int] | None]:
    """A filled-in pattern, and where its order number stands, if there is one."""
    digits = "".join(source.choice("0123456789") for _ in range(source.randint(4, 6)))
    order = source.choice(["{}", "#{}", "A-{}", "B-{}"]).format(digits)
    phone = "-".join("".join(source.choice("0123456789") for _ in range(n)) for n in (3, 4))
    values = {"order": order, "n": str(source.randint(2, 99)), "phone": phone}
    text = pattern.format(**values)
    start = pattern.find("{order}")
    if start < 0:
        return text, None
    start = len(pattern[:start].format(**values))
    return text, (start, start + len(order))


def main(folder: Path) -> float:
    """Train, save, load, and give the share of held-out messages that the loaded model tags rightly."""
    source = random.Random(2)
    pairs = [before + after for before in BEFORE for after in AFTER]
    source.shuffle(pairs)
    cut = len(pairs) // 4
    train = [message(source.choice(pairs[cut:]), source) for _ in range(2500)]
    held = [message(source.choice(pairs[:cut]), source) for _ in range(200)]

    vocabulary = wordpiece([text for text, _ in train], folder, size=300)
    recipe = {
        "kind": "encoder",
        "d_model": 64,
        "n_heads": 4,
        "layers": 2,
        "max_positions": 64,
        "labels": LABELS,
        "pool": "none",
        "dropout": 0.1,
    }
    model = cutaway.build(recipe, tokenizer=vocabulary)
    assert model.tokenizer is not None
    rows, wanted = [], []
    for text, place in train:
        ids, spans = model.tokenizer.encode_with_spans(text)
        inside = [place is not None and span is not None and place[0] <= span[0] < place[1] for span in spans]
        rows.append(ids)
        wanted.append([0 if not here else 2 if i and inside[i - 1] else 1 for i, here in enumerate(inside)])

    network = model.transformer.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.01)
    torch.manual_seed(0)
    for step, places in enumerate(batches(len(train), 32, epochs=6)):
        ids, positions = cutaway.pad([rows[i] for i in places])
        targets, _ = cutaway.pad([wanted[i] for i in places], fill=-100)  # pads have no label
        loss = F.cross_entropy(network(ids, positions).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 150 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}")
    network.eval()

    cutaway.save(model, folder, format="cutaway")
    again = cutaway.load(folder)
    found = again.tag([text for text, _ in held])
    right = sum(
        [(span.start, span.end) for span in spans] == ([] if place is None else [place])
        for spans, (_, place) in zip(found, held, strict=True)
    )
    print(f"messages of parts never trained on together, tagged exactly: {right / len(held):.1%} of {len(held)}")
    print(f'try: cutaway tag -m {folder} "my phone is 555-1234, where is A-90210?"')
    return right / len(held)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "orders-model"))
