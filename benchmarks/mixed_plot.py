"""The plot of ``benchmarks.mixed``: latencies of single texts and the bulk throughput beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.plots import BLUE, GREY, ORANGE, RED, bars, panels, save, tail, tail_axes

if TYPE_CHECKING:
    from benchmarks.mixed import Samples

_NOTE = "Dots: 99th percentile; latency counts from when a text was due. Bars: medians; marks: repetitions."
_TITLES = {
    "requests-256": "single texts beside requests of 256 passages, concurrency 4",
    "request-2048": "single texts beside one request of 2,048 texts of 256 tokens",
    "two-models": "two models in one server, requests of 256 passages on one of them",
}


def plot(shape: str, case: str, samples: Samples) -> None:
    """Write ``results/mixed-<shape>-<case>.png``."""
    figure, axes = panels(1, 2, (11, 3.6), width_ratios=(3, 2))
    left, right = axes[0]
    for label, latencies in samples.single_s.items():
        color, style = _look(label)
        tail(left, latencies, label, color, style)
    tail_axes(left, f"{shape}: {_TITLES[case]}")
    left.legend(loc="lower left")
    rates = samples.bulk_rate
    bars(right, list(rates), list(rates.values()), [_look(label)[0] for label in rates])
    right.set(title="bulk work meanwhile, texts a second")
    figure.suptitle(_NOTE, fontsize=9, x=0.01, ha="left")
    save(figure, f"mixed-{shape}-{case}")


def _look(label: str) -> tuple[str, str]:
    if "alone" in label:
        return GREY, "--" if label.startswith("before") else ":" if label.endswith("busy model") else "-"
    if label.startswith("before"):
        return RED, "-"
    return (ORANGE if label.endswith(("one lane", "busy model")) else BLUE), "-"
