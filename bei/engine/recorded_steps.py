"""What engines on NVIDIA GPUs share: their options, batches to warm up with, and the recording of steps as CUDA graphs.

For a small step the host takes longer to launch its kernels than the GPU to run them; a recorded step is a single
launch of fixed sizes, to which batches are padded. The gain has not been measured yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from bei.core import Limits, Outputs, PackedBatch
from bei.engine.packing import Sizes
from bei.errors import ConfigError, EngineDeadError, EngineError

log = logging.getLogger(__name__)

MEGABYTE = 1_000_000
_MOST_STREAMS = 8  # each has memory for a step of its own
WARMUP_LENGTH = 128
# Tolerance between a recorded step and the same step unrecorded: the kernels are the same, but may add in another
# order.
_SAME_REL, _SAME_ABS = 1e-2, 1e-3


class NoMemoryError(Exception):
    """The device has not enough memory for a step; smaller ones may fit. Handled inside the engine."""


@dataclass(frozen=True)
class GpuOptions:
    """``num_streams``: batches in flight. ``cuda_graphs``: memory for recorded steps, in MB; 0: none."""

    num_streams: int = 2
    cuda_graphs: int = 256

    def __post_init__(self) -> None:
        if not 1 <= self.num_streams <= _MOST_STREAMS:
            raise ConfigError(f"An engine on a GPU has 1 to {_MOST_STREAMS} streams, not {self.num_streams}.")
        if self.cuda_graphs < 0:
            raise ConfigError(f"Memory for CUDA graphs cannot be {self.cuda_graphs} MB; 0 means none.")


def equal_texts(count: int, length: int) -> PackedBatch:
    """A batch of ``count`` sequences of ``length`` tokens."""
    return PackedBatch(np.zeros(count * length, np.int32), np.arange(count + 1, dtype=np.int32) * np.int32(length))


def extreme_batches(limits: Limits) -> list[PackedBatch]:
    """Batches of one token, of the most tokens in texts of usual length, and of the longest text."""
    usual = min(limits.max_seq_len, WARMUP_LENGTH)
    count = max(1, min(limits.max_batch_size, limits.max_num_tokens // usual))
    return [equal_texts(1, 1), equal_texts(count, usual), equal_texts(1, limits.max_seq_len)]


def record_steps(
    planned: Seq[Sizes], record: Callable[[Sizes], None], used_bytes: Callable[[], int], most_bytes: int
) -> None:
    """``record`` the ``planned`` sizes, small ones first, which gain most, until the memory for graphs is used up.

    Recording ends at the first failure; steps that are not recorded run as they are. Raises EngineDeadError.
    """
    num_recorded = 0
    try:
        for sizes in planned:
            if used_bytes() >= most_bytes:
                log.info("memory for CUDA graphs is used up: %d of %d recorded", num_recorded, len(planned))
                return
            record(sizes)
            num_recorded += 1
    except EngineDeadError:
        raise
    except (EngineError, NoMemoryError) as error:
        log.warning("after %d CUDA graphs no more are recorded: %s", num_recorded, str(error))


def check_recorded(sizes: Sizes, answers: Outputs, expected: Outputs) -> None:
    """Raise EngineError if the ``answers`` of a recorded step are not those of the step that was not."""
    for name, rows in answers.items():
        if not np.allclose(rows, expected[name], rtol=_SAME_REL, atol=_SAME_ABS, equal_nan=True):
            raise EngineError(f"the CUDA graph of {sizes} gives other results than the same step without it")
