"""What taps cost where nobody looks: instructions of a layer's readable block, with and without them in its source.

python -m benchmarks.untapped [--width 768] [--tokens 1 64]

The processor's instructions are counted by valgrind (``apt install valgrind``), in a process of its own for each: of
45 passes less those of 5, without garbage collection. It knows no AVX-512, so libraries are told to do without; time
is not looked at.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PASSES = (5, 45)

PROGRAM = """
import gc, sys, importlib, torch
torch.set_num_threads(1); gc.disable()
package, width, tokens, passes = sys.argv[1], *map(int, sys.argv[2:])
from cutaway.cache.mask import plan_mask
from cutaway.cache.passing import PassingView
from cutaway.spec import MaskRule
from cutaway.spec.recipe import expand
spec = expand({"d_model": width, "n_heads": width // 64, "layers": 1, "vocab_size": 64, "norm": "layer",
               "positions": "learned", "max_positions": 1024, "activation": "gelu_tanh"}).decoder.layers[0]
block = importlib.import_module(package + ".block").Block(spec, width).eval()
inputs = importlib.import_module(package + ".attention").LayerInputs
torch.manual_seed(0)
for weight in block.parameters():
    torch.nn.init.normal_(weight, 0, 0.02)
at = torch.arange(tokens)[None]
view = PassingView(plan_mask(MaskRule(), at, at, None, None, torch.device("cpu")))
x = torch.randn(1, tokens, width)
with torch.no_grad():
    for _ in range(passes):
        y = block(x, inputs(view))
"""


def instructions(package: str, width: int, tokens: int, passes: int, path: str) -> int:
    """Of a whole process."""
    plain = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "OMP_NUM_THREADS": "1"}
    plain |= {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "CUTAWAY_KERNELS": "0", "DNNL_MAX_CPU_ISA": "AVX2"}
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, "-c", PROGRAM]
    run = subprocess.run(
        [*command, package, *map(str, (width, tokens, passes))],
        env={**os.environ, **plain},
        capture_output=True,
        text=True,
    )
    found = re.search(r"Collected : (\d+)", run.stderr)
    if found is None:
        raise SystemExit(run.stderr[-2000:])
    return int(found[1])


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 64])
    words = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.inspection import bare

    with tempfile.TemporaryDirectory() as folder:
        bare.write(Path(folder))
        path = f"{ROOT / 'src'}:{folder}"
        for tokens in words.tokens:
            found = {}
            for package in ("cutaway.modules", "bare"):
                few, many = (instructions(package, words.width, tokens, n, path) for n in PASSES)
                found[package] = (many - few) / (PASSES[1] - PASSES[0])
            tapped, plain = found.values()
            share = 100 * (tapped / plain - 1)
            print(
                f"{tokens} tokens, width {words.width}: {tapped:,.0f} instructions, bare {plain:,.0f}: {share:+.3f} %"
            )


if __name__ == "__main__":
    main()
