"""Making the native library with the system's C++ compiler: ``python -m cutaway.kernels.compiling``.

The package's own build (``hatch_build.py``) does it too. Nothing but the standard library is used here.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = FOLDER / "native"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fno-gnu-unique", "-ffp-contract=off")
# What torch calls a processor → the library for it and the instructions that it may use, the best first.
VARIANTS = {
    "AVX512": ("_native_avx512.so", "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq"),
    "AVX2": ("_native_avx2.so", "-mavx2 -mfma -mf16c"),
}


def sources_hash() -> str:
    """What the library says it was made of."""
    digest = hashlib.sha256(f"{FLAGS} {VARIANTS}".encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def compile_libraries() -> str:
    """Make the libraries; why they could not be made, or nothing."""
    if platform.machine().lower() not in ("x86_64", "amd64") or sys.platform == "win32":
        return f"no kernels are written for {platform.machine()} on {sys.platform}"
    compiler = next((c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and shutil.which(c)), None)
    if compiler is None:
        return "there is no C++ compiler (c++, g++, clang++, or CXX)"
    define, source = f'-DCUTAWAY_SOURCES="{sources_hash()}"', str(SOURCES / "native.cpp")
    running = []
    for name, instructions in VARIANTS.values():
        made = FOLDER / f"{name}.{os.getpid()}.tmp"
        words = [compiler, *FLAGS, *instructions.split(), define, source, "-o", str(made)]
        running.append((FOLDER / name, made, subprocess.Popen(words, stderr=subprocess.PIPE, text=True)))
    why = ""
    for target, made, process in running:
        _, said = process.communicate()
        if process.returncode:
            why = f"{compiler} failed: {(said.strip() or str(process.returncode)).splitlines()[0]}"
            made.unlink(missing_ok=True)
        else:
            made.replace(target)  # a process that has the old one open keeps it
    return why


def remove_libraries() -> None:
    """Leave none that was made before."""
    for name, _ in VARIANTS.values():
        (FOLDER / name).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(compile_libraries() or None)
