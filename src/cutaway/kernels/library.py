"""The compiled library: found, checked, and called by its plain C names."""

from __future__ import annotations

import ctypes
import os
import warnings
from ctypes import POINTER, Array, byref, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import ResourceError
from cutaway.kernels.compiling import FOLDER, VARIANTS, sources_hash
from cutaway.kernels.layout import STRUCTS, Group, Layer, Matrix, Pass

NO_MEMORY = 2  # what a call gives back, see native/native.cpp
OTHER_SOURCES = "it was built from other sources than those that lie beside it: install cutaway again"


class NativeLibrary:
    """Functions of ``native/native.cpp``. They release Python's lock, and take turns among themselves.

    Args:
        path: of the shared library.

    Raises:
        OSError: it cannot be loaded, does not fit this processor, or was built from other sources.
    """

    def __init__(self, path: Path) -> None:
        lib = ctypes.CDLL(str(path))
        self.name = path.stem.removeprefix("_native_")
        try:
            lib.cutaway_sources.restype = ctypes.c_char_p
            made_of = lib.cutaway_sources().decode()
        except AttributeError as error:
            raise OSError(OTHER_SOURCES) from error
        if made_of != sources_hash():
            raise OSError(OTHER_SOURCES)
        if not lib.cutaway_fits():
            raise OSError("no memory for its fork handler")
        sizes = (c_int64 * len(STRUCTS))()
        lib.cutaway_sizes(sizes)
        if list(sizes) != [ctypes.sizeof(struct) for struct in STRUCTS]:
            raise OSError(OTHER_SOURCES)
        self._product, self._expand, self._layers = lib.cutaway_product, lib.cutaway_expand, lib.cutaway_layers
        self._grouped = lib.cutaway_grouped
        self._grouped.argtypes = (
            POINTER(Matrix), c_int64, POINTER(c_int64), c_int64, c_void_p, c_void_p, c_int64, c_int,
        )  # fmt: skip
        self._product.argtypes = (POINTER(Matrix), c_void_p, c_void_p, c_int64, c_int)
        self._expand.argtypes = (POINTER(Matrix), c_void_p, c_void_p, c_int64, c_int)
        self._layers.argtypes = (POINTER(Pass), POINTER(Layer), c_int64, POINTER(Group), c_int)
        for call in (self._product, self._grouped, self._expand, self._layers):
            call.restype, call.errcheck = c_int, _checked

    def __reduce__(self) -> tuple[Any, ...]:
        return library, ()

    def product(self, x: Tensor, matrix: Matrix) -> Tensor:
        """``x Wᵀ + b``. fp32 [..., cols] → [..., rows]

        Raises:
            RuntimeError: of another width, as PyTorch says it.
        """
        x = x.contiguous()
        assert x.dtype is torch.float32
        if x.shape[-1] != matrix.cols:
            raise RuntimeError(f"vectors of {x.shape[-1]} numbers by a matrix of {matrix.rows} × {matrix.cols}")
        y = torch.empty(*x.shape[:-1], matrix.rows, dtype=torch.float32)
        self._product(byref(matrix), x.data_ptr(), y.data_ptr(), x.shape[:-1].numel(), torch.get_num_threads())
        return y

    def grouped(self, x: Tensor, matrix: Matrix, n_bytes: int, counts: list[int]) -> Tensor:
        """``x Wᵀ`` of rows in groups, each with a matrix of its own. fp32 [row, cols] → [row, rows]

        Args:
            x: the rows, those of a group side by side.
            matrix: the first group's.
            n_bytes: of each matrix; they lie one after another.
            counts: rows of each group.

        Raises:
            RuntimeError: of another width, or as many rows as the groups do not have.
        """
        x = x.contiguous()
        assert x.dtype is torch.float32
        if x.shape[-1] != matrix.cols or len(x) != sum(counts) or min(counts, default=0) < 0:
            wanted = f"{sum(counts)} × {matrix.cols}"
            raise RuntimeError(f"rows of {len(x)} × {x.shape[-1]} where groups and their matrices have {wanted}")
        y = torch.empty(len(x), matrix.rows, dtype=torch.float32)
        given = (c_int64 * len(counts))(*counts)
        threads = torch.get_num_threads()
        self._grouped(byref(matrix), n_bytes, given, len(counts), x.data_ptr(), y.data_ptr(), len(x), threads)
        return y

    def expand(self, matrix: Matrix, rows: Tensor | None = None) -> Tensor:
        """Some rows of a matrix as fp32, or all of them. [...] → [..., cols]

        Raises:
            IndexError: no such row.
        """
        if rows is None:
            y = torch.empty(matrix.rows, matrix.cols, dtype=torch.float32)
            self._expand(byref(matrix), None, y.data_ptr(), matrix.rows, torch.get_num_threads())
            return y
        rows = rows.long().contiguous()
        y = torch.empty(*rows.shape, matrix.cols, dtype=torch.float32)
        if self._expand(byref(matrix), rows.data_ptr(), y.data_ptr(), rows.numel(), torch.get_num_threads()):
            raise IndexError(f"rows of a table of {matrix.rows}: {int(rows.min())} to {int(rows.max())}")
        return y

    def layers(self, given: Pass, layers: Array[Layer], groups: Array[Group]) -> None:
        """Whole blocks over a pass, one after the other."""
        self._layers(byref(given), layers, len(layers), groups, torch.get_num_threads())


def _checked(code: Any, function: Any, arguments: Any) -> Any:
    """What a call gave back.

    Raises:
        ResourceError: it had no memory for what it lays down between two layers.
    """
    if code == NO_MEMORY:
        raise ResourceError("there is too little memory for this many tokens at once", hint="Read fewer at once.")
    return code


@cache
def _found() -> NativeLibrary | str:
    wanted = os.environ.get("CUTAWAY_KERNELS", "").lower()
    if wanted in ("0", "off", "no", "false"):
        return "switched off by CUTAWAY_KERNELS"
    if wanted not in ("", "1", "on", "yes", "true", "avx2"):
        warnings.warn(f"CUTAWAY_KERNELS={wanted} says nothing: 0 is for none, avx2 for the older ones", stacklevel=4)
    fits = torch.backends.cpu.get_cpu_capability()
    for kind, (name, _) in VARIANTS.items():
        if kind == fits or (kind == "AVX2" and fits == "AVX512"):
            if wanted == "avx2" and kind != "AVX2":
                continue
            if not (FOLDER / name).exists():
                return "not built: there was no C++ compiler when cutaway was installed"
            try:
                return NativeLibrary(FOLDER / name)
            except OSError as error:
                warnings.warn(f"the native kernels are not used: {error}", stacklevel=4)
                return str(error)
    return f"none are written for this processor ({fits})"


def library() -> NativeLibrary | None:
    """The library, or None where there is none; :func:`missing` says why."""
    found = _found()
    return found if isinstance(found, NativeLibrary) else None


def missing() -> str:
    """Why there is no library; empty where there is one."""
    found = _found()
    return found if isinstance(found, str) else ""
