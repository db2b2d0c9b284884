"""The transformer of 2017, encoder and decoder, learning to reverse strings and to copy them.

    python examples/reverse_and_copy.py [FOLDER]

``r hello`` becomes ``olleh`` and ``c hello`` stays ``hello``. The model is that of the paper, in small: sinusoidal
positions, LayerNorm after each sum, ReLU, a table shared by both sides, the paper's learning rate, and the mean of the
last five checkpoints. What is printed is the share of strings never trained on that it gets right to the last
character.
"""

from __future__ import annotations

import random
import string
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from small import characters

import cutaway

LONGEST, STEPS, BATCH, WARMUP = 10, 2500, 64, 600
AVERAGED, APART = 5, 60  # checkpoints whose mean is the model, and steps between them (section 6.1 of the paper)


def example(source: random.Random) -> tuple[str, str]:
    """What is read and what is to be written."""
    word = "".join(source.choice(string.ascii_lowercase) for _ in range(source.randint(1, LONGEST)))
    return (f"r {word}", word[::-1]) if source.random() < 0.5 else (f"c {word}", word)


def main(folder: Path) -> float:
    """Train, save, load, and give the share of new strings that the loaded model writes rightly."""
    source = random.Random(3)
    held = list(dict.fromkeys(example(source) for _ in range(220)))[:200]
    never = {text for text, _ in held}

    vocabulary = characters(string.ascii_lowercase + " ", folder)
    recipe = {
        "d_model": 64,
        "n_heads": 4,
        "layers": 2,
        "encoder_layers": 2,
        "d_ff": 128,
        "max_positions": 32,
        "positions": "sinusoidal",
        "norm": "layer",
        "where": "post",
        "activation": "relu",
        "gated": False,
        "bias": True,
        "embed_scale": 8.0,
    }
    model = cutaway.build(recipe, tokenizer=vocabulary)
    assert model.tokenizer is not None
    tokenizer, start = model.tokenizer, model.tokenizer.bos_id
    assert start is not None
    model.settings = replace(model.settings, decoder_start_id=start)
    network = model.transformer.train()
    optimizer = torch.optim.Adam(network.parameters(), betas=(0.9, 0.98), eps=1e-9)
    kept: list[dict[str, torch.Tensor]] = []
    for step in range(1, STEPS + 1):
        rate = 64**-0.5 * min(step**-0.5, step * WARMUP**-1.5)  # section 5.3 of the paper
        for group in optimizer.param_groups:
            group["lr"] = rate
        pairs = [pair for pair in (example(source) for _ in range(BATCH)) if pair[0] not in never]
        ids, positions = cutaway.pad(tokenizer.encode_batch(text for text, _ in pairs))
        answers = tokenizer.encode_batch(answer for _, answer in pairs)
        mine, places = cutaway.pad([[start, *answer[:-1]] for answer in answers])
        wanted, _ = cutaway.pad(answers, fill=-100)
        logits = network(mine, places, source=network.read(ids, positions))
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 250 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}")
        if (STEPS - step) % APART == 0 and STEPS - step < AVERAGED * APART:
            kept.append({name: weight.detach().clone() for name, weight in network.state_dict().items()})
    network.load_state_dict({name: torch.stack([one[name] for one in kept]).mean(0) for name in kept[0]})
    network.eval()

    cutaway.save(model, folder, format="cutaway")
    again = cutaway.load(folder)
    written = again.generate([text for text, _ in held], max_tokens=LONGEST + 2, temperature=0)
    right = sum(one.text == answer for one, (_, answer) in zip(written, held, strict=True))
    print(f"strings never trained on, right to the last character: {right / len(held):.1%} of {len(held)}")
    print(f'try: cutaway run -m {folder} "r transform"')
    return right / len(held)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "reverse-model"))
