"""Charts of a certificate's page. Equal certificates give equal text."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator

from bei.artifact.certificate.record import Agreement, CosineHistogram, QuantizationRecord, Thresholds
from bei.artifact.certificate.reliability import ProbabilityCalibration
from bei.utils.html.bar_chart import chart
from bei.utils.html.document import safe

# The number of layers drawn: those with the largest errors.
MOST_LAYERS = 60

_LEFT, _RIGHT = 8.0, 712.0
_TOP, _BASE = 48.0, 176.0
_ROW = 17
_LABELS = 300.0  # x position at which the layers' bars begin


def histogram_chart(row: Agreement, thresholds: Thresholds | None, name: str) -> str:
    """A histogram of one output's cosines, those near 1 on the right; ``name`` is a unique id on the page."""
    histogram = row.histogram
    width = (_RIGHT - _LEFT) / len(histogram.counts)
    highest = max(1, *histogram.counts)
    parts = _threshold_lines(histogram, thresholds) if thresholds else []
    for place, count in enumerate(histogram.counts):
        left = _RIGHT - (place + 1) * width
        low = thresholds is not None and place > 0 and histogram.edges[place - 1] >= 1 - thresholds.min
        if count:
            height = max(2.0, count / highest * (_BASE - _TOP - 18))
            kind = "bar low" if low else "bar"
            top = _BASE - height
            parts.append(
                f'<rect class="{kind}" x="{left + 2:.1f}" y="{top:.1f}" width="{width - 4:.1f}" height="{height:.1f}"/>'
            )
            parts.append(f'<text class="count" x="{left + width / 2:.1f}" y="{top - 5:.1f}">{count}</text>')
    for place, edge in enumerate(histogram.edges):
        x = _RIGHT - (place + 1) * width
        parts.append(f'<line class="axis" x1="{x:.1f}" y1="{_BASE}" x2="{x:.1f}" y2="{_BASE + 4}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_BASE + 17}">{_cosine(edge)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" y1="{_BASE}" x2="{_RIGHT}" y2="{_BASE}"/>')
    title = f"Cosines of {row.output}: how many lie in each range"
    return chart(name, title, "; ".join(_in_words(histogram)), 204, parts)


def _threshold_lines(histogram: CosineHistogram, thresholds: Thresholds) -> list[str]:
    parts = []
    # The mean's label stands higher, since close thresholds have close labels.
    for kind, value, y in (("min", thresholds.min, 24), ("p1", thresholds.p1, 24), ("mean", thresholds.mean, 10)):
        x = _place(histogram, 1 - value)
        parts.append(f'<line class="threshold" x1="{x:.1f}" y1="{y + 4}" x2="{x:.1f}" y2="{_BASE}"/>')
        anchor = "end" if x > _RIGHT - 50 else "start" if x < _LEFT + 50 else "middle"
        parts.append(f'<text class="limit" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{kind} ≥ {value:g}</text>')
    return parts


def _place(histogram: CosineHistogram, distance: float) -> float:
    """The position of a cosine at ``distance`` from 1: logarithmic within a bucket."""
    edges = histogram.edges
    index = bisect_right(edges, distance)
    if index == 0:
        share = max(0.0, distance) / edges[0]
    elif index == len(edges):
        share = min(1.0, (distance - edges[-1]) / (2 - edges[-1]))
    else:
        share = math.log(distance / edges[index - 1]) / math.log(edges[index] / edges[index - 1])
    return _RIGHT - (index + share) * (_RIGHT - _LEFT) / len(histogram.counts)


def _in_words(histogram: CosineHistogram) -> Iterator[str]:
    edges, last = histogram.edges, len(histogram.counts) - 1
    for place, count in enumerate(histogram.counts):
        if count:
            above = "" if place == last else f"above {_cosine(edges[place])}"
            below = "" if place == 0 else f"up to {_cosine(edges[place - 1])}"
            yield f"{count} {' '.join(filter(None, (above, below)))}"


def _cosine(distance: float) -> str:
    return f"{1 - distance:.6f}".rstrip("0").rstrip(".")


def layers_chart(record: QuantizationRecord, name: str) -> str:
    """Bars of the layers' sensitivities, the largest first; layers left in the higher precision are hatched."""
    layers = record.by_sensitivity[:MOST_LAYERS]
    largest = max([layer.sensitivity for layer in layers], default=0.0) or 1.0
    form = ".1e" if record.has_effects else ".4f"
    parts = [
        f'<pattern id="{name}-hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect class="high" width="6" height="6"/><line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern>'
    ]
    for index, layer in enumerate(layers):
        y = 4 + index * _ROW
        length = max(1.0, layer.sensitivity / largest * (_RIGHT - _LABELS - 110))
        fill = f'fill="url(#{name}-hatch)"' if layer.is_high else 'class="bar"'
        note = f"{layer.sensitivity:{form}}" + ", not quantized" * layer.is_high
        parts.append(f'<text class="name" x="{_LABELS - 6:.1f}" y="{y + 11}">{safe(layer.layer)}</text>')
        parts.append(
            f'<rect {fill} x="{_LABELS:.1f}" y="{y}" width="{length:.1f}" height="{_ROW - 4}"/>'
            f'<text class="value" x="{_LABELS + length + 5:.1f}" y="{y + 11}">{note}</text>'
        )
    words = (f"{layer.layer} {layer.sensitivity:{form}}{', not quantized' * layer.is_high}" for layer in layers)
    what = "What quantizing a layer changes of the outputs" if record.has_effects else "Error of each layer's product"
    title = f"{what}, the largest first"
    return chart(name, title, "; ".join(words), 8 + len(layers) * _ROW, parts)


def reliability_chart(found: ProbabilityCalibration, name: str) -> str:
    """The share of right answers by their probability after the temperature, against the diagonal of equal ones."""
    width, height = (_RIGHT - _LEFT) / len(found.after.bins), _BASE - _TOP
    parts = []
    for place, one in enumerate(found.after.bins):
        left = _LEFT + place * width
        if one.count:
            top = _BASE - max(2.0, one.accuracy * height)
            parts.append(
                f'<rect class="bar" x="{left + 2:.1f}" y="{top:.1f}" width="{width - 4:.1f}" '
                f'height="{_BASE - top:.1f}"/>'
            )
            parts.append(f'<text class="count" x="{left + width / 2:.1f}" y="{top - 5:.1f}">{one.count}</text>')
        parts.append(f'<text class="tick" x="{left + width / 2:.1f}" y="{_BASE + 17}">{place / 10 + 0.05:.2f}</text>')
    parts.append(f'<line class="threshold" x1="{_LEFT}" y1="{_BASE}" x2="{_RIGHT}" y2="{_TOP}"/>')
    parts.append(f'<line class="axis" x1="{_LEFT}" y1="{_BASE}" x2="{_RIGHT}" y2="{_BASE}"/>')
    words = [
        f"{one.count} texts of mean probability {one.confidence:.3f}, {one.accuracy:.1%} right"
        for one in found.after.bins
        if one.count
    ]
    return chart(name, f"Reliability of {found.task}: right answers by probability", "; ".join(words), 204, parts)
