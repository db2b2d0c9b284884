"""A weight that stays as its file has it: half floats, or blocks of 8, 6, 5 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cutaway.errors import RequestError
from cutaway.kernels.followed import followed, untransformed, wrapped
from cutaway.kernels.layout import Matrix
from cutaway.kernels.library import NativeLibrary, library

# A GGUF's number of a format (ggml_type) → numbers in a block, and its bytes.
FORMATS = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    30: (1, 2),  # BF16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
}
Q8_0, TOGETHER = 8, 1000  # the second is no GGUF's: Q8_0, sixteen rows together (see native/rounded.h)
ROWS = 16  # that lie together

READ_ONLY = "stored weights cannot be written to or moved; load with dtype='float32'"
NO_GRADIENT = "stored weights have no gradient of their own; load with dtype='float32' to train them"
PASSES = "Gradients pass through stored weights to what they multiply: for those, leave requires_grad False here."
_LEARNING = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_APART = (Tensor.unbind, torch.unbind)


class Stored(Tensor):
    """An fp32 matrix in the form that it is stored in, or several of one size. It has no gradient of its own.

    Products and look-ups of rows read the stored form; anything else gets the numbers that it stands for, made anew
    each time. [rows, cols], or of several [matrix, rows, cols]
    """

    raw: Tensor
    format: int
    matrix: Matrix
    native: NativeLibrary
    _each: tuple[Stored, ...] | None
    # Asked for in every pass, so not by way of __torch_function__.
    device = torch.device("cpu")
    dtype = torch.float32

    @staticmethod
    def __new__(cls, raw: Tensor, format: int, cols: int) -> Stored:
        """A matrix over bytes, or several, one after another.

        Args:
            raw: the bytes of each row. uint8 [rows, bytes], or [matrix, rows, bytes]
            format: how they are to be read, as a GGUF numbers it: one of ``FORMATS``, or ``TOGETHER``.
            cols: numbers in a row.
        """
        size, n_bytes = FORMATS[Q8_0 if format == TOGETHER else format]
        rows = raw.dtype is torch.uint8 and raw.dim() in (2, 3)
        if not rows or cols % size or raw.shape[-1] != cols // size * n_bytes:
            raise ValueError(f"{list(raw.shape)} bytes are not rows of {cols} numbers of format {format}")
        native = library()
        if native is None:
            raise ValueError("stored weights need the native library")
        self: Stored = Tensor._make_wrapper_subclass(
            cls, (*raw.shape[:-1], cols), dtype=torch.float32, device=torch.device("cpu")
        )
        self.raw = raw if raw.is_contiguous() else raw.contiguous()
        self.format = format
        self.native = native
        self._each = None
        self.matrix = Matrix(data=self.raw.data_ptr(), rows=raw.shape[:-1].numel(), cols=cols, format=format)
        self.matrix.held = self.raw  # which is to be there as long as what points to it
        return self

    @property
    def rounds(self) -> bool:
        """Whether what it is multiplied by is rounded too: see :func:`together`."""
        return self.format == TOGETHER

    def dense(self) -> Tensor:
        """The numbers, as fp32."""
        with untransformed():
            return self.native.expand(self.matrix).view(self.shape)

    def each(self) -> tuple[Stored, ...]:
        """Several matrices one by one, where they lie. [matrix, rows, cols] → [rows, cols] each"""
        if self._each is None:  # what they lie in cannot change, so they are made once rather than for each token
            with untransformed():
                self._each = tuple(Stored(raw, self.format, self.shape[-1]) for raw in self.raw)
        return self._each

    def blocks(self) -> tuple[Tensor, int]:
        """The rows' bytes as a file has them, and the number of their format. uint8 [..., rows, bytes]"""
        if self.format != TOGETHER:
            return self.raw, self.format
        rows, n_bytes = self.matrix.rows, self.raw.shape[-1]
        tiles = self.raw.view(rows // ROWS, n_bytes // 34, 34 * ROWS)
        scales = tiles[..., : 2 * ROWS].unflatten(-1, (ROWS, 2))
        numbers = tiles[..., 2 * ROWS :].unflatten(-1, (8, ROWS, 4)).transpose(2, 3).flatten(-2) ^ 128
        return torch.cat([scales, numbers], -1).transpose(1, 2).reshape(self.raw.shape), Q8_0

    def __deepcopy__(self, memo: dict[int, Any]) -> Stored:
        return _again(self.raw.clone(), self.format, self.shape[-1], isinstance(self, nn.Parameter))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A copy: what is sent to another process is moved to memory that it shares, from under those who read it here.
        return _again, (self.raw.clone(), self.format, self.shape[-1], isinstance(self, nn.Parameter))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Stored({list(self.shape)}, format={self.format})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Products and look-ups, from the stored form."""
        named = dict(kwargs or {})
        if func is torch._has_compatible_shallow_copy_type:
            return False  # a module that changes its numbers' type gets a new parameter
        if func is Tensor.detach:  # not by way of the dispatcher, which would import all of torch.distributed for it
            return stored_matrix(args[0].raw, args[0].format, args[0].shape[-1])
        if func in (Tensor.data.__set__, Tensor.__setitem__, Tensor.share_memory_):  # type: ignore[attr-defined]
            raise TypeError(READ_ONLY)
        if func in _LEARNING and (args[1:] or (named.get("requires_grad", True),))[0]:
            raise RequestError(NO_GRADIENT, field="requires_grad", expected=False, got=True, hint=PASSES)
        if func in _APART and args[0].raw.dim() == 3 and not named and args[1:] in ((), (0,)):
            return args[0].each()
        if func is Tensor.__getitem__ and args[0].raw.dim() == 3 and type(args[1]) is int:
            return args[0].each()[args[1]]
        if func is F.linear and not named and len(args) in (2, 3) and _one(args[1]):
            return _linear(args[0], args[1], args[2] if len(args) == 3 else None)
        plain = not named.get("max_norm")  # with one, looking up would change the table
        if func is F.embedding and plain and len(args) == 2 and _one(args[1]):
            found = args[1].dense() if wrapped(args[0]) else None
            return args[1].native.expand(args[1].matrix, args[0]) if found is None else func(args[0], found)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Anything else, with its numbers."""
        if func is torch.ops.aten.detach.default:
            it = args[0]
            return stored_matrix(it.raw, it.format, it.shape[-1])
        args, named = tree_map_only(Stored, Stored.dense, _not_written(func, args, kwargs or {}))
        return func(*args, **named)


def _not_written(func: Any, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> tuple[tuple[Any, ...], dict[Any, Any]]:
    """The same arguments; what was written to numbers made for the purpose would be lost without a word.

    Raises:
        TypeError: the function writes to stored weights.
    """
    if func._schema.is_mutable:
        given = zip(func._schema.arguments, args, strict=False)
        pairs = [(to, value) for to, value in given] + [
            (to, kwargs[to.name]) for to in func._schema.arguments if to.name in kwargs
        ]
        written = [value for to, value in pairs if to.alias_info is not None and to.alias_info.is_write]
        if any(isinstance(one, Stored) for one in tree_leaves(written)):
            raise TypeError(READ_ONLY)
    return args, kwargs


def stored_matrix(raw: Tensor, format: int, cols: int) -> Stored:
    """A matrix over bytes, or several. uint8 [..., rows, bytes] → [..., rows, cols]

    Raises:
        ValueError: there are not as many bytes as that.
    """
    return Stored(raw, format, cols)


def together(matrix: Stored) -> Stored:
    """A Q8_0 matrix laid out for products of whole numbers: every x that it meets is rounded to 8 bits too.

    As it is where its rows are not whole tiles.
    """
    rows, n_bytes = matrix.matrix.rows, matrix.raw.shape[-1]
    if matrix.format != Q8_0 or matrix.shape[-2] % ROWS:
        return matrix
    tiles = matrix.raw.view(rows // ROWS, ROWS, n_bytes // 34, 34).transpose(1, 2)
    scales = tiles[..., :2].flatten(-2)
    numbers = (tiles[..., 2:] ^ 128).unflatten(-1, (8, 4)).transpose(2, 3).flatten(2)
    return stored_matrix(torch.cat([scales, numbers], -1).view(matrix.raw.shape), TOGETHER, matrix.shape[-1])


def _again(raw: Tensor, format: int, cols: int, parameter: bool) -> Stored:
    """What was copied or pickled: a module's parameter stays one."""
    twin = stored_matrix(raw, format, cols)
    return nn.Parameter(twin, requires_grad=False) if parameter else twin  # type: ignore[return-value]


def _one(weight: object) -> bool:
    """Whether it is one stored matrix, rather than several."""
    return isinstance(weight, Stored) and weight.raw.dim() == 2


def _linear(x: Tensor, weight: Stored, bias: Tensor | None) -> Tensor:
    if not _plain(x) or followed(x, bias):
        y: Tensor = _Product.apply(x, lambda: weight)  # type: ignore[no-untyped-call]
        return y if bias is None else y + bias
    if bias is None:
        return weight.native.product(x, weight.matrix)
    if _fits(bias, weight):
        return weight.native.product(x, matrix_of(weight, bias))
    return weight.native.product(x, weight.matrix) + bias


class _Product(torch.autograd.Function):
    """A product with the numbers, made anew for the way back: a graph over many layers holds none of them.

    The weight comes by a function, so that no transform of ``torch.func`` takes it for one of its tensors.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Callable[[], Stored]) -> Tensor:
        return F.linear(x, weight().dense().to(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.weight = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        (grad,) = grads
        return grad @ ctx.weight().dense().to(grad), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return F.linear(tangents[0], ctx.weight().dense().to(tangents[0]))


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` by the native library, where there is one and nobody wants gradients. A row's result does not
    depend on how many there are. [..., cols] → [..., rows]
    """
    if isinstance(weight, Stored):
        return _linear(x, weight, bias)
    native = library()
    if native is None or torch.is_grad_enabled() or followed(x, weight, bias):
        return F.linear(x, weight, bias)
    if not _plain(x) or not _plain(weight) or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    if bias is None or _fits(bias, weight):
        return native.product(x, matrix_of(weight, bias))
    return native.product(x, matrix_of(weight)) + bias


def matrix_of(weight: Tensor, bias: Tensor | None = None) -> Matrix:
    """A weight where it lies, stored or contiguous fp32, as the native library is told of it. [rows, cols]"""
    number, data = (weight.format, weight.raw) if isinstance(weight, Stored) else (0, weight)
    rows, cols = size_of(weight)
    at = None if bias is None else bias.data_ptr()
    return Matrix(data=data.data_ptr(), bias=at, rows=rows, cols=cols, format=number)


def size_of(weight: Tensor) -> tuple[int, ...]:
    """A weight's shape; of a stored one without the way through PyTorch's dispatch, which costs more than a product."""
    return (*weight.raw.shape[:-1], weight.matrix.cols) if isinstance(weight, Stored) else tuple(weight.shape)


def rounds(module: nn.Module) -> bool:
    """Whether it was loaded as ``int8``, so that some of its products round what they multiply."""
    return any(isinstance(weight, Stored) and weight.rounds for weight in module.parameters())


def _fits(bias: Tensor, weight: Tensor) -> bool:
    """Whether the native library can add it."""
    return _plain(bias) and bias.shape == weight.shape[:1] and bias.is_contiguous()


def _plain(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.device.type == "cpu"
