"""How well the cost model predicts steps of shapes it was not fitted to. The engine alone.

    python -m benchmarks.costs [--shapes minilm bert-base] [--rounds 5] [--cpu-time]

The model is measured and fitted as at a server's first start. Then batches of other lengths are timed: equal lengths,
batches that the server cuts from mixed lengths, and mixed lengths in order of arrival. All of them run once a round,
and the shortest time counts, as in the fit. Simpler models are fitted to the same measurements. ``--cpu-time``: an
engine of one thread, timed by what its process uses, for machines on which other work runs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bei.core import Encoding, Engine, Limits, PackedBatch
from bei.engine.load import load_engine
from bei.scheduler.cost_measurement import Clock, measured_steps
from bei.scheduler.cost_model import CostModel, Sample, fit, nonnegative_least_squares
from benchmarks.common import batches_in_flight, mixed_lengths, random_encodings, seconds, write
from benchmarks.models import built, checkpoint_folder
from benchmarks.plots import BLUE, GREEN, GREY, ORANGE, panels, plain_log, save

# None of them is in the grid of bei.scheduler.cost_measurement.
_EQUAL_LENGTHS = (5, 15, 24, 37, 57, 75, 96, 128, 150, 220, 300, 430)
_BATCHES_PER_GROUP = 24

Predict = Callable[[int, int, int], float]
# Measured and predicted seconds of steps, by group of shapes.
Points = dict[str, list[tuple[float, float]]]


def main() -> None:
    """Measure and write ``results/costs-<shape>.json`` and its plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=("minilm", "bert-base"), default=["minilm", "bert-base"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for shape in options.shapes:
            name = f"costs-{shape}{'-cpu-time' if options.cpu_time else ''}"
            results, points = measure(shape, options.rounds, Path(scratch), cpu_time=options.cpu_time)
            write(name, results)
            plot(name, points)


def measure(shape: str, rounds: int, scratch: Path, *, cpu_time: bool) -> tuple[dict[str, Any], Points]:
    """Errors of one engine's model, and measured and predicted seconds by group of shapes."""
    artifact = built(checkpoint_folder(shape, scratch), scratch, max_seq_len=512)
    clock = time.process_time if cpu_time else time.perf_counter
    engine = load_engine(artifact.engine_dir, artifact.manifest, {"num_threads": 1} if cpu_time else {})
    engine.warmup()
    vocab_size = artifact.manifest.spec.vocab_size
    samples: list[Sample] = []
    measuring_s = seconds(lambda: samples.extend(measured_steps(engine, vocab_size=vocab_size, clock=clock)))
    limits = engine.info.limits
    groups = _timed(engine, _groups(limits, vocab_size), rounds, clock)
    engine.close()
    model = fit(samples, limits)
    assumed = CostModel.assumed(limits)
    for steps in groups.values():
        for step, _ in steps[:10]:
            assumed.observe(*step)
    predictions: dict[str, Predict] = {
        "model": model.seconds,
        "1, tokens": _regression(samples, lambda tokens, rows, longest: [1.0, tokens]),
        "1, tokens, sequences, slots, slots x longest": _regression(
            samples, lambda tokens, rows, longest: [1.0, tokens, rows, rows * longest, rows * longest**2]
        ),
        "assumed shape, speed learned": assumed.seconds,
    }
    points = {name: [(step.seconds, model.seconds(*step[:3])) for step, _ in steps] for name, steps in groups.items()}
    noise = [worst / step.seconds - 1 for steps in groups.values() for step, worst in steps]
    results = {
        "measuring": {"seconds": round(measuring_s, 1), "shapes": len(samples)},
        "median over shortest time of a batch, minus 1": round(float(np.median(noise)), 3),
        "errors": {name: _errors(predict, groups) for name, predict in predictions.items()},
        "ms, 1,024 tokens of texts of 64": round(1e3 * model.seconds(1024, 16, 64), 2),
        "efficient step, tokens, by length": {n: model.efficient_tokens(n) for n in (16, 64, 128, 256, 512)},
        "coefficients": model.to_json()["coefficients"],
    }
    return results, points


def plot(name: str, points: Points) -> None:
    """Predicted against measured steps, each group in its own colour; between the grey lines errors are below 15 %."""
    figure, ((axes,),) = panels(1, 1, (6.2, 5.4))
    for (group, pairs), color in zip(points.items(), (BLUE, ORANGE, GREEN), strict=True):
        measured_ms, predicted_ms = 1e3 * np.array(pairs).T
        error = np.median(np.abs(predicted_ms / measured_ms - 1))
        label = f"{group}: median error {error:.1%}"
        axes.plot(measured_ms, predicted_ms, "o", color=color, markersize=4, alpha=0.7, label=label)
    ends = np.array(axes.get_xlim())
    ends[0] = max(ends[0], 1e3 * min(pair[0] for pairs in points.values() for pair in pairs) / 1.2)
    axes.plot(ends, ends, color=GREY, linewidth=1)
    for factor in (0.85, 1.15):
        axes.plot(ends, factor * ends, color=GREY, linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
    axes.set_title(f"{name}: steps of shapes that were not fitted")
    for axis in (axes.xaxis, axes.yaxis):
        plain_log(axis)
    axes.legend(loc="upper left")
    save(figure, name)


def _groups(limits: Limits, vocab_size: int) -> dict[str, list[PackedBatch]]:
    rng = np.random.default_rng(1)
    equal = []
    for _ in range(_BATCHES_PER_GROUP):
        length = int(rng.choice(_EQUAL_LENGTHS))
        most = min(limits.max_batch_size, limits.max_num_tokens // length)
        equal.append(_packed([length] * int(np.rint(most ** rng.random())), vocab_size))
    arriving, lengths = [], mixed_lengths(_BATCHES_PER_GROUP * 12, limits.max_seq_len - 65, seed=2)
    for _ in range(_BATCHES_PER_GROUP):
        budget = limits.max_num_tokens ** (0.6 + 0.4 * rng.random())
        batch = [lengths.pop()]
        while len(lengths) and sum(batch) + lengths[-1] <= budget:
            batch.append(lengths.pop())
        arriving.append(_packed(batch, vocab_size))
        if not lengths:
            break
    encodings = random_encodings(mixed_lengths(2048, limits.max_seq_len, seed=1), vocab_size)
    cut = batches_in_flight(encodings, limits, CostModel.assumed(limits), 32, 4)
    chosen = rng.choice(len(cut), min(len(cut), _BATCHES_PER_GROUP), replace=False)
    return {
        "equal lengths": equal,
        "cut from mixed lengths": [cut[index] for index in chosen],
        "mixed lengths as they arrive": arriving,
    }


def _packed(lengths: list[int], vocab_size: int) -> PackedBatch:
    rng = np.random.default_rng(len(lengths))
    return PackedBatch.from_encodings([Encoding(rng.integers(0, vocab_size, n).astype(np.int32)) for n in lengths])


def _timed(
    engine: Engine, groups: dict[str, list[PackedBatch]], rounds: int, clock: Clock
) -> dict[str, list[tuple[Sample, float]]]:
    """Every batch with its shortest time, and the median one. Each round has an order of its own, over all groups."""
    batches = [batch for group in groups.values() for batch in group]
    rng = np.random.default_rng(0)
    times = np.zeros((rounds + 1, len(batches)))
    for row in times:  # the first one compiles
        for index in rng.permutation(len(batches)):
            started = clock()
            engine.run(batches[index])
            row[index] = clock() - started
    steps = iter(
        (
            Sample(batch.num_tokens, batch.batch_size, int(np.diff(batch.cu_seqlens).max()), float(column[1:].min())),
            float(np.median(column[1:])),
        )
        for batch, column in zip(batches, times.T, strict=True)
    )
    return {name: [next(steps) for _ in group] for name, group in groups.items()}


def _regression(samples: list[Sample], features: Callable[[int, int, int], list[float]]) -> Predict:
    rows = np.array([features(*sample[:3]) for sample in samples])
    found = nonnegative_least_squares(rows / np.array([[s.seconds] for s in samples]), np.ones(len(samples)))
    return lambda *shape: float(np.dot(features(*shape), found))


def _errors(predict: Predict, groups: dict[str, list[tuple[Sample, float]]]) -> dict[str, Any]:
    """Relative errors by group: of the predictions, and of the same scaled so that half of them are too high.

    The second is what remains once the speed has been corrected online: an error of the shape alone.
    """
    ratios = {name: np.array([predict(*s[:3]) / s.seconds for s, _ in steps]) for name, steps in groups.items()}
    ratios["all"] = np.concatenate(list(ratios.values()))
    middle = float(np.median(ratios["all"]))
    return {
        name: {
            "median": round(float(np.median(np.abs(group - 1))), 3),
            "p90": round(float(np.quantile(np.abs(group - 1), 0.9)), 3),
            "median, speed corrected": round(float(np.median(np.abs(group / middle - 1))), 3),
            "p90, speed corrected": round(float(np.quantile(np.abs(group / middle - 1), 0.9)), 3),
        }
        for name, group in ratios.items()
    }


if __name__ == "__main__":
    main()
