"""Charts of lines: axes hold all values, lines stand where the values are, gaps stay gaps."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.utils.html.line_chart import Line, line_chart, linear_axis, log_axis, percentile_axis, tail


def drawn(shown: str) -> ElementTree.Element:
    """The chart within what it scrolls in."""
    (svg,) = ElementTree.fromstring(shown).findall("svg")
    return svg


@given(values=st.lists(st.floats(0, 1e9), max_size=20))
def test_linear_axes_begin_at_zero_and_hold_all_values(values: list[float]) -> None:
    axis = linear_axis("x", values)
    assert axis.low == 0
    assert axis.high >= max(values, default=0) * (1 - 1e-9)
    assert 2 <= len(axis.ticks) <= 8
    assert [value for value, _ in axis.ticks] == sorted(value for value, _ in axis.ticks)


@given(values=st.lists(st.floats(1e-6, 1e9), max_size=20))
def test_logarithmic_axes_hold_all_values_within_a_few_marks(values: list[float]) -> None:
    axis = log_axis("x", values)
    assert 0 < axis.low < axis.high
    assert all(axis.low * (1 - 1e-6) <= value <= axis.high * (1 + 1e-6) for value in values)
    assert 2 <= len(axis.ticks) <= 17
    assert all(0 <= axis.share(value) <= 1 for value in values)


def test_percentiles_have_a_decade_for_each_nine() -> None:
    assert [round(tail(each), 6) for each in (0, 90, 99, 99.9)] == [0, 1, 2, 3]
    assert [text for _, text in percentile_axis(99.5).ticks] == ["0 %", "50 %", "90 %", "99 %", "99.9 %"]
    assert [text for _, text in percentile_axis(0).ticks] == ["0 %", "50 %", "90 %"]


def test_a_chart_draws_its_lines_where_the_values_are_and_says_them_in_words() -> None:
    lines = [Line("a & b", [(0, 10.0), (1, None), (2, 20.0), (3, 30.0)], 1), Line("none", [(0, None)], 2, 1)]
    shown = line_chart("c", "A <title>", lines, linear_axis("s", [4]), linear_axis("ms", [40]))
    svg = drawn(shown)
    (path,) = svg.findall("path")
    assert re.fullmatch(r"M[\d. ]+ M[\d. ]+ L[\d. ]+", path.get("d", ""))  # a gap between the first and the second
    dots = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in svg.findall("circle")]
    assert len(dots) == 3
    steps = [(dots[n + 1][0] - dots[n][0], dots[n + 1][1] - dots[n][1]) for n in range(2)]
    assert steps[0][0] == pytest.approx(2 * steps[1][0], abs=0.2)
    assert steps[0][1] == pytest.approx(steps[1][1], abs=0.2)
    assert steps[0][1] < 0  # more is higher
    words = svg.findtext("desc") or ""
    assert "a & b: ms 10 to 30, s 0 to 3" in words
    assert "none: no figures" in words
    assert "A <title>" in [text.text for text in svg.findall("text")]


def test_many_lines_have_a_legend_of_several_rows_above_the_plot() -> None:
    lines = [Line(f"a rather long name of line {number}", [(0, 1.0)], 1) for number in range(8)]
    svg = drawn(line_chart("c", "t", lines, linear_axis("x", [1]), linear_axis("y", [1])))
    places = [float(text.get("x", "0")) for text in svg.findall("text")]
    assert max(places) <= 720
    height = float((svg.get("viewBox") or "").split()[3])
    assert all(0 <= float(text.get("y", "0")) <= height for text in svg.findall("text"))
