"""Line charts as inline SVG, with a legend above them. Gaps stay gaps; nothing is smoothed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bei.utils.html.bar_chart import WIDTH, chart
from bei.utils.html.document import safe, scrolling

# Style that a page with charts adds: six colours that differ in light, dark and print, and for colour-blind readers.
STYLE = """
:root { --s1: #2f6fb0; --s2: #c2541b; --s3: #1a7a4c; --s4: #8a4fb0; --s5: #8a6d00; --s6: #b3266b; }
@media (prefers-color-scheme: dark) { :root { --s1: #6fa8dc; --s2: #f0925a; --s3: #62c48f; --s4: #c39be0; --s5: #d9b944;
  --s6: #f088b4; } }
@media print { :root { --s1: #2f6fb0; --s2: #c2541b; --s3: #1a7a4c; --s4: #8a4fb0; --s5: #8a6d00; --s6: #b3266b; } }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } svg .grid { stroke: var(--line); }
svg .d1 { stroke-dasharray: 6 3; } svg .d2 { stroke-dasharray: 2 3; } svg .label { fill: var(--quiet); }
svg .line.s1 { stroke: var(--s1); } svg .line.s2 { stroke: var(--s2); } svg .line.s3 { stroke: var(--s3); }
svg .line.s4 { stroke: var(--s4); } svg .line.s5 { stroke: var(--s5); } svg .line.s6 { stroke: var(--s6); }
svg .line.s0 { stroke: var(--quiet); }
svg .dot.s1 { fill: var(--s1); } svg .dot.s2 { fill: var(--s2); } svg .dot.s3 { fill: var(--s3); }
svg .dot.s4 { fill: var(--s4); } svg .dot.s5 { fill: var(--s5); } svg .dot.s6 { fill: var(--s6); }
svg .dot.s0 { fill: none; }
"""
NUM_COLORS = 6

_LEFT, _RIGHT = 52.0, 708.0
_LEGEND_ROW = 16
_BELOW = 34  # for the ticks and the label of the x axis
_MOST_DOTS = 40


@dataclass(frozen=True)
class Line:
    """A line. ``points`` have ascending x; y None is a gap. ``color``: 1 to NUM_COLORS, or 0 for a reference line;
    ``dash``: 0, 1 or 2."""

    label: str
    points: Sequence[tuple[float, float | None]]
    color: int
    dash: int = 0

    @property
    def shown(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in self.points if y is not None]


@dataclass(frozen=True)
class Axis:
    """An axis from ``low`` to ``high``. ``ticks``: positions and labels."""

    label: str
    low: float
    high: float
    ticks: list[tuple[float, str]] = field(default_factory=list)
    is_log: bool = False

    def share(self, value: float) -> float:
        """The relative position of ``value`` on the axis, 0 to 1."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        return min(1.0, max(0.0, (value - low) / (high - low)))


def linear_axis(label: str, values: Iterable[float]) -> Axis:
    """From 0 to a round number at or above all ``values``."""
    highest = max([*values, 0.0])
    step = _round_step(highest / 5 or 1.0)
    count = max(1, math.ceil(highest / step - 1e-9))
    return Axis(label, 0.0, count * step, [(number * step, _shown(number * step)) for number in range(count + 1)])


def log_axis(label: str, values: Iterable[float]) -> Axis:
    """From a 1, 2 or 5 times a power of ten at or below all positive ``values`` to one at or above them."""
    positive = [value for value in values if value > 0] or [1.0]
    lowest, highest = min(positive), max(positive)
    first, last = math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1
    marks = [digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)]
    low = max(mark for mark in marks if mark <= lowest * (1 + 1e-9))
    high = min(mark for mark in marks if mark >= highest * (1 - 1e-9) and mark > low)
    within = [mark for mark in marks if low <= mark <= high]
    if len(within) > 8:
        tens = [mark for mark in within if abs(math.log10(mark) - round(math.log10(mark))) < 1e-9]
        within = tens if len(tens) > 1 else within
    return Axis(label, low, high, [(mark, _shown(mark)) for mark in within], is_log=True)


def percentile_axis(highest: float) -> Axis:
    """An axis for ``tail(percentile)``: each decade is another nine."""
    nines = max(1, math.ceil(tail(highest) - 1e-9))
    names = ["50 %", "90 %", "99 %", "99.9 %", "99.99 %", "99.999 %", "99.9999 %"]
    ticks = [(0.0, "0 %"), *((tail(float(name[:-2])), name) for name in names[: nines + 1])]
    return Axis("percentile", 0.0, float(nines), [tick for tick in ticks if tick[0] <= nines + 1e-9])


def tail(percentile: float) -> float:
    """The number of nines of a percentile."""
    return -math.log10(max(1e-9, 1 - percentile / 100))


def line_chart(name: str, title: str, lines: Sequence[Line], x: Axis, y: Axis, *, height: int = 230) -> str:
    """A chart of ``lines``. ``name`` is a unique id on the page; ``title`` stands above the chart."""
    legend, top = _legend(lines, title)
    base = top + height

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return _LEFT + x.share(point[0]) * (_RIGHT - _LEFT), base - y.share(point[1]) * height

    parts = [*legend, *_axes(x, y, top, base)]
    for line in lines:
        parts += _drawn(line, place)
    words = "; ".join(_in_words(line, x, y) for line in lines)
    return scrolling(title, chart(name, title, words or "no figures", int(base + _BELOW), parts))


def _legend(lines: Sequence[Line], title: str) -> tuple[list[str], float]:
    """The legend's parts, and the y position at which the plot begins."""
    parts = [f'<text x="0" y="11" style="font-size:12px;font-weight:600">{safe(title)}</text>']
    left, row = 0.0, 1
    for line in lines:
        width = 34 + 6.0 * len(line.label)
        if left and left + width > WIDTH:
            left, row = 0.0, row + 1
        y = 12 + row * _LEGEND_ROW
        place = f'x1="{left:.1f}" y1="{y - 4}" x2="{left + 22:.1f}" y2="{y - 4}"'
        parts.append(f'<line class="line s{line.color} d{line.dash}" {place}/>')
        parts.append(f'<text x="{left + 27:.1f}" y="{y}">{safe(line.label)}</text>')
        left += width
    return parts, 12 + row * _LEGEND_ROW + 24.0


def _axes(x: Axis, y: Axis, top: float, base: float) -> list[str]:
    parts = [f'<text class="label" x="0" y="{top - 9:.1f}">{safe(y.label)}</text>']
    for value, text in y.ticks:
        at = base - y.share(value) * (base - top)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{_RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text class="label" x="{_LEFT - 6}" y="{at + 3.5:.1f}" text-anchor="end">{safe(text)}</text>')
    for value, text in x.ticks:
        at = _LEFT + x.share(value) * (_RIGHT - _LEFT)
        parts.append(f'<line class="axis" x1="{at:.1f}" y1="{base:.1f}" x2="{at:.1f}" y2="{base + 4:.1f}"/>')
        anchor = "end" if at > _RIGHT - 12 else "middle"
        parts.append(f'<text class="label" x="{at:.1f}" y="{base + 16:.1f}" text-anchor="{anchor}">{safe(text)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" y1="{base:.1f}" x2="{_RIGHT}" y2="{base:.1f}"/>')
    middle = (_LEFT + _RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{base + 30:.1f}" text-anchor="middle">{safe(x.label)}</text>')
    return parts


def _drawn(line: Line, place: Callable[[tuple[float, float]], tuple[float, float]]) -> list[str]:
    steps, is_down = [], False
    for px, py in line.points:
        if py is None:
            is_down = False
            continue
        at_x, at_y = place((px, py))
        steps.append(f"{'L' if is_down else 'M'}{at_x:.1f} {at_y:.1f}")
        is_down = True
    parts = [f'<path class="line s{line.color} d{line.dash}" d="{" ".join(steps)}"/>'] if steps else []
    if len(line.shown) <= _MOST_DOTS:
        dots = (place(point) for point in line.shown)
        parts += (f'<circle class="dot s{line.color}" cx="{at_x:.1f}" cy="{at_y:.1f}" r="2.6"/>' for at_x, at_y in dots)
    return parts


def _in_words(line: Line, x: Axis, y: Axis) -> str:
    shown = line.shown
    if not shown:
        return f"{line.label}: no figures"
    lowest, highest = min(value for _, value in shown), max(value for _, value in shown)
    of = f"{_shown(lowest)} to {_shown(highest)}" if highest > lowest else _shown(lowest)
    return f"{line.label}: {y.label} {of}, {x.label} {_shown(shown[0][0])} to {_shown(shown[-1][0])}"


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 2.5, 5, 10) if digit * power >= least * (1 - 1e-9))


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
