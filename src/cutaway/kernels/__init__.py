"""Native products, attention and blocks for a CPU, beside the plain PyTorch ones that define them."""

from cutaway.kernels.library import NativeLibrary, library, missing
from cutaway.kernels.stored import Stored, matrix_of, multiply, rounds, size_of, stored_matrix, together
from cutaway.kernels.threads import alone

__all__ = [
    "NativeLibrary",
    "Stored",
    "alone",
    "library",
    "matrix_of",
    "missing",
    "multiply",
    "rounds",
    "size_of",
    "stored_matrix",
    "together",
]
