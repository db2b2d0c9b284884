"""The structs of ``native/block.h``, field by field in the same order."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any


class _Struct(Structure):
    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)


class Matrix(_Struct):
    """A weight in the form that it is stored in; see :class:`cutaway.kernels.Stored` for the formats."""

    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("format", c_int32),
    )
    held: object = None


class Norm(_Struct):
    """``kind`` is 0 for none, 1 for LayerNorm, 2 for RMSNorm."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("eps", c_float),
        ("offset", c_float),
        ("kind", c_int64),
    )


class Reading(_Struct):
    """Who may read whom, and how scores are scaled; 0 for no window and no cap."""

    _fields_ = (("causal", c_int64), ("window", c_int64), ("scale", c_float), ("cap", c_float))


class Attention(_Struct):
    """``pairs`` of rotary positions, 0 for none; ``clip`` 0 for none."""

    _fields_ = (
        ("q", Matrix),
        ("k", Matrix),
        ("v", Matrix),
        ("out", Matrix),
        ("q_norm", Norm),
        ("k_norm", Norm),
        ("n_heads", c_int64),
        ("n_kv_heads", c_int64),
        ("d_head", c_int64),
        ("pairs", c_int64),
        ("interleaved", c_int64),
        ("norm_width", c_int64),
        ("norm_after", c_int64),
        ("reading", Reading),
        ("clip", c_float),
        ("unused", c_float),
    )


class Feedforward(_Struct):
    """``curve`` is the place of the activation's name in :data:`CURVES`."""

    _fields_ = (("gate", Matrix), ("up", Matrix), ("down", Matrix), ("curve", c_int64))


class Branch(_Struct):
    """``kind`` is 0 for attention, 1 for a feed-forward network."""

    _fields_ = (
        ("pre", Norm),
        ("out", Norm),
        ("post", Norm),
        ("kind", c_int64),
        ("scale", c_float),
        ("unused", c_float),
        ("attention", Attention),
        ("feedforward", Feedforward),
    )


class Block(_Struct):
    """One layer."""

    _fields_ = (
        ("d_model", c_int64),
        ("n_branches", c_int64),
        ("parallel", c_int64),
        ("shared_norm", c_int64),
        ("branches", Branch * 2),
    )


class Keys(_Struct):
    """Keys and values that are read, and their positions; strides are in numbers."""

    _fields_ = (
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_row", c_int64),
        ("k_head", c_int64),
        ("k_slot", c_int64),
        ("v_row", c_int64),
        ("v_head", c_int64),
        ("v_slot", c_int64),
        ("count", c_int64),
        ("positions", c_void_p),
        ("apart", c_int64),
    )


class Group(_Struct):
    """What layers with the same positions, slots and angles share in a pass."""

    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("turns", c_void_p),
        ("slots", c_void_p),
        ("count", c_int64),
        ("positions", c_void_p),
        ("apart", c_int64),
    )


class Layer(_Struct):
    """A block, and where its keys and values are written and read."""

    _fields_ = (
        ("block", POINTER(Block)),
        ("k", c_void_p),
        ("v", c_void_p),
        ("row", c_int64),
        ("head", c_int64),
        ("slot", c_int64),
        ("keys", Keys),
        ("group", c_int64),
    )


class Pass(_Struct):
    """Tokens, and the stream before and after."""

    _fields_ = (
        ("x", c_void_p),
        ("y", c_void_p),
        ("n", c_int64),
        ("places", c_void_p),
        ("rows", c_void_p),
        ("positions", c_void_p),
        ("batch", c_int64),
        ("q", c_void_p),
        ("half", c_int64),
        ("asked", c_void_p),
        ("n_asked", c_int64),
        ("norm", Norm),
        ("table", POINTER(Matrix)),
        ("ids", c_void_p),
        ("head", POINTER(Matrix)),
        ("logits", c_void_p),
        ("scale", c_float),
        ("unused", c_float),
    )


STRUCTS = (Matrix, Norm, Attention, Feedforward, Branch, Block, Group, Layer, Pass)
CURVES = ("relu", "relu2", "gelu", "gelu_tanh", "silu", "tanh")
