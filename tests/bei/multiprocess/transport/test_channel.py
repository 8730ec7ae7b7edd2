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

from bei.multiprocess.shared_memory.segment import Segment
from bei.multiprocess.transport.channel import Channel, ChannelClosedError, Frame
from bei.multiprocess.transport.messages import Announce, Forget, Message
from tests.bei.multiprocess.chain import nothing_left
from tests.bei.scheduler.front import wait_until
from tests.support.engines import DEADLINE_S

_decoder: Any = msgspec.msgpack.Decoder(Announce | Forget)

Pair = tuple["Channel[Any]", "Channel[Any]"]


def pair() -> Pair:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(one, _decoder), Channel(other, _decoder)


@pytest.fixture
def channels() -> Iterator[Pair]:
    made = pair()
    yield made
    for channel in made:
        channel.end()


_messages = st.lists(st.integers(0, 2**40), max_size=30_000).map(Forget) | st.builds(
    Announce, st.integers(0, 99), st.integers(0, 2**40)
)
_payloads = st.lists(st.sampled_from([0, 1, 7, 4096, 300_000]), max_size=3)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(_messages, _payloads, st.booleans()), max_size=8))
def test_frames_arrive_as_they_were_sent(frames: list[tuple[Message, list[int], bool]]) -> None:
    sender, receiver = pair()
    segments = [Segment.create(4096 * (index + 1)) for index in range(len(frames))]
    for index, ((message, sizes, has_fd), segment) in enumerate(zip(frames, segments, strict=True)):
        payload = [np.full(size, index + place, np.uint8) for place, size in enumerate(sizes)]
        sender.send(message, payload, segment if has_fd else None)
    for index, (message, sizes, has_fd) in enumerate(frames):
        frame = receiver.receive()
        assert frame is not None
        assert frame.message == message
        expected = [np.full(size, index + place, np.uint8) for place, size in enumerate(sizes)]
        assert frame.payload.tobytes() == b"".join(values.tobytes() for values in expected)
        assert (frame.fd is not None) == has_fd
        if frame.fd is not None:
            assert os.fstat(frame.fd).st_ino == os.fstat(segments[index].fd).st_ino
            os.close(frame.fd)
    sender.end()
    assert receiver.receive() is None
    receiver.end()


def bytes_of(frames: Sequence[tuple[Message, Sequence[np.ndarray[Any, Any]]]]) -> bytes:
    """What is sent for ``frames``."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    sender: Channel[Any] = Channel(one, _decoder)
    for message, payload in frames:
        sender.send(message, payload)
    assert not sender.is_behind
    sender.end()
    found = bytearray()
    while part := other.recv(1 << 16):
        found += part
    other.close()
    return bytes(found)


def arrived(receiver: Channel[Any], max_header_size: int = 1 << 16) -> list[Frame[Any]]:
    """What an event loop gets, which does not wait."""
    assert receiver.fill()
    found = []
    while (frame := receiver.buffered(max_header_size)) is not None:
        found.append(frame)
    return found


_small_messages = st.lists(st.integers(0, 2**40), max_size=20).map(Forget)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_small_messages, st.sampled_from([0, 1, 40, 5000])), min_size=1, max_size=6), st.data())
def test_frames_that_come_in_parts_are_read_as_soon_as_they_are_whole(
    frames: list[tuple[Forget, int]], data: st.DataObject
) -> None:
    payloads = [np.full(size, index, np.uint8) for index, (_, size) in enumerate(frames)]
    sent = [(message, [payload]) for (message, _), payload in zip(frames, payloads, strict=True)]
    stream, ends = bytes_of(sent), list(itertools.accumulate(len(bytes_of([frame])) for frame in sent))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=8))) if len(stream) > 1 else []
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    receiver: Channel[Any] = Channel(other, _decoder)
    found: list[Frame[Any]] = []
    for start, end in itertools.pairwise([0, *cuts, len(stream)]):
        one.sendall(stream[start:end])
        found += arrived(receiver)
        assert len(found) == sum(frame_end <= end for frame_end in ends)
    for frame, (message, _), payload in zip(found, frames, payloads, strict=True):
        assert frame.message == message
        assert frame.payload.tolist() == payload.tolist()
    assert arrived(receiver) == []  # nothing has come: it did not wait
    one.close()
    assert not receiver.fill()
    receiver.end()


def test_a_frame_may_be_cut_at_each_of_its_bytes() -> None:
    stream = bytes_of([(Announce(3, 1 << 33), [np.arange(5, dtype=np.int32)])])
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    receiver: Channel[Any] = Channel(other, _decoder)
    for cut in range(1, len(stream)):
        one.sendall(stream[:cut])
        assert arrived(receiver) == []
        one.sendall(stream[cut:])
        (frame,) = arrived(receiver)
        assert frame.message == Announce(3, 1 << 33)
        assert frame.payload.view(np.int32).tolist() == [0, 1, 2, 3, 4]
    one.close()
    receiver.end()


def test_large_frames_are_left_to_who_waits_and_keep_their_place(channels: Pair) -> None:
    sender, receiver = channels
    long, wide = Forget([1 << 40] * 1000), np.arange(30_000, dtype=np.int32)
    for message in (Forget([1]), long, Forget([2])):
        sender.send(message)
    sender.send(Forget([3]), [wide])
    sender.send(Forget([4]))
    assert [frame.message for frame in arrived(receiver, 4096)] == [Forget([1])]
    assert receiver.is_next_large(4096)
    assert not receiver.is_next_large()
    waited = receiver.receive()
    assert waited is not None
    assert waited.message == long
    assert [frame.message for frame in arrived(receiver, 4096)] == [Forget([2])]
    assert receiver.is_next_large()
    waited = receiver.receive()
    assert waited is not None
    assert (waited.message, waited.payload.view(np.int32).tolist()) == (Forget([3]), wide.tolist())
    assert [frame.message for frame in arrived(receiver, 4096)] == [Forget([4])]


def test_descriptors_are_read_without_waiting_in_their_order(channels: Pair) -> None:
    sender, receiver = channels
    segments = [Segment.create(4096) for _ in range(5)]
    for number, segment in enumerate(segments):
        sender.send(Announce(number, 4096), segment=segment)
        sender.send(Forget([number]))
    found: list[Frame[Any]] = []
    while len(found) < 10:
        assert receiver.has_arrived()
        found += arrived(receiver)
    assert not receiver.has_arrived()
    for frame in found:
        if isinstance(frame.message, Announce):
            assert frame.fd is not None
            assert os.fstat(frame.fd).st_ino == os.fstat(segments[frame.message.segment].fd).st_ino
            os.close(frame.fd)
        else:
            assert frame.fd is None


def test_a_peer_that_does_not_read_hangs_no_sender_and_gets_everything_later(channels: Pair) -> None:
    sender, receiver = channels
    big = np.arange(1_000_000, dtype=np.int32)
    for number in range(5):
        sender.send(Forget([number]), [big])
    assert sender.is_behind
    sender.flush(0.01)  # returns
    assert sender.is_behind
    for number in range(5):
        frame = receiver.receive()
        assert frame is not None
        assert frame.message == Forget([number])
        assert (frame.payload.view(np.int32) == big).all()
    sender.flush(DEADLINE_S)
    assert not sender.is_behind


def test_many_threads_send_whole_frames(channels: Pair) -> None:
    sender, receiver = channels

    def send_all(thread: int) -> None:
        for index in range(50):
            sender.send(Announce(thread, index), [np.full(20_000, thread, np.uint8)])

    threads = [threading.Thread(target=send_all, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = {}
    for _ in range(200):
        frame = receiver.receive()
        assert frame is not None
        assert (frame.payload == frame.message.segment).all()
        seen.setdefault(frame.message.segment, []).append(frame.message.size)
    assert all(sizes == list(range(50)) for sizes in seen.values())
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
            one.send(Forget([]))
        except ChannelClosedError:
            return True
        return False

    wait_until(is_refused, "the sender hears of it")


def test_a_channel_that_ends_while_its_peer_does_not_read_frees_its_threads_and_descriptors() -> None:
    with nothing_left():
        sender, receiver = pair()
        sender.send(Forget([]), [np.zeros(3_000_000, np.uint8)])
        assert sender.is_behind
        sender.end()
        receiver.end()


def test_descriptors_that_nobody_took_are_closed() -> None:
    with nothing_left():
        sender, receiver = pair()
        segment = Segment.create(4096)
        sender.send(Forget([]))
        sender.send(Announce(1, 4096), segment=segment)
        assert receiver.receive() is not None  # the bytes of both may have come
        receiver.end()
        sender.end()
        del segment


def test_what_is_no_message_is_refused(channels: Pair) -> None:
    sender, receiver = channels
    sender.send(Forget(["no number"]))  # type: ignore[list-item]
    with pytest.raises(msgspec.ValidationError):
        receiver.receive()
