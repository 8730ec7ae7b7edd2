"""Segments: mapped by whoever gets their descriptor, found by address, gone with their last mapping."""

from __future__ import annotations

import os

import numpy as np
import pytest

from bei.multiprocess.shared_memory.arena import Arena
from bei.multiprocess.shared_memory.segment import Segment, place_of
from tests.bei.multiprocess.chain import nothing_left


def test_an_array_is_found_in_its_segment_and_others_are_not() -> None:
    arena = Arena(1 << 20)
    block = arena.block(4096)
    assert block is not None
    whole = place_of(block)
    assert whole is not None
    rows = block.view(np.float32).reshape(32, 32)
    found = place_of(rows[3])
    assert found is not None
    assert (found.segment, found.offset) == (whole.segment, whole.offset + 3 * 32 * 4)
    assert place_of(rows[:, 3]) is None  # not one after the other
    assert place_of(rows[3].copy()) is None
    assert place_of(np.zeros(0, np.float32)) is None


def test_what_one_process_writes_the_other_reads_and_cannot_change() -> None:
    segment = Segment.create(100)
    attached = Segment.attach(os.dup(segment.fd), segment.size)
    assert attached.address != segment.address
    segment._mapping[:5] = b"hello"
    assert attached._mapping[:5] == b"hello"
    with pytest.raises(TypeError):
        attached._mapping[:5] = b"other"


def test_the_size_of_a_segment_is_sealed() -> None:
    segment = Segment.create(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)


def test_a_segment_takes_its_descriptors_along() -> None:
    with nothing_left():
        segment = Segment.create(4096)
        attached = Segment.attach(os.dup(segment.fd), segment.size)
        descriptors = segment.fd, attached.fd
        del segment, attached
    for fd in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_descriptor_that_cannot_be_mapped_is_closed() -> None:
    with nothing_left():
        read, write = os.pipe()
        with pytest.raises(OSError, match="device"):
            Segment.attach(read, 4096)
        os.close(write)
