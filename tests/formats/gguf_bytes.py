"""GGUF files byte by byte, valid or broken anywhere, for the tests of our reader."""

from __future__ import annotations

import struct

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def kv(key: str | bytes, code: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", code) + payload


def u32(key: str, value: int) -> bytes:
    return kv(key, U32, struct.pack("<I", value))


def array(key: str, code: int, count: int, payload: bytes) -> bytes:
    return kv(key, ARR, struct.pack("<IQ", code, count) + payload)


def tensor(name: str | bytes, dims: list[int], type: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    n = len(dims) if n_dims is None else n_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", n, *dims, type, offset)


def gguf(
    keys: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file; ``data`` follows the padding as it is."""
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if n_tensors is None else n_tensors,
        len(keys) if n_keys is None else n_keys,
    )
    body = head + b"".join(keys) + b"".join(tensors)
    return body + bytes(-len(body) % alignment) + data


def small(**changes: object) -> bytes:
    """A good file with every kind of value and two tensors: ``a`` F32 [8] and ``b`` Q4_0 [2, 32]."""
    keys = [
        kv("general.architecture", STR, text("llama")),
        u32("llama.block_count", 2),
        kv("x.u8", U8, b"\7"),
        kv("x.i64", I64, struct.pack("<q", -5)),
        kv("x.f32", F32, struct.pack("<f", 0.5)),
        kv("x.yes", BOOL, b"\1"),
        array("x.words", STR, 3, text("a") + text("") + text("é")),
        array("x.scores", F32, 2, struct.pack("<2f", 1.0, -2.0)),
        array("x.flags", BOOL, 2, b"\0\1"),
    ]
    tensors = [tensor("a", [8], 0, 0), tensor("b", [32, 2], 2, 32)]
    data = struct.pack("<8f", *range(8)) + 2 * (b"\0\x3c" + bytes(range(16))) + bytes(28)
    return gguf(keys, tensors, data, **changes)  # type: ignore[arg-type]
