"""``cutaway doctor``: what this installation is, and whether it computes right."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from cutaway.cli.common import Settings
from cutaway.cli.failures import INTERNAL
from cutaway.cli.options import shared
from cutaway.cli.text import Cell, nbytes, table

_PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "huggingface_hub", "jinja2", "click", "rich")


@click.command("doctor")
@shared("offline", "output")
@click.pass_context
def command(ctx: click.Context, settings: Settings, /) -> None:
    """Say what this installation is, and let it prove in a few seconds that it computes right.

    Nothing is fetched. Exit code 70 if the self-test fails.
    """
    from cutaway.cli import selftest

    facts = _facts(settings)
    checks = selftest.run()
    good = all(check.ok for check in checks)
    if settings.json:
        tests = [
            {"name": c.name, "difference": c.difference, "ok": c.ok, "seconds": round(c.seconds, 4)} for c in checks
        ]
        settings.emit_json({**facts, "self_test": tests, "ok": good})
    else:
        look = settings.look
        rows: list[list[str | Cell]] = []
        for section, entries in facts.items():
            for i, (name, value) in enumerate(entries.items()):
                rows.append(
                    [Cell(section if i == 0 else "", "bold"), name.replace("_", " "), Cell(_said(value), "cyan")]
                )
        proofs: list[list[str | Cell]] = []
        for check in checks:
            mark = Cell("ok" if check.ok else "FAILED", "green" if check.ok else "bold red")
            proofs.append([mark, check.name, Cell(f"{check.difference:.1e} apart, {check.seconds:.2f} s", "dim")])
        # a path that is cut short cannot be copied
        lines = table(rows, "lll", replace(look, fits=False))
        lines += ["", look.paint("self-test", "bold"), *table(proofs, "lll", look, gives=1)]
        settings.emit("\n".join(lines) + "\n")
    if not good:
        settings.note("the self-test failed: this installation computes wrong numbers; please report it")
        ctx.exit(INTERNAL)


def _said(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return str(value)


def _facts(settings: Settings) -> dict[str, dict[str, Any]]:
    import torch

    from cutaway import __version__
    from cutaway.kernels import library, missing

    versions: dict[str, Any] = {"cutaway": __version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in _PACKAGES}
    processor: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "blas": _blas(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "native_kernels": missing() or (native.name if (native := library()) else None),
        "memory": _memory(),
        "compiler": next((path for name in ("cc", "gcc", "clang", "cl") if (path := shutil.which(name))), None),
    }
    devices = {f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    if torch.backends.mps.is_available():
        devices["mps"] = "Apple GPU"
    return {
        "versions": versions,
        "machine": processor | {"devices": ", ".join(f"{k} {v}" for k, v in devices.items()) or "cpu alone"},
        "folders": _folders(settings),
    }


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cores() -> int:
    """Those this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


def _blas() -> str:
    import torch

    for name, there in (
        ("MKL", torch.backends.mkl.is_available()),
        ("OpenBLAS", "open" in torch.__config__.show().lower()),
    ):
        if there:
            return name + (" with oneDNN" if torch.backends.mkldnn.is_available() else "")
    return "unknown"


def _memory() -> str | None:
    """What the machine has, or what this process's group may have of it."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return nbytes(total)


def _folders(settings: Settings) -> dict[str, Any]:
    from huggingface_hub import constants

    from cutaway.checkpoints.catalog import ENTRIES, is_here
    from cutaway.checkpoints.home import home, is_offline

    place = home()
    near = next((folder for folder in (place, *place.parents) if folder.exists()), place)
    return {
        "cutaway_home": str(place),
        "writable": os.access(near, os.W_OK),
        "free": nbytes(shutil.disk_usage(near).free),
        "hub_cache": constants.HF_HUB_CACHE,
        "offline": is_offline(settings.offline),
        "models_here": ", ".join(entry.name for entry in ENTRIES if is_here(entry)) or "none",
        "executable": sys.executable,
    }
