"""Run by an interpreter that has llama-cpp-python: GGUF files quantized by llama.cpp.

Takes ``[{"source": …, "out": …, "type": 15, "pure": false, "again": false}, …]`` on standard input.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Read the jobs, write the files."""
    import llama_cpp

    os.dup2(2, 1)  # llama.cpp prints wherever it likes
    for job in json.load(sys.stdin):
        how = llama_cpp.llama_model_quantize_default_params()
        how.ftype, how.pure, how.nthread = job["type"], job["pure"], 1
        how.allow_requantize = job.get("again", False)
        code = llama_cpp.llama_model_quantize(job["source"].encode(), job["out"].encode(), how)
        if code:
            sys.exit(f"{job}: {code}")


if __name__ == "__main__":
    main()
