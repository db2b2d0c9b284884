#!/usr/bin/env bash
# On a CUDA machine, in less than six minutes and without a network: is bf16 right, and how fast is it beside the
# machine's own limits? Needs torch with CUDA; writes gpu.md and gpu.json into $OUT (benchmarks/results by default).
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
exec timeout 350 "${PYTHON:-python3}" -m benchmarks.gpu --out "${OUT:-benchmarks/results}" "$@"
