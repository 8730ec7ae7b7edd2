"""Tables over positions and distances, in numpy, shared by the ONNX and the PyTorch graph."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bei.engine.grid_positions import axis_ids
from bei.engine.packing import position_ids_but
from bei_build.spec.parts import DisentangledSpec, EmbeddingsSpec, RelativeBiasSpec, RopeSpec
from bei_build.spec.patches import PatchesSpec


def position_rows(spec: EmbeddingsSpec) -> str:
    """The tensor of ``bei.engine.packing.graph_inputs`` that holds each token's row of the position table."""
    return "position_ids" if spec.uncounted_id is None else position_ids_but(spec.uncounted_id)


def axial_rows(spec: PatchesSpec) -> tuple[str, str]:
    """The tensors of ``bei.engine.packing.graph_inputs`` that hold each patch's row of the table of columns, and of
    that of rows."""
    return axis_ids(2, spec.block_side), axis_ids(1, spec.block_side)


def resized_grid(
    table: npt.NDArray[np.float32], side: int, grid: tuple[int, int], *, antialias: bool
) -> npt.NDArray[np.float32]:
    """The rows of a square of ``side`` patches a side, [side * side, width], for ``grid`` patches (rows, columns), by
    bicubic interpolation: torch's ``interpolate`` of mode "bicubic", without aligned corners."""
    if grid == (side, side):
        return table
    square = table.reshape(side, side, -1).astype(np.float64)
    down, across = ((_antialiased if antialias else _bicubic)(side, count) for count in grid)
    resized = np.einsum("yi,xj,ijw->yxw", down, across, square, optimize=True)
    rows: npt.NDArray[np.float32] = resized.reshape(grid[0] * grid[1], -1).astype(np.float32)
    return rows


def _bicubic(count: int, new: int) -> npt.NDArray[np.float64]:
    """What each of ``new`` places takes of ``count`` ones, [new, count]; places beyond the ends are the last ones."""
    centers = (np.arange(new) + 0.5) * count / new - 0.5
    sources = np.floor(centers)[:, None].astype(np.int64) + np.arange(-1, 3)
    weights = np.zeros((new, count))
    shares = _cubic(np.abs(centers[:, None] - sources), -0.75)
    np.add.at(weights, (np.arange(new)[:, None], np.clip(sources, 0, count - 1)), shares)
    return weights


def _antialiased(count: int, new: int) -> npt.NDArray[np.float64]:
    """As ``_bicubic``, with a filter as wide as places lie apart; of places within the ends alone."""
    apart = count / new
    centers = (np.arange(new) + 0.5) * apart - 0.5
    weights = _cubic(np.abs(centers[:, None] - np.arange(count)) / max(apart, 1.0), -0.5)
    shares: npt.NDArray[np.float64] = weights / weights.sum(1, keepdims=True)
    return shares


def _cubic(x: npt.NDArray[np.float64], a: float) -> npt.NDArray[np.float64]:
    """Keys' kernel (1981) at distances ``x``; torch has two values of ``a``."""
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def rotation_angles(spec: RopeSpec, max_seq_len: int) -> npt.NDArray[np.float32]:
    """The angle of each position and frequency, [max_seq_len, rotary_dim / 2]; where ``turns_long_texts``, followed by
    the angles of long texts, [2 * max_seq_len, rotary_dim / 2]."""
    if spec.grid is not None:
        return _angles_of_grid(spec, spec.grid)
    angles = _angles(spec.inv_freq, max_seq_len)
    if spec.long_inv_freq is None or not turns_long_texts(spec, max_seq_len):
        return angles
    return np.concatenate([angles, _angles(spec.long_inv_freq, max_seq_len)])


def turns_long_texts(spec: RopeSpec, max_seq_len: int) -> bool:
    """True if a sequence can be long enough to rotate by ``long_inv_freq``."""
    return spec.long_inv_freq is not None and spec.long_from < max_seq_len


def columns_of_axes(spec: RopeSpec) -> dict[str, list[int]]:
    """The tensors of ``bei.engine.packing.graph_inputs`` by which a token rotates, and which of its frequencies each
    of them turns."""
    return {
        axis_ids(axis, spec.block_side): [place for place, own in enumerate(spec.axes) if own == axis]
        for axis in sorted(set(spec.axes))
    }


def alibi_slopes(num_heads: int) -> npt.NDArray[np.float32]:
    """Slopes of the heads, [num_heads]: 2^(-8 i / n) for n a power of two; else the slopes of the next lower power,
    then every other slope of the next higher (the paper's code, ofirpress/attention_with_linear_biases)."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * (num_heads - power), 2)]
    return np.array(slopes, np.float32)


def relative_bias_table(
    weight: npt.NDArray[np.float32], spec: RelativeBiasSpec, max_seq_len: int
) -> npt.NDArray[np.float32]:
    """One row per distance (key less query), [2 * reach + 1, heads], from -reach to reach.

    All distances beyond ``max_distance`` on one side have the same bucket, so farther rows are left out.
    """
    table: npt.NDArray[np.float32] = weight[relative_buckets(spec, max_seq_len)]
    return table


def relative_buckets(spec: RelativeBiasSpec, max_seq_len: int) -> npt.NDArray[np.int64]:
    """The bucket of each distance (key less query) from -reach to reach, [2 * reach + 1].

    Half of the buckets are for keys before the query, half for keys after it; in each half, the first half has one
    bucket per distance, the rest are logarithmic up to ``max_distance`` (T5's, as transformers' MPNet has it).
    """
    reach = min(max_seq_len - 1, spec.max_distance)
    distances = np.arange(-reach, reach + 1)
    half = spec.num_buckets // 2
    exact = half // 2
    away = np.abs(distances)
    with np.errstate(divide="ignore"):
        # float32, as in transformers: the edges of the buckets depend on its rounding.
        log = np.log(away.astype(np.float32) / np.float32(exact)) / np.float32(math.log(spec.max_distance / exact))
    far = exact + (log * np.float32(half - exact)).astype(np.float64).clip(-exact, half).astype(np.int64)
    bucket: npt.NDArray[np.int64] = np.where(away < exact, away, np.minimum(far, half - 1))
    return bucket + np.where(distances > 0, half, 0)


def disentangled_rows(spec: DisentangledSpec, max_seq_len: int) -> npt.NDArray[np.int64]:
    """The row of DeBERTa's table for each distance (query less key) from 1 - max_seq_len to max_seq_len - 1."""
    reach = max_seq_len - 1
    rows = _disentangled_bucket(np.arange(-reach, reach + 1), spec) + spec.span
    return np.clip(rows, 0, 2 * spec.span - 1)


def _angles(inv_freq: tuple[float, ...], num_positions: int) -> npt.NDArray[np.float32]:
    """Position times frequency, in float32 as in every implementation."""
    positions = np.arange(num_positions, dtype=np.float32)
    angles: npt.NDArray[np.float32] = np.outer(positions, np.array(inv_freq, np.float32))
    return angles


def _angles_of_grid(spec: RopeSpec, grid: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Angles [leading + rows * columns, rotary_dim / 2]: none of leading tokens, then those of patches."""
    rows, columns = (
        _middles(count) if spec.centred else np.arange(count, dtype=np.float32) * np.float32(by)
        for count, by in zip(grid, spec.grid_scale, strict=True)
    )
    inv_freq = np.array(spec.inv_freq, np.float32)
    by_row, by_column = np.split(inv_freq, 2)
    angles = np.zeros((len(rows), len(columns), len(inv_freq)), np.float32)
    angles[:, :, : len(by_row)] = rows[:, None, None] * by_row
    angles[:, :, len(by_row) :] = columns[None, :, None] * by_column
    none = np.zeros((spec.num_leading, len(inv_freq)), np.float32)
    return np.concatenate([none, angles.reshape(-1, len(inv_freq))])


def _middles(count: int) -> npt.NDArray[np.float32]:
    """Where the middles of ``count`` equal parts lie between -1 and 1."""
    return ((2 * np.arange(count) + 1) / count - 1).astype(np.float32)


def _disentangled_bucket(distances: npt.NDArray[np.int64], spec: DisentangledSpec) -> npt.NDArray[np.int64]:
    """Query less key as a signed bucket (transformers: make_log_bucket_position)."""
    if not spec.buckets:
        return distances
    middle = spec.span // 2
    away = np.where((distances < middle) & (distances > -middle), middle - 1, np.abs(distances)).astype(np.float32)
    scale = np.log(np.float32((spec.max_distance - 1) / middle))
    log = np.ceil(np.log(away / np.float32(middle)) / scale * np.float32(middle - 1)) + middle
    return np.where(away <= middle, distances, log * np.sign(distances)).astype(np.int64)
