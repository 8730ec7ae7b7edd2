"""Statistics of the inputs of linear layers, collected from an FP32 engine that has them as outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bei.core import Encoding, Engine, PackedBatch
from bei.utils.share_done import Tell, untold
from bei_build.spec.linear_layers import LinearLayer
from bei_build.spec.quantization import rounded

FloatArray = npt.NDArray[np.float32]

OUTPUT = "input:"  # followed by a layer's name: the engine output that is a linear layer's input
PRODUCT = "product:"  # the same for its product

# Sampled tokens, whose inputs choose scales by the error of products. More tokens changed nothing on MiniLM.
_MOST_SAMPLES = 768
_MOST_SAMPLE_BYTES = 1 << 30  # for all layers together
_LEAST_OF_TEXT = 6  # samples of a text that gives any: its ends are two of them


@dataclass
class ActivationStats:
    """``channel_amax`` [in]: the largest absolute value of each channel over all tokens; ``channel_max``: the largest
    value; ``least``: that of all channels. ``sample`` [n, in]: the inputs of some tokens, the first and the last of
    their texts among them."""

    channel_amax: FloatArray
    channel_max: FloatArray
    least: float
    sample: FloatArray


@dataclass
class _Collected:
    bounds: tuple[FloatArray, FloatArray] | None = None  # the least and the largest of each channel
    rows: list[FloatArray] = field(default_factory=list)

    def add(self, rows: FloatArray, chosen: npt.NDArray[np.int64]) -> None:
        least, largest = rows.min(axis=0), rows.max(axis=0)
        if self.bounds is not None:
            least, largest = np.minimum(least, self.bounds[0]), np.maximum(largest, self.bounds[1])
        self.bounds = least, largest
        self.rows.append(rows[chosen])


def input_groups(layers: Sequence[LinearLayer]) -> dict[str, LinearLayer]:
    """One layer of each group, by the group's name: the others have the same input."""
    first: dict[str, LinearLayer] = {}
    for layer in layers:
        first.setdefault(layer.group, layer)
    return first


def collect_stats(
    engine: Engine, encodings: Sequence[Encoding], widths: Mapping[str, int], seed: int, tell: Tell = untold
) -> dict[str, ActivationStats]:
    """Statistics by group. The engine has an output ``OUTPUT`` + name for each group, and runs one text after the
    other.

    ``widths``: width of each group's input. Raises EngineError.
    """
    random = np.random.default_rng(seed)
    most = min(_MOST_SAMPLES, _MOST_SAMPLE_BYTES // (4 * sum(widths.values())))
    # Of many texts some give samples, so that most of these are tokens between the ends.
    num_sampled = min(len(encodings), max(1, most // _LEAST_OF_TEXT))
    sampled = {*np.linspace(0, len(encodings) - 1, num_sampled, dtype=np.int64).tolist()}
    a_text = max(1, -(-most // len(sampled)))
    collected = {group: _Collected() for group in widths}
    outputs = {OUTPUT + group for group in widths}
    for num_done, encoding in enumerate(encodings):
        tell(num_done, len(encodings))
        rows = engine.run(PackedBatch.from_encodings([encoding]), outputs)
        count = encoding.num_tokens
        # The first and the last token, often special tokens with unusual values, and some between.
        ends = np.unique([0, count - 1])
        between = random.permutation(np.arange(1, count - 1))[: max(0, a_text - len(ends))]
        chosen = np.sort(np.concatenate([ends, between]))[: None if num_done in sampled else 0]
        for group, it in collected.items():
            it.add(rows[OUTPUT + group], chosen)
    return {group: _stats(it, most) for group, it in collected.items()}


def largest_products(engine: Engine, encodings: Sequence[Encoding], layers: Collection[str]) -> dict[str, float]:
    """The largest absolute value of each layer's product, an output of the engine. Raises EngineError."""
    largest = dict.fromkeys(layers, 0.0)
    if not layers:
        return largest
    outputs = {PRODUCT + name for name in layers}
    for encoding in encodings:
        rows = engine.run(PackedBatch.from_encodings([encoding]), outputs)
        for name in layers:
            largest[name] = max(largest[name], float(np.abs(rows[PRODUCT + name]).max()))
    return {name: rounded(value) for name, value in largest.items()}


def _stats(collected: _Collected, most: int) -> ActivationStats:
    assert collected.bounds is not None, "there is a text"
    least, largest = collected.bounds
    amax = np.maximum(np.abs(least), np.abs(largest))
    return ActivationStats(amax, largest, float(least.min()), np.concatenate(collected.rows)[:most])
