"""An encoder that tells what a support message is about: billing, shipping or returns.

    python examples/classify_messages.py [FOLDER]

Trains a small one in under a minute, on sentences put together from halves. A quarter of the pairs of halves are never
trained on; what is printed is the share of messages made of those that it gets right.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from small import batches, wordpiece

import cutaway

# What a message is about, and what is said of it. The two halves do not tell the label alone: "is wrong" and "is late"
# are said of bills, parcels and refunds.
HALVES = {
    "billing": (
        ["my invoice", "the bill for my {item}", "the charge on my card", "the payment of {n} dollars", "the fee",
         "the amount you took", "my credit card payment", "the price on my invoice"],
        ["is wrong", "is too high", "was made twice", "was declined", "is missing", "is not what I agreed to",
         "came {n} days late", "needs to be explained", "is not clear to me"],
    ),
    "shipping": (
        ["my parcel", "the delivery of my {item}", "the package with my {item}", "the courier with my parcel",
         "my shipment", "the tracking of my parcel", "the {item} that you shipped", "the driver"],
        ["is wrong", "is late", "has not arrived", "went to another address", "is missing", "is {n} days late",
         "does not come to my house", "was seen in another town", "is not clear to me"],
    ),
    "returns": (
        ["my refund for the {item}", "the {item} I sent back", "the return label", "the exchange of my {item}",
         "my return", "the {item} I want to return", "the replacement for my broken {item}", "sending back the {item}"],
        ["is wrong", "is late", "has not been accepted", "was refused", "is missing", "takes {n} days too long",
         "is too much work", "needs to be explained", "is not clear to me"],
    ),
}  # fmt: skip
ITEMS = ["shirt", "lamp", "phone", "chair", "kettle", "jacket", "camera", "table", "mug", "bike", "radio", "carpet"]
OPENINGS = ["", "hello, ", "hi there, ", "good morning, ", "please help: "]
ENDINGS = ["", ".", "!", "?", ", thank you", ", thanks a lot."]


def sentences(pairs: list[tuple[str, str]], n: int, source: random.Random) -> list[str]:
    """Pairs of halves, filled in and varied."""
    found = []
    for _ in range(n):
        text = " ".join(source.choice(pairs)).format(item=source.choice(ITEMS), n=source.randint(2, 60))
        found.append(source.choice(OPENINGS) + text + source.choice(ENDINGS))
    return found


def main(folder: Path) -> float:
    """Train, save, load, and give the share of held-out messages that the loaded model labels rightly."""
    source = random.Random(1)
    labels = list(HALVES)
    train: list[tuple[str, int]] = []
    held: list[tuple[str, int]] = []
    for number, (subjects, ends) in enumerate(HALVES.values()):
        pairs = [(subject, end) for subject in subjects for end in ends]
        source.shuffle(pairs)
        cut = len(pairs) // 4
        train += [(text, number) for text in sentences(pairs[cut:], 300, source)]
        held += [(text, number) for text in sentences(pairs[:cut], 60, source)]

    vocabulary = wordpiece([text for text, _ in train], folder)
    recipe = {
        "kind": "encoder",
        "d_model": 64,
        "n_heads": 4,
        "layers": 2,
        "max_positions": 64,
        "labels": labels,
        "pool": "mean",
        "dropout": 0.1,
    }
    model = cutaway.build(recipe, tokenizer=vocabulary)
    assert model.tokenizer is not None
    rows = model.tokenizer.encode_batch(text for text, _ in train)
    network = model.transformer.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.01)
    torch.manual_seed(0)
    for step, places in enumerate(batches(len(train), 32, epochs=5)):
        ids, positions = cutaway.pad([rows[i] for i in places])
        loss = F.cross_entropy(network(ids, positions), torch.tensor([train[i][1] for i in places]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}")
    network.eval()

    cutaway.save(model, folder, format="cutaway")
    again = cutaway.load(folder)
    answers = again.classify([text for text, _ in held])
    right = sum(answer[0].label == labels[number] for answer, (_, number) in zip(answers, held, strict=True))
    print(f"accuracy on {len(held)} messages made of halves never trained on together: {right / len(held):.1%}")
    print("It knows the words it was trained on and no others.")
    print(f'try: cutaway classify -m {folder} "hello, the courier with my parcel has not arrived!"')
    return right / len(held)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "messages-model"))
