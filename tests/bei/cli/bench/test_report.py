"""Result pages: all figures of the JSON, self-contained, with untrusted texts escaped."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bei.cli.bench.compare import as_text, compared, page
from bei.cli.bench.report import latency_chart, report_page, throughput_chart
from bei.cli.bench.result import SCHEMA, BenchResult, LoadResult, PointResult, read_result, warnings_of, write_result
from bei.cli.bench.terminal import summary
from bei.cli.bench.texts import TextsPlan
from bei.errors import BenchError, ComparisonError
from tests.bei.artifact.certificate.test_page import EVIL, Elements
from tests.bei.cli.bench.results import LOADS, result_of, setup_of


def numbers_in(content: Any) -> Iterator[str]:
    """Every number, as JSON has it."""
    if isinstance(content, bool) or content is None or isinstance(content, str):
        return
    if isinstance(content, (int, float)):
        yield json.dumps(content)
    else:
        for one in content.values() if isinstance(content, dict) else content:
            yield from numbers_in(one)


SINGLE = result_of(setup_of(rates=None, loads=LOADS[1:]))
SWEEP = result_of()
TWO = result_of(servers=("bei", "peer"))
RESULTS = pytest.mark.parametrize("result", [SINGLE, SWEEP, TWO], ids=["single", "sweep", "two servers"])


@RESULTS
def test_the_page_has_every_number_of_the_json_and_needs_nothing_but_itself(result: BenchResult) -> None:
    shown = report_page(result)
    elements = Elements(shown)
    assert elements.open == []
    cells = set(re.findall(r"[-+.\w]+", re.sub(r"<[^>]*>", " ", shown)))
    assert [number for number in numbers_in(msgspec.to_builtins(result)) if number not in cells] == []
    assert not {"script", "img", "link", "iframe", "object", "form", "a"} & set(elements.names)
    assert not re.search(r"@import|javascript:|url\(", shown)
    assert not [name for name, _ in elements.attributes if name.startswith("on") or name in ("src", "href")]
    assert "default-src 'none'" in shown
    assert "prefers-color-scheme: dark" in shown
    assert "@media print" in shown
    ids = [value for name, value in elements.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert elements.names.count("svg") == elements.names.count("desc") >= 3
    assert report_page(result) == shown


@pytest.mark.parametrize(("with_p99", "shown"), [(1, "highest"), (3, "P99")])
def test_p99_over_time_is_shown_where_most_intervals_have_one(with_p99: int, shown: str) -> None:
    load = SINGLE.points[0].loads[0]
    intervals = [
        msgspec.structs.replace(one, p99=7.0 if number < with_p99 else None)
        for number, one in enumerate(load.intervals)
    ]
    point = msgspec.structs.replace(SINGLE.points[0], loads=[msgspec.structs.replace(load, intervals=intervals)])
    chart = latency_chart(point, "latency")
    assert [f">{label}<" in chart for label in ("highest", "P99")] == [shown == label for label in ("highest", "P99")]


def test_throughput_is_drawn_within_the_window_as_the_last_answers_come_after_it() -> None:
    chart = throughput_chart(SINGLE, SINGLE.points[0], "throughput")
    assert chart == throughput_chart(SINGLE, _with_an_interval_after_the_window(SINGLE.points[0]), "throughput")


def _with_an_interval_after_the_window(point: PointResult) -> PointResult:
    load = point.loads[0]
    after = msgspec.structs.replace(load.intervals[-1], at_s=point.measured_s)
    return msgspec.structs.replace(point, loads=[msgspec.structs.replace(load, intervals=[*load.intervals, after])])


@pytest.mark.parametrize("result", [SINGLE, SWEEP], ids=["single", "sweep"])
def test_headings_leave_out_no_level(result: BenchResult) -> None:
    levels = [int(level) for level in re.findall(r"<h([1-6])", report_page(result))]
    assert levels[0] == 1
    assert all(below - above <= 1 for above, below in itertools.pairwise(levels)), levels


def test_no_text_gets_out_of_its_place() -> None:
    load = msgspec.structs.replace(SINGLE.points[0].loads[0], errors=[EVIL], failures={EVIL: 3})
    point = msgspec.structs.replace(SINGLE.points[0], server=EVIL, loads=[load])
    server = msgspec.structs.replace(
        SINGLE.servers[0], name=EVIL, url=EVIL, model=EVIL, software=EVIL, info={EVIL: EVIL}
    )
    evil = msgspec.structs.replace(SINGLE, points=[point], servers=[server], command=[EVIL], warnings=[EVIL])
    for shown in (report_page(evil), page(compared(evil, evil), Path("a"), Path("b"))):
        elements = Elements(shown)
        assert elements.open == []
        assert "img" not in elements.names
        assert not set("\x00\x1b\u202e") & set(shown)
    assert "\x1b" not in summary(evil)


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_result(SWEEP, path)
    assert read_result(path) == SWEEP
    assert json.loads(path.read_text())["schema"] == SCHEMA


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "no result"),
        (b'{"schema": 99}', "schema is 99"),
        (b"[]", "no result"),
        (b'{"schema": 1}', "no result"),
        (b'{"\xff": 1}', "no result"),
        (b'{"schema": ' + b"[" * 100_000, "no result"),
    ],
)
def test_files_that_hold_no_result_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with pytest.raises(BenchError, match="not there"):
        read_result(path)
    path.write_bytes(content)
    with pytest.raises(BenchError, match=message):
        read_result(path)


# Comparing.


def test_results_that_measured_the_same_are_compared_point_by_point() -> None:
    after = result_of()
    loads = [
        msgspec.structs.replace(load, requests_per_s=2 * load.requests_per_s, failures={"timeout": 7})
        for load in after.points[0].loads
    ]
    points = [msgspec.structs.replace(after.points[0], loads=loads), after.points[1]]
    found = compared(SWEEP, msgspec.structs.replace(after, points=points))
    ratios = {(row.rate, row.load): [ratio for *_, ratio in row.figures] for row in found.rows}
    assert ratios[21.5, "bulk"][0] == pytest.approx(2.0, rel=1e-3)
    assert ratios[43.0, "bulk"][0] == 1.0
    assert ratios[21.5, "bulk"][1] == 1.0
    assert ratios[21.5, "bulk"][3] is None  # no P99 of so few answers
    text = as_text(found, Path("a.json"), Path("b.json"))
    assert "B / A" in text
    assert "2.000" in text
    shown = page(found, Path("a.json"), Path("b.json"))
    assert Elements(shown).open == []
    assert "2.000" in Elements(shown).text
    assert shown.count("<svg") == 4


def test_a_server_may_have_another_name_where_there_is_one_and_what_else_differs_is_said() -> None:
    before, after = SWEEP, result_of(setup_of(duration_s=9.0, workers=4), servers=("new",))
    found = compared(before, after)
    assert [row.server for row in found.rows] == ["new"] * 4
    assert found.notes == ["duration_s: 4.0, then 9.0", "workers: 2, then 4"]


def changed_load(**changes: Any) -> list[Any]:
    return [LOADS[0], msgspec.structs.replace(LOADS[1], **changes)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dialect": "tei"}, 'dialect "openai" and "tei"'),
        ({"texts": TextsPlan(seed=18)}, "texts"),
        ({"texts": TextsPlan(seed=17, file="x", sha256="0" * 64, num_lines=3)}, "texts"),
        ({"texts": TextsPlan(seed=17, repeated=9)}, "texts"),
        ({"rates": [21.5, 50.0]}, r"rates \[21.5,43.0\] and \[21.5,50.0\]"),
        ({"loads": changed_load(concurrency=8)}, "concurrency of load bulk 4 and 8"),
        ({"loads": changed_load(words="30")}, 'words of load bulk "20" and "30"'),
        ({"loads": changed_load(name="other")}, "loads interactive, bulk and interactive, other"),
        ({"obeys_retry_after": True}, "obeys_retry_after"),
    ],
)
def test_results_that_measured_something_else_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ComparisonError, match=message):
        compared(SWEEP, result_of(setup_of(**changes)))


def test_other_servers_or_runs_that_were_ended_early_are_refused() -> None:
    with pytest.raises(ComparisonError, match="servers bei, peer and bei, other"):
        compared(TWO, result_of(servers=("bei", "other")))
    with pytest.raises(ComparisonError, match="the second was ended early"):
        compared(SWEEP, result_of(interrupted=True))


# Warnings.


def with_load(**changes: Any) -> BenchResult:
    """A run at 100 requests a second; the latency's ``p50`` is that of a good server."""
    result = result_of(setup_of(rates=None, loads=[msgspec.structs.replace(LOADS[0], rate=100.0)]))
    point = result.points[0]
    latency = msgspec.structs.replace(point.loads[0].latency, p50=5.0)
    good = {"num_due": 400, "requests_per_s": 99.0, "lateness_p99": 0.2, "latency": latency, **changes}
    load: LoadResult = msgspec.structs.replace(point.loads[0], **good)
    return msgspec.structs.replace(result, points=[msgspec.structs.replace(point, loads=[load])])


def test_a_good_run_has_no_warnings_and_says_so() -> None:
    assert warnings_of(with_load()) == []
    assert "No warnings" in report_page(with_load())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"failures": {"429": 3, "timeout": 2}}, "5 of .* failed \\(3 429, 2 timeout\\)"),
        ({"requests_per_s": 90.0}, "90 of 100 requests/s were answered within the window"),
        ({"lateness_p99": 1.5}, "sent late \\(P99 1.5 ms"),
    ],
)
def test_what_spoils_a_load_is_said(changes: dict[str, Any], message: str) -> None:
    (warning,) = warnings_of(with_load(**changes))
    assert re.search(message, warning)
    assert f"WARNING {warning}" in summary(msgspec.structs.replace(with_load(**changes), warnings=[warning]))


def test_lateness_that_is_small_beside_the_latency_is_none() -> None:
    latency = msgspec.structs.replace(with_load().points[0].loads[0].latency, p50=500.0)
    assert warnings_of(with_load(lateness_p99=40.0, latency=latency)) == []


def test_a_generator_without_time_to_spare_an_early_end_and_repeated_texts_are_said() -> None:
    result = with_load()
    point = msgspec.structs.replace(result.points[0], cpu_shares=[0.2, 0.93])
    (warning,) = warnings_of(msgspec.structs.replace(result, points=[point]))
    assert "93% of a core" in warning
    setup = msgspec.structs.replace(result.setup, texts=TextsPlan(repeated=10))
    first, second = warnings_of(msgspec.structs.replace(result, interrupted=True, setup=setup))
    assert "ended early" in first
    assert "repeated" in second
