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
SOURCES, LIBRARY = FOLDER / "native", FOLDER / "_native.so"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-mavx2", "-mfma", "-mf16c", "-ffp-contract=off")


def sources_hash() -> str:
    """What the library says it was made of."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def compile_library() -> str:
    """Make the library; why it could not be made, or nothing."""
    if platform.machine().lower() not in ("x86_64", "amd64") or sys.platform == "win32":
        return f"no kernels are written for {platform.machine()} on {sys.platform}"
    compiler = next((c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and shutil.which(c)), None)
    if compiler is None:
        return "there is no C++ compiler (c++, g++, clang++, or CXX)"
    made = LIBRARY.with_suffix(f".{os.getpid()}.tmp")
    define = f'-DCUTAWAY_SOURCES="{sources_hash()}"'
    words = [compiler, *FLAGS, define, str(SOURCES / "native.cpp"), "-o", str(made)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        made.unlink(missing_ok=True)
        return f"{compiler} failed: {(done.stderr.strip() or str(done.returncode)).splitlines()[0]}"
    made.replace(LIBRARY)  # a process that has the old one open keeps it
    return ""


if __name__ == "__main__":
    sys.exit(compile_library() or None)
