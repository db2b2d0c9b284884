"""GPT-2 with some of its quantities kept: cutaway, TransformerLens or nnsight."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stage import THREADS, outlet, play

out = outlet()
import torch  # noqa: E402

torch.set_num_threads(THREADS)
words = json.loads(sys.argv[1])
LAYERS = 12
kept: Mapping[str, Any] = {}


def status(word: str) -> int:
    """A line of this process's own status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(word)).split()[1]) * 1024


if words["library"] == "cutaway":
    import cutaway
    from cutaway.inspection import trace
    from cutaway.kernels import missing

    model = cutaway.load(words["path"])
    NAMES = {
        "stream": "decoder.layers.{}.resid_in",
        "z": "decoder.layers.{}.attn.z",
        "weights": "decoder.layers.{}.attn.weights",
        "attn out": "decoder.layers.{}.attn.out",
        "neurons": "decoder.layers.{}.mlp.act",
        "mlp out": "decoder.layers.{}.mlp.out",
    }
    version, kernels = cutaway.__version__, missing() or "yes"

    def plain(ids: list[int]) -> torch.Tensor:
        """A pass that nobody watches."""
        return model.logits(ids)  # type: ignore[return-value]

    def capture(ids: list[int], names: dict[str, str]) -> dict[str, torch.Tensor]:
        """Logits among what is kept, as the others give them."""
        found = trace(model.transformer, [ids], ("logits", *names.values()))
        return {"logits": found["logits"], **{ours: found[name] for ours, name in names.items()}}

elif words["library"] == "TransformerLens":
    import transformers
    from transformer_lens.model_bridge import TransformerBridge

    theirs = transformers.GPT2LMHeadModel.from_pretrained(words["path"], attn_implementation="eager").eval()
    cutter = transformers.AutoTokenizer.from_pretrained(str(Path(words["path"]) / "words"))
    model = TransformerBridge.boot_transformers(words["path"], hf_model=theirs, tokenizer=cutter, device="cpu")
    NAMES = {
        "stream": "blocks.{}.hook_resid_pre",
        "z": "blocks.{}.attn.hook_z",
        "weights": "blocks.{}.attn.hook_pattern",
        "attn out": "blocks.{}.hook_attn_out",
        "neurons": "blocks.{}.mlp.hook_post",
        "mlp out": "blocks.{}.hook_mlp_out",
    }
    import importlib.metadata

    version, kernels = importlib.metadata.version("transformer-lens"), ""

    def plain(ids: list[int]) -> torch.Tensor:
        """A pass that nobody watches."""
        with torch.no_grad():
            return model(torch.tensor([ids]))

    def capture(ids: list[int], names: dict[str, str]) -> dict[str, torch.Tensor]:
        """Their own way to keep named quantities."""
        wanted = set(names.values())
        with torch.no_grad():
            logits, cache = model.run_with_cache(torch.tensor([ids]), names_filter=lambda name: name in wanted)
        return {"logits": logits, **{ours: cache[name] for ours, name in names.items()}}

else:
    import nnsight
    import transformers

    theirs = transformers.GPT2LMHeadModel.from_pretrained(words["path"], attn_implementation="eager").eval()
    quick = transformers.GPT2LMHeadModel.from_pretrained(words["path"], attn_implementation="sdpa").eval()
    model, fast = nnsight.NNsight(theirs), nnsight.NNsight(quick)
    NAMES = {word: word + " {}" for word in ("stream", "z", "weights", "attn out", "neurons", "mlp out")}
    version, kernels = nnsight.__version__, ""

    def plain(ids: list[int]) -> torch.Tensor:
        """A pass that nobody watches."""
        with torch.no_grad():
            return quick(torch.tensor([ids])).logits

    def capture(ids: list[int], names: dict[str, str]) -> dict[str, torch.Tensor]:
        """Eager attention only where its weights are asked for."""
        wanted = [(word, *word.rsplit(" ", 1)) for word in names]
        one = model if any(kind == "weights" for _, kind, _ in wanted) else fast
        found: dict[str, Any] = {}
        with torch.no_grad(), one.trace(torch.tensor([ids])):
            for layer in range(LAYERS):  # in the order of the computation
                block = one.transformer.h[layer]
                for kind in ("stream", "z", "weights", "attn out", "neurons", "mlp out"):
                    word = f"{kind} {layer}"
                    if word not in names:
                        continue
                    if kind == "stream":
                        value = block.input
                    elif kind == "z":
                        value = block.attn.c_proj.input
                    elif kind == "weights":
                        value = block.attn.output[1]
                    elif kind == "attn out":
                        value = block.attn.output[0]
                    elif kind == "neurons":
                        value = block.mlp.act.output
                    else:
                        value = block.mlp.output
                    found[word] = value.save()
            found["logits"] = one.lm_head.output.save()
        return found


def asked(kinds: list[str], layers: list[int]) -> dict[str, str]:
    """Our word for each quantity, and theirs."""
    return {f"{kind} {layer}": NAMES[kind].format(layer) for layer in layers for kind in kinds}


def check(ids: list[int], kinds: list[str], layers: list[int]) -> dict[str, Any]:
    """Some numbers of each quantity."""
    found = capture(ids, asked(kinds, layers))
    return {"numbers": {word: t.detach().flatten()[:: max(1, t.numel() // 50)].tolist() for word, t in found.items()}}


def watch(ids: list[int], kinds: list[str], layers: list[int]) -> dict[str, Any]:
    """Seconds of a capture, by the clock and of the processor."""
    names = asked(kinds, layers)
    began, used = time.perf_counter(), time.process_time()
    found = capture(ids, names)
    times = {"seconds": time.perf_counter() - began, "processor": time.process_time() - used}
    assert len(found) == len(names) + 1
    return times


def unwatched(ids: list[int]) -> dict[str, Any]:
    """Those of a plain pass."""
    began, used = time.perf_counter(), time.process_time()
    logits = plain(ids)
    times = {"seconds": time.perf_counter() - began, "processor": time.process_time() - used}
    assert logits.shape[1] == len(ids)
    return times


def memory(ids: list[int], kinds: list[str], layers: list[int]) -> dict[str, Any]:
    """Bytes that the process grows by at its largest in a capture, once weights and libraries are there."""
    names = asked(kinds, layers)
    plain(ids[:8])
    capture(ids[:8], names)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    found = capture(ids, names)
    assert len(found) == len(names) + 1
    return {"peak": status("VmHWM") - before, "kept": sum(t.nbytes for t in found.values())}


facts = {"version": f"{words['library']} {version}, torch {torch.__version__}", "kernels": kernels}
play(facts, {"check": check, "watch": watch, "plain": unwatched, "memory": memory}, out)
