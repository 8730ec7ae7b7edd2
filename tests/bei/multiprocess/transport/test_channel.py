"""Channels: frames arrive whole, in order, with their bytes and descriptors; a peer that does not read hangs nobody."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.multiprocess.transport.channel import Channel, ChannelClosedError, Frame
from tests.bei.multiprocess.chain import nothing_left
from tests.bei.multiprocess.frames import MESSAGES, Arrays, Numbers, Part
from tests.bei.scheduler.front import wait_until
from tests.support.engines import DEADLINE_S

Pair = tuple["Channel[Any]", "Channel[Any]"]


def pair() -> Pair:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(one, MESSAGES), Channel(other, MESSAGES)


@pytest.fixture
def channels() -> Iterator[Pair]:
    made = pair()
    yield made
    for channel in made:
        channel.end()


_arrays = st.lists(
    st.tuples(st.sampled_from([0, 1, 7, 4096, 300_000]), st.sampled_from(["u1", "<i4", "<f4"])), max_size=3
)
_messages = st.lists(st.integers(0, 2**40), max_size=30_000).map(Numbers) | st.builds(
    Part, st.integers(0, 99), st.integers(0, 2**40)
)


def filled(number: int, sizes: Sequence[tuple[int, str]]) -> Arrays:
    return Arrays(number, [np.full((size, 2), number + place, dtype) for place, (size, dtype) in enumerate(sizes)])


def check_same(found: Any, sent: Any) -> None:
    if not isinstance(sent, Arrays):
        assert found == sent
        return
    assert found.number == sent.number
    for one, other in zip(found.arrays, sent.arrays, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(_messages | _arrays, st.booleans()), max_size=8))
def test_messages_arrive_as_they_were_sent(given_messages: list[tuple[Any, bool]]) -> None:
    sender, receiver = pair()
    messages = [(filled(i, one) if isinstance(one, list) else one, has) for i, (one, has) in enumerate(given_messages)]
    files = [os.memfd_create("test") for _ in messages]
    for (message, has_files), file in zip(messages, files, strict=True):
        sender.send(message, [file, file] if has_files else [])
    for (message, has_files), file in zip(messages, files, strict=True):
        frame = receiver.receive()
        assert frame is not None
        check_same(frame.message, message)
        assert len(frame.descriptors) == 2 * has_files
        for descriptor in frame.descriptors:
            assert os.fstat(descriptor).st_ino == os.fstat(file).st_ino
            os.close(descriptor)
    sender.end()
    assert receiver.receive() is None
    receiver.end()
    for file in files:
        os.close(file)


def test_arrays_that_do_not_lie_one_after_the_other_arrive(channels: Pair) -> None:
    sender, receiver = channels
    values = np.arange(24, dtype=np.int32).reshape(4, 6)
    sender.send(Arrays(1, [values[:, ::2], values.T]))
    frame = receiver.receive()
    assert frame is not None
    assert [found.tolist() for found in frame.message.arrays] == [values[:, ::2].tolist(), values.T.tolist()]


def test_a_large_array_that_is_in_a_message_again_is_sent_once(channels: Pair) -> None:
    sender, receiver = channels
    large, small = np.arange(5000, dtype=np.int32), np.arange(3, dtype=np.int32)
    for number, arrays in enumerate(([large, small, large, small, large[::2], large], [large, small, large])):
        sender.send(Arrays(number, arrays))
        frame = receiver.receive()
        assert frame is not None
        check_same(frame.message, Arrays(number, arrays))
        sizes = [one.nbytes for one in arrays if one is not large]
        assert frame.num_bytes == large.nbytes + sum(sizes)


def bytes_of(messages: Sequence[object]) -> bytes:
    """What is sent for ``messages``."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    sender: Channel[Any] = Channel(one, MESSAGES)
    for message in messages:
        sender.send(message)
    assert not sender.is_behind
    sender.end()
    found = bytearray()
    while part := other.recv(1 << 16):
        found += part
    other.close()
    return bytes(found)


def arrived(receiver: Channel[Any]) -> list[Frame[Any]]:
    """What an event loop gets, which does not wait."""
    assert receiver.fill()
    found = []
    while (frame := receiver.next_frame()) is not None:
        found.append(frame)
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 40, 5000]), min_size=1, max_size=6), st.data())
def test_frames_that_come_in_parts_are_read_as_soon_as_they_are_whole(sizes: list[int], data: st.DataObject) -> None:
    messages = [filled(number, [(size, "<i4"), (size, "u1")]) for number, size in enumerate(sizes)]
    stream, ends = bytes_of(messages), list(itertools.accumulate(len(bytes_of([one])) for one in messages))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=8)))
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    receiver: Channel[Any] = Channel(other, MESSAGES)
    found: list[Frame[Any]] = []
    for start, end in itertools.pairwise([0, *cuts, len(stream)]):
        one.sendall(stream[start:end])
        while receiver.has_arrived():
            found += arrived(receiver)
        assert len(found) == sum(frame_end <= end for frame_end in ends)
    for frame, message in zip(found, messages, strict=True):
        check_same(frame.message, message)
    assert arrived(receiver) == []  # nothing has come: it did not wait
    one.close()
    assert not receiver.fill()
    receiver.end()


def test_a_frame_may_be_cut_at_each_of_its_bytes() -> None:
    stream = bytes_of([Arrays(3, [np.arange(5, dtype=np.int32)])])
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    receiver: Channel[Any] = Channel(other, MESSAGES)
    for cut in range(1, len(stream)):
        one.sendall(stream[:cut])
        assert arrived(receiver) == []
        one.sendall(stream[cut:])
        (frame,) = arrived(receiver)
        assert frame.message.arrays[0].tolist() == [0, 1, 2, 3, 4]
    one.close()
    receiver.end()


def test_descriptors_are_read_without_waiting_in_their_order(channels: Pair) -> None:
    sender, receiver = channels
    files = [os.memfd_create("test") for _ in range(5)]
    for number, file in enumerate(files):
        sender.send(Part(number, 4096), descriptors=[file])
        sender.send(Numbers([number]))
    found: list[Frame[Any]] = []
    while len(found) < 10:
        assert receiver.has_arrived()
        found += arrived(receiver)
    assert not receiver.has_arrived()
    for frame in found:
        if isinstance(frame.message, Part):
            (descriptor,) = frame.descriptors
            assert os.fstat(descriptor).st_ino == os.fstat(files[frame.message.number]).st_ino
            os.close(descriptor)
        else:
            assert frame.descriptors == []
    for file in files:
        os.close(file)


def test_a_peer_that_does_not_read_hangs_no_sender_and_gets_everything_later(channels: Pair) -> None:
    sender, receiver = channels
    big = np.arange(1_000_000, dtype=np.int32)
    for number in range(5):
        sender.send(Arrays(number, [big]))
    assert sender.is_behind
    sender.flush(0.01)  # returns
    assert sender.is_behind
    for number in range(5):
        frame = receiver.receive()
        assert frame is not None
        assert frame.message.number == number
        assert (frame.message.arrays[0] == big).all()
    sender.flush(DEADLINE_S)
    assert not sender.is_behind


def test_many_threads_send_whole_frames(channels: Pair) -> None:
    sender, receiver = channels

    def send_all(thread: int) -> None:
        for index in range(50):
            sender.send(Arrays(thread, [np.full(20_000, index, np.uint8)]))

    threads = [threading.Thread(target=send_all, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = {}
    for _ in range(200):
        frame = receiver.receive()
        assert frame is not None
        (values,) = frame.message.arrays
        assert (values == values[0]).all()
        seen.setdefault(frame.message.number, []).append(int(values[0]))
    assert all(indices == list(range(50)) for indices in seen.values())
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("close", [lambda one, other: one.close(), lambda one, other: other.end()])
def test_the_end_is_seen_by_who_reads_and_who_sends(channels: Pair, close: Callable[..., None]) -> None:
    one, other = channels
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(one.receive()))
    reader.start()
    close(one, other)
    reader.join(DEADLINE_S)
    assert found == [None]

    def is_refused() -> bool:
        try:
            one.send(Numbers([]))
        except ChannelClosedError:
            return True
        return False

    wait_until(is_refused, "the sender hears of it")


def test_a_channel_that_ends_while_its_peer_does_not_read_frees_its_threads_and_descriptors() -> None:
    with nothing_left():
        sender, receiver = pair()
        sender.send(Arrays(1, [np.zeros(3_000_000, np.uint8)]))
        assert sender.is_behind
        sender.end()
        receiver.end()


def test_descriptors_that_nobody_took_are_closed() -> None:
    with nothing_left():
        sender, receiver = pair()
        file = os.memfd_create("test")
        sender.send(Numbers([]))
        sender.send(Part(1, 4096), descriptors=[file])
        assert receiver.receive() is not None  # the bytes of both may have come
        receiver.end()
        sender.end()
        os.close(file)


def test_what_is_no_message_is_refused(channels: Pair) -> None:
    sender, receiver = channels
    sender.send(Numbers(["no number"]))  # type: ignore[list-item]
    with pytest.raises(msgspec.ValidationError):
        receiver.receive()
