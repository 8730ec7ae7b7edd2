"""Plots of results: one look for all of them, small files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.common import RESULTS
from benchmarks.summaries import Values

GREY, BLUE, ORANGE, GREEN, RED, PURPLE = "#7a7a7a", "#1f6fb4", "#e08214", "#2a9d5c", "#c0392b", "#8e5ea2"

_STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.labelsize": 9.5,
    "font.size": 9.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.7,
}


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure of ``size`` inches and its axes, [rows, columns]. Needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(_STYLE)
    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)


def save(figure: Any, name: str) -> None:
    """Write ``results/<name>.png``, of 64 colours: a third of the bytes, and nobody sees it."""
    from matplotlib import pyplot
    from PIL import Image

    RESULTS.mkdir(exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100, format="png")
    pyplot.close(figure)
    image = Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    image.save(RESULTS / f"{name}.png", optimize=True)


def tail(axes: Any, seconds: Values, label: str, color: str, style: str = "-") -> None:
    """The share of samples that waited longer than x: 1 - ECDF, both axes logarithmic; the 99th percentile marked."""
    if not len(seconds):
        return
    waits = np.sort(np.asarray(seconds, np.float64)) * 1e3
    longer = 1 - np.arange(len(waits)) / len(waits)
    axes.step(waits, longer, where="post", label=label, color=color, linestyle=style)
    p99 = float(np.percentile(waits, 99, method="inverted_cdf"))
    axes.plot([p99], [0.01], "o", color=color, markersize=4)


def tail_axes(axes: Any, title: str) -> None:
    """Scales, ticks and words of a plot of tails."""
    axes.set(xscale="log", yscale="log", ylim=(1e-3, 1.15), title=title, xlabel="latency, ms")
    axes.set_yticks([1, 0.5, 0.1, 0.01, 0.001], ["all", "half", "10 %", "1 %", "0.1 %"])
    axes.minorticks_off()
    axes.set_ylabel("share that waited longer")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.grid(True, color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)


def plain_log(axis: Any) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def bars(axes: Any, labels: Sequence[str], values: Sequence[Sequence[float]], colors: Sequence[str]) -> None:
    """A horizontal bar a label at the median of its values, every value a dot on it."""
    places = np.arange(len(labels))[::-1]
    for place, samples, color in zip(places, values, colors, strict=True):
        median = float(np.median(samples))
        axes.barh(place, median, color=color, alpha=0.75, height=0.6)
        axes.plot(samples, [place] * len(samples), "|", color="black", markersize=7, alpha=0.6)
        axes.annotate(f" {median:,.4g}", (max(samples), place), va="center", fontsize=8.5)
    axes.set_yticks(places, labels)
    axes.set_xlim(0, max(max(samples) for samples in values) * 1.18)
