"""Plots of results/*.json, drawn as results/NAME.png: one look for all of them, small files.

python -m benchmarks.plots [--names bulk overload simulator soak]
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib import pyplot
from PIL import Image

from benchmarks.harness.arguments import parsed
from benchmarks.harness.record import RESULTS, recorded

Panel = tuple[Mapping[str, Iterable[tuple[float, float]]], Mapping[str, Any]]  # points by label; settings
_COLORS = ("#1f6fb4", "#e08214", "#7a7a7a")
_STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "font.size": 9.5,
    "legend.frameon": False,
}


def main() -> None:
    matplotlib.use("Agg")
    pyplot.rcParams.update(_STYLE)
    plots = {"bulk": bulk, "overload": overload, "simulator": simulator, "soak": soak}
    for name in parsed(__doc__, names=list(plots)).names:
        plots[name](recorded(name))


def bulk(results: Any) -> None:
    memory = results["memory"]
    line = {f"{memory['rows']:,} rows": list(zip(memory["seconds"], memory["RSS, MB"], strict=True))}
    settings = {"title": "resident memory of bei embed, MB", "xlabel": "seconds since it began", "ylim": (0, None)}
    _draw("bulk", [(line, settings)])


def overload(results: Any) -> None:
    memory = {name: results[name]["RSS, MB"]["every few seconds"] for name in ("no deadline", "deadline")}
    settings = {"title": "resident memory, MB", "xlabel": "seconds since the load began", "ylim": (0, None)}
    _draw("overload", [(memory, settings)])


def soak(results: Any) -> None:
    samples, panels = results["samples"], list[Panel]()
    for name, verdict in results["verdicts"].items():
        line = {"flat" if verdict["flat"] else "not flat": list(zip(samples["minutes"], samples[name], strict=True))}
        settings = {"title": f"{name}: rise {verdict['rise']:+g}", "xlabel": "minutes"}
        panels.append((line, {**settings, "ylim": (0, 1.15 * max(samples[name]))}))
    _draw("soak", panels)


def simulator(results: Any) -> None:
    """Latency against throughput: a panel for each number of devices, Poisson arrivals at rising load."""
    panels: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for row in (row for row in results["runs"] if row["trace"] == "poisson"):
        bulk, interactive = row["lanes"]["bulk"]["tokens_per_s"] / 1e3, row["lanes"]["interactive"]["p99_ms"]
        panels.setdefault(row["devices"], {}).setdefault(row["policy"], []).append((bulk, interactive))
    labels = {"xlabel": "bulk, thousands of tokens a second", "ylabel": "interactive P99, ms", "yscale": "log"}
    titled = [(lines, {"title": f"devices: {count}; costs assumed", **labels}) for count, lines in panels.items()]
    _draw("simulator", titled, "o-")


def _draw(name: str, panels: Sequence[Panel], style: str = "-") -> None:
    """Of 64 colours: a third of the bytes, and no visible difference."""
    size = (4.4 * len(panels), 3.6)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for each, (lines, settings) in zip(axes[0], panels, strict=True):
        for (label, points), color in zip(lines.items(), _COLORS, strict=False):
            each.plot(*zip(*points, strict=True), style, color=color, label=label, markersize=3.5)
        each.set(**settings)
        each.legend(loc="best")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100, format="png")
    image = Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    image.save(RESULTS / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
