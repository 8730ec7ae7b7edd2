"""The result in sentences, with which the page and the terminal's summary begin; the summary at 80 columns."""

from __future__ import annotations

import re
import sys
from typing import Any

import msgspec
import pytest

from bei.cli import console_text
from bei.cli.bench import terminal
from bei.cli.bench.findings import findings
from bei.cli.bench.report import report_page
from bei.cli.bench.result import BenchResult
from bei.cli.bench.terminal import HEADER, summary
from tests.bei.cli.bench.results import LOADS, result_of, setup_of

SINGLE = result_of(setup_of(rates=None, loads=LOADS[1:]))
SWEEP = result_of()
TWO = result_of(servers=("bei", "peer"))


def with_loads(result: BenchResult, changes: list[dict[str, Any]]) -> BenchResult:
    """``result`` with fields of the first load of each point replaced."""
    points = [
        msgspec.structs.replace(point, loads=[msgspec.structs.replace(point.loads[0], **fields), *point.loads[1:]])
        for point, fields in zip(result.points, changes, strict=True)
    ]
    return msgspec.structs.replace(result, points=points)


def test_a_single_point_is_what_was_answered_and_how_fast() -> None:
    load = SINGLE.points[0].loads[0]
    latency = msgspec.structs.replace(load.latency, p50=12.34, p99=345.6)
    fields = {"requests_per_s": 80.0, "inputs_per_s": 2560.0, "latency": latency, "failures": {}}
    said = (
        "The server answered 80.0 requests/s (2,560.0 inputs/s), half of them within 12.3 ms, 99 of 100 within 346 ms"
    )
    assert findings(with_loads(SINGLE, [fields])) == [f"{said}; none failed."]
    fields |= {"failures": {"429": 3}, "num_due": 2400}
    assert findings(with_loads(SINGLE, [fields])) == [f"{said}; 3 of 2,400 failed."]


def test_a_sweep_is_the_rate_that_was_kept_and_what_became_of_the_next() -> None:
    kept = {"requests_per_s": 21.5, "num_due": 86, "failures": {}}
    missed = {"requests_per_s": 30.0, "num_due": 172, "failures": {}}
    (first, second) = findings(with_loads(SWEEP, [kept, missed]))
    assert re.match(
        r"The server \(interactive\) kept up with 21\.5 requests/s, half .*; at 43 it answered 30\.0, ", first
    )
    assert second.startswith("The server (bulk), beside 43 requests/s of the other load")
    assert findings(with_loads(SWEEP, [kept, missed | {"requests_per_s": 42.9}]))[0].startswith(
        "The server (interactive) kept up with every rate, up to 43 requests/s"
    )
    assert (
        "kept up with no rate: at 21.5 it answered 3.0"
        in findings(with_loads(SWEEP, [missed | {"requests_per_s": 3.0}, missed]))[0]
    )
    seldom = kept | {"requests_per_s": 18.0, "num_due": 72}  # arrivals are random: it was asked for fewer
    assert "kept up with 21.5 requests/s" in findings(with_loads(SWEEP, [seldom, missed]))[0]
    failing = kept | {"failures": {"429": 1}}
    assert "kept up with no rate" in findings(with_loads(SWEEP, [failing, missed]))[0], "a failure is no answer"


@pytest.mark.parametrize("result", [SINGLE, SWEEP, TWO], ids=["single", "sweep", "two servers"])
def test_page_and_summary_begin_with_the_result(result: BenchResult) -> None:
    said = findings(result)
    assert len(said) == len(result.servers) * len(result.setup.loads)
    assert summary(result).splitlines()[: len(said)] == said
    assert re.search(r"</h1>\s*<p[^>]*><bdi>([^<]+)</bdi>", report_page(result))[1] == said[0]  # type: ignore[index]


def test_on_a_terminal_sentences_end_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = summary(SWEEP)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(console_text, "stdout_width", lambda: 60)
    lines = summary(SWEEP).splitlines()
    assert all(len(line) <= 60 for line in lines[:4])
    assert " ".join(lines).split()[:40] == plain.split()[:40]


@pytest.mark.parametrize(("columns", "left_out"), [(80, {"CPU", "P99.9", "P90", "inputs/s"}), (140, set())])
def test_the_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, left_out: set[str]) -> None:
    monkeypatch.setattr(terminal, "stdout_width", lambda: columns)
    lines = summary(TWO).splitlines()
    header = next(line for line in lines if "asked/s" in line)
    assert {name for name in HEADER if name not in header.split()} == left_out
    assert all(len(line) <= columns for line in lines[lines.index(header) :])
