"""Damaged and hostile GGUF files: each is refused in one line, before anything of the announced size is made."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from bei.errors import WeightsError
from bei_build.weights.gguf_file import read_header
from bei_build.weights.gguf_store import GgufStore
from tests.support.gguf_files import header_bytes, key_bytes, tensor_bytes, text_bytes

_U32, _F32, _STRING, _ARRAY = 4, 6, 8, 9
_HUGE = 1 << 60


def _u32(value: int) -> bytes:
    return struct.pack("<I", value)


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def _array(kind: int, count: int, values: bytes = b"") -> bytes:
    return key_bytes("list", _ARRAY, _u32(kind) + _u64(count) + values)


def _with(*tensors: bytes, keys: tuple[bytes, ...] = (), num_bytes: int = 256) -> bytes:
    header = header_bytes(keys, tensors)
    return header + bytes(-len(header) % 32 + num_bytes)


_ALIGNMENT = key_bytes("general.alignment", _U32, _u32(48))

_HEADERS = {
    "empty": (b"", "it has 0 bytes"),
    "another format": (b"PK\3\4" + bytes(40), r"it begins with b'PK\\x03\\x04' instead of b'GGUF'"),
    "another version": (header_bytes(version=1) + bytes(8), "it has version 1 of the format; 2 and 3 are read"),
    "big-endian": (header_bytes(version=3 << 24) + bytes(8), "it is for big-endian machines"),
    "many keys": (b"GGUF" + _u32(3) + _u64(0) + _u64(_HUGE), "it announces 1,152,921,504,606,846,976 keys"),
    "many tensors": (b"GGUF" + _u32(3) + _u64(_HUGE) + _u64(0), "976 tensors, and no model has more than 100,000"),
    "cut in a key": (header_bytes([text_bytes("a" * 40)[:20]]), "it ends within its header, which announces 40 bytes"),
    "a long key": (header_bytes([_u64(_HUGE)]), "it announces a text of 1,152,921,504,606,846,976 bytes"),
    "a long text": (header_bytes([key_bytes("a", _STRING, _u64(_HUGE))]), "it announces a text of 1,152"),
    "no text": (header_bytes([key_bytes("a", _STRING, _u64(2) + b"\xff\xfe")]), "that is not UTF-8"),
    "an unknown type": (header_bytes([key_bytes("a", 77, bytes(8))]), "it has a value of the unknown type 77"),
    "a key twice": (header_bytes([key_bytes("a", _U32, _u32(1))] * 2), "it has the key 'a' twice"),
    "many numbers": (header_bytes([_array(_F32, _HUGE)]), "announces 4,611,686,018,427,387,904 bytes"),
    "many texts": (header_bytes([_array(_STRING, _HUGE)]), "it announces 1,152,921,504,606,846,976 texts"),
    "lists of lists": (header_bytes([_array(_ARRAY, 4, bytes(64))]), "it has a list of the unknown type 9"),
    "wrong alignment": (_with(keys=(_ALIGNMENT,)), "its general.alignment is 48, and must be a power of two from 8"),
    "many dimensions": (header_bytes([], [text_bytes("t") + _u32(1 << 31)]) + bytes(8), "has 2147483648 dimensions"),
    "an empty dimension": (_with(tensor_bytes("t", [4, 0], 0, 0)), r"its tensor 't' has the shape \[0, 4\]"),
    "a huge dimension": (_with(tensor_bytes("t", [1 << 62], 0, 0)), r"its tensor 't' has the shape \[46116"),
    "a tensor twice": (_with(*[tensor_bytes("t", [8], 0, 0)] * 2), "it has the tensor 't' twice"),
    "an unknown type of numbers": (_with(tensor_bytes("t", [8], 999, 0)), "has tensors of type number 999"),
    "integers": (_with(tensor_bytes("t", [8], 26, 0)), "has tensors of type I32, of which the gguf package makes no"),
    "rows of no blocks": (_with(tensor_bytes("t", [40, 2], 8, 0)), "'t' has rows of 40, which is no multiple of 32"),
    "an odd offset": (_with(tensor_bytes("t", [8], 0, 4)), "'t' begins at 4, which is no multiple of the alignment"),
    "an offset outside": (_with(tensor_bytes("t", [8], 0, 1 << 40)), "'t' ends at 1,099,511,627,808 of 256 bytes"),
    "a tensor outside": (_with(tensor_bytes("t", [8, 1 << 30], 0, 0)), "'t' ends at 34,359,738,368 of 256 bytes"),
    "a product beyond 64 bits": (_with(tensor_bytes("t", [1 << 39] * 4, 0, 0)), "'t' ends at "),
    "overlapping": (
        _with(tensor_bytes("a", [32], 0, 0), tensor_bytes("b", [32], 0, 64)),
        "its tensor 'b' begins within 'a'",
    ),
    "one in itself": (
        _with(tensor_bytes("a", [8], 0, 0), tensor_bytes("b", [8], 0, 0)),
        "its tensor 'b' begins within 'a'",
    ),
    "one of several parts": (_with(keys=(key_bytes("split.count", 2, b"\3\0"),)), "is one of several parts: join them"),
}


@pytest.mark.parametrize("name", _HEADERS)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    content, message = _HEADERS[name]
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match=message) as info:
            GgufStore(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(info.value)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    writer = gguf.GGUFWriter(whole, "bert")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("token_embd.weight", np.ones((2, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = whole.read_bytes()
    start, size = read_header(whole).data_start, 64
    np.testing.assert_array_equal(GgufStore(whole).read("token_embd.weight"), np.ones((2, 8), np.float32))
    file = tmp_path / "cut.gguf"
    for length in range(0, start + size, 7):
        file.write_bytes(content[:length])
        with pytest.raises(WeightsError):
            GgufStore(file)
