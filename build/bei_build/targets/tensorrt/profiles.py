"""Optimization profiles: the batch sizes that a plan supports, and those it is tuned for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bei.artifact.manifest import PlanProfile
from bei.core import Limits
from bei.engine.grid_windows import Windows, is_window, windows_of
from bei.engine.packing import bucket
from bei.errors import CompileError
from bei_build.targets.tensorrt.network import inputs_of

if TYPE_CHECKING:
    from tensorrt_module import TensorRTModule

_USUAL_TOKENS = 64  # tokens of a query
_USUAL_LEN = 128  # tokens of a document


def profiles_of(
    limits: Limits, latency_tokens: int, latency_sequences: int, *, packed: bool
) -> tuple[PlanProfile, PlanProfile]:
    """Profile 0 for single queries, profile 1 for full batches up to ``limits``, with ``bei.engine.packing``'s filler.

    ``packed``: the graph has packed attention, where each filler sequence owns a token. Without it tokens are padded
    to whole buckets, and towers that merge patches take no others.
    """
    step = 1 if packed else bucket(1)
    batch_size = _with_filler(limits.max_batch_size)
    num_fillers = batch_size - limits.max_batch_size if packed else 0
    num_tokens, seq_len = _with_filler(limits.max_num_tokens + num_fillers), _with_filler(limits.max_seq_len)
    num_tokens = -(-num_tokens // step) * step
    latency_batch = min(batch_size, bucket(latency_sequences, min_step=1))
    owned = latency_batch - 1 if packed else 0
    query_tokens, query_len = min(num_tokens, bucket(latency_tokens + owned)), min(seq_len, bucket(latency_tokens))
    usual_len = min(seq_len, _USUAL_LEN)
    return (
        PlanProfile(
            name="latency",
            tokens=(step, min(query_tokens, _USUAL_TOKENS), query_tokens),
            sequences=(1, 1, latency_batch),
            longest=(1, min(query_len, _USUAL_TOKENS), query_len),
        ),
        PlanProfile(
            name="throughput",
            tokens=(step, num_tokens, num_tokens),
            sequences=(1, min(batch_size, max(1, num_tokens // usual_len)), batch_size),
            longest=(1, usual_len, seq_len),
        ),
    )


def add_profile(
    builder: TensorRTModule.Builder,
    network: TensorRTModule.INetworkDefinition,
    config: TensorRTModule.IBuilderConfig,
    profile: PlanProfile,
) -> None:
    """Add ``profile`` to the builder's ``config``: sizes for every dimension of every input, by their names where they
    vary.

    Raises CompileError if TensorRT refuses it.
    """
    least, usual, most = profile.sequences
    _, usual_tokens, most_tokens = profile.tokens
    sizes = {
        "T": profile.tokens,
        "B": profile.sequences,
        "S": profile.longest,
        "B+1": (least + 1, usual + 1, most + 1),
        "R": (1, usual_tokens, _with_filler(most_tokens + 1)),
    }
    ranges = builder.create_optimization_profile()
    for tensor in inputs_of(network):
        if is_window(tensor.name):
            sizes |= _sizes_of_windows(windows_of(tensor.name), profile)
        dimensions = [
            sizes[tensor.get_dimension_name(axis)] if size < 0 else (size, size, size)  # of an image's patches
            for axis, size in enumerate(tensor.shape)
        ]
        ranges.set_shape(tensor.name, *zip(*dimensions, strict=True))
    if config.add_optimization_profile(ranges) < 0:
        raise CompileError(f"TensorRT refused the profile {profile.name} ({sizes}). This is a bug.")


def _sizes_of_windows(windows: Windows, profile: PlanProfile) -> dict[str, tuple[int, int, int]]:
    """A window has a block of patches at least; sequences without images, which warm-up has, may have fewer tokens."""
    _, usual, most = (
        tokens // size + sequences
        for tokens, size, sequences in zip(
            profile.tokens, (1, windows.num_patches, windows.block_side**2), profile.sequences, strict=True
        )
    )
    patches = windows.num_patches
    return {"W": (1, usual, _with_filler(most)), "V": (1, patches, _with_filler(patches))}


def _with_filler(size: int) -> int:
    """An upper bound of ``size`` with ``bei.engine.packing``'s filler: the next multiple of 8, or at most 1/16 more."""
    return size + max(7, size // 16)
