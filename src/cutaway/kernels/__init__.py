"""Native products, attention and blocks for a CPU, beside the plain PyTorch ones that define them."""

from cutaway.kernels.followed import followed
from cutaway.kernels.grouped import Grouped, grouped, grouped_natively
from cutaway.kernels.library import NativeLibrary, library, missing
from cutaway.kernels.stored import Stored, matrix_of, multiply, rounds, size_of, stored_matrix, together
from cutaway.kernels.threads import alone

__all__ = [
    "Grouped",
    "NativeLibrary",
    "Stored",
    "alone",
    "followed",
    "grouped",
    "grouped_natively",
    "library",
    "matrix_of",
    "missing",
    "multiply",
    "rounds",
    "size_of",
    "stored_matrix",
    "together",
]
