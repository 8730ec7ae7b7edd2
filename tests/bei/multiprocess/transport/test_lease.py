"""Vectors on their way: where they lie is told, not copied; memory comes back with the last view, and not before."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from bei.core import is_held
from bei.multiprocess.shared_memory.arena import Arena
from bei.multiprocess.transport import lease
from bei.multiprocess.transport.channel import Channel, ChannelClosedError
from bei.multiprocess.transport.lease import Borrower, Lender
from bei.multiprocess.transport.messages import INLINE, Announce, Forget, Ran, Release
from tests.bei.multiprocess.chain import inode_and_offset
from tests.bei.scheduler.front import wait_until

_to_borrower: Any = msgspec.msgpack.Decoder(Announce | Forget | Ran)
_to_lender: Any = msgspec.msgpack.Decoder(Release)

_Array = npt.NDArray[Any]


class Loan:
    """A lender and a borrower on the two ends of a socket."""

    def __init__(self, arena: Arena) -> None:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.arena = arena
        self.channel: Channel[Any] = Channel(one, _to_lender)
        self.lender = Lender(self.channel, arena)
        self.back: Channel[Any] = Channel(other, _to_borrower)
        self.borrower = Borrower(self.back)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while (frame := self.channel.receive()) is not None:
            self.lender.release(frame.message.leases)

    def pass_on(self, row: dict[str, _Array], wait_s: float = 0.0) -> dict[str, _Array]:
        """What the borrower gets."""
        (lent,), payload = self.lender.lend([row], wait_s)
        self.channel.send(Ran(1, lent), payload)
        while (frame := self.back.receive()) is not None:
            message = frame.message
            if isinstance(message, Ran):
                return self.borrower.row(message.outputs, frame.payload)
            if isinstance(message, Announce):
                assert frame.fd is not None
                self.borrower.add(message.segment, message.size, frame.fd)
            else:
                self.borrower.forget(message.segments)
        raise AssertionError("the channel has ended")

    def wait_returned(self) -> None:
        wait_until(lambda: self.lender.num_leases == 0, "everything is released")

    def close(self) -> None:
        self.borrower.end()
        self.back.end()
        self._reader.join()
        self.channel.end()


@pytest.fixture
def loan() -> Iterator[Loan]:
    made = Loan(Arena(1 << 20, 1 << 16))
    yield made
    made.close()


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<f2", "|i1", "<i4", "|b1", "<u8"])
@pytest.mark.parametrize("shape", [(5,), (3, 4), (1, 1), (0,), (2, 0)])
def test_arrays_of_any_type_and_shape_arrive(loan: Loan, dtype: str, shape: tuple[int, ...]) -> None:
    values = np.ones(shape, dtype)
    odd = np.ones(3, np.int8)
    row = loan.pass_on({"odd": odd, "values": values})
    assert (row["values"].dtype, row["values"].shape) == (values.dtype, shape)
    assert row["values"].tolist() == values.tolist()


def test_the_vectors_of_a_small_answer_go_along_with_it_and_nothing_is_to_be_given_back(loan: Loan) -> None:
    small = np.arange(lease._SMALL_BYTES // 4, dtype=np.float32)
    assert loan.pass_on({"a": small})["a"].tolist() == small.tolist()
    assert (loan.lender.num_leases, loan.lender.num_copied, loan.arena.num_bytes) == (0, 0, 0)
    found = loan.pass_on({"a": small, "b": small[:1]})
    assert (loan.lender.num_leases, loan.lender.num_copied) == (1, 2)
    assert [values.tolist() for values in found.values()] == [small.tolist(), [0.0]]


@pytest.mark.usefixtures("nothing_is_small")
def test_what_lies_elsewhere_is_copied_once_and_what_lies_in_a_segment_never(loan: Loan) -> None:
    mine = np.arange(12, dtype=np.float32).reshape(3, 4)
    first = loan.pass_on({"a": mine})
    assert (loan.lender.num_copied, loan.lender.num_referred) == (1, 0)
    second = Loan(Arena(1 << 20))  # the next process: a view of what was borrowed goes on
    passed_on = second.pass_on({"row": first["a"][1]})
    assert (second.lender.num_copied, second.lender.num_referred) == (0, 1)
    segment, offset = inode_and_offset(first["a"])
    assert inode_and_offset(passed_on["row"]) == (segment, offset + 16)
    assert passed_on["row"].tolist() == [4, 5, 6, 7]
    assert second.arena.num_bytes == 0
    second.close()


@pytest.mark.usefixtures("nothing_is_small")
def test_what_is_borrowed_cannot_be_written_to_and_is_known_as_held(loan: Loan) -> None:
    row = loan.pass_on({"a": np.ones(4, np.float32)})
    with pytest.raises(ValueError, match="read-only"):
        row["a"][0] = 2.0
    assert is_held(row["a"])
    assert is_held(row["a"][1:])
    assert not is_held(row["a"].copy())


@pytest.mark.usefixtures("nothing_is_small")
def test_memory_comes_back_with_the_last_view_of_the_last_array(loan: Loan) -> None:
    row = loan.pass_on({"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)})
    view = row["b"][2:]
    del row
    gc.collect()
    assert loan.lender.num_leases == 1
    assert view.tolist() == [1, 1]
    del view
    loan.wait_returned()


def test_views_keep_what_they_show_while_others_come_and_go(loan: Loan) -> None:
    """The arena would be full many times over."""
    kept = [loan.pass_on({"a": np.full(1000, index, np.float32)})["a"][500:] for index in range(10)]
    for index in range(300):
        assert loan.pass_on({"a": np.full(5000, index, np.float32)}, wait_s=30.0)["a"][0] == index
    assert [set(view.tolist()) for view in kept] == [{float(index)} for index in range(10)]


def test_what_has_no_room_goes_over_the_socket(loan: Loan) -> None:
    huge = np.arange(1_000_000, dtype=np.float32)
    row = loan.pass_on({"small": np.ones(3, np.float32), "huge": huge})
    assert (row["huge"] == huge).all()
    assert row["small"].tolist() == [1, 1, 1]
    assert not is_held(row["huge"])
    assert loan.lender.num_leases == 0


@pytest.mark.usefixtures("nothing_is_small")
def test_the_other_end_is_told_which_segments_are_gone(loan: Loan) -> None:
    loan.pass_on({"a": np.ones(4, np.float32)})
    loan.wait_returned()
    assert len(loan.borrower._segments) == 1
    loan.arena.trim(1e12)
    loan.arena.trim(2e12)
    assert loan.arena.num_bytes == 0
    loan.lender.forget_segments()
    loan.pass_on({"none": np.zeros(0, np.float32)})  # behind it
    assert loan.borrower._segments == {}


def test_arrays_outlive_both_ends(loan: Loan) -> None:
    row = loan.pass_on({"a": np.arange(4, dtype=np.float32)})
    loan.close()
    assert row["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.usefixtures("nothing_is_small")
def test_who_leaves_keeps_the_channel_until_nothing_is_used(loan: Loan) -> None:
    view = loan.pass_on({"a": np.ones(8, np.float32)})["a"][4:]
    loan.borrower.close_when_unused()
    loan.borrower._thread.join(0.05)
    assert loan.borrower._thread.is_alive()
    assert loan.lender.num_leases == 1
    del view
    loan.borrower._thread.join(30)
    assert not loan.borrower._thread.is_alive()
    loan.wait_returned()


def test_inline_arrays_are_marked(loan: Loan) -> None:
    (lent,), payload = Lender(loan.channel, Arena(0)).lend([{"a": np.ones(2, np.float32)}])
    assert (lent.lease, lent.arrays[0].segment) == (0, INLINE)
    assert [values.tolist() for values in payload] == [[1, 1]]


@pytest.mark.usefixtures("nothing_is_small")
def test_nothing_is_lent_over_a_channel_that_has_ended(loan: Loan) -> None:
    loan.close()
    with pytest.raises(ChannelClosedError):
        loan.lender.lend([{"a": np.ones(2, np.float32)}])
