"""``bei simulate``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bei.cli.main import main
from tests.bei.artifact.certificate.test_page import Elements

QUICK = ("--devices", "1", "--seconds", "1", "--bulk-texts", "32")


def simulated(tmp_path: Path, *flags: str) -> Any:
    main(["simulate", *QUICK, "--json", str(tmp_path / "out.json"), *flags])
    return json.loads((tmp_path / "out.json").read_bytes())


def test_policies_are_compared_in_a_table_and_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = simulated(tmp_path, "--trace", "poisson", "--load", "0.5")
    printed = capsys.readouterr().out
    assert "l4-bge-large (assumed, not measured)" in printed
    assert set(content["policies"]) == {"bei", "fifo", "fixed"}
    assert content["is_assumed"]
    assert content["trace"]["load"] == 0.5
    assert re.match(r"With \w+ 99 of 100 single queries are answered within [\d.]+ ms \(", printed)
    assert re.search(r"^ +bei +fifo +fixed$", printed, re.M)
    assert all(len(line) <= 80 for line in printed.splitlines() if not re.match("With|costs:|trace:", line))
    for result in content["policies"].values():
        assert result["window_s"] == [0.1, 1.0]
        assert result["lanes"]["bulk"]["tokens_per_s"] > 0
        assert 0 < result["steps"]["device_use"] <= 1


def test_the_page_begins_with_the_result_and_draws_both_lanes(tmp_path: Path) -> None:
    simulated(tmp_path, "--trace", "poisson", "--load", "0.5", "--html", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    first = re.search(r"</h1>\n<p[^>]*>([^<]+)</p>", page)
    assert first is not None
    assert first[1].startswith("With ")
    elements = Elements(page)
    assert elements.open == []
    assert elements.names.count("svg") == 2
    assert not {"script", "img", "link"} & set(elements.names)
    assert '<th scope="col"></th>' not in page, "a heading that a screen reader would read as nothing"
    for name in ("bei", "fifo", "fixed"):
        assert page.count(f">{name}<") >= 3, "in both pictures and in the table"


def test_without_single_queries_the_result_is_that_of_bulk_work(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"lane":"bulk","tokens":[80,31,204],"at_s":0.5}\n')
    page = tmp_path / "page.html"
    main(["simulate", "--devices=1", f"--trace={trace}", "--seconds=1", f"--html={page}"])
    assert "tokens/s; there were no single queries." in page.read_text()


def test_a_trace_that_was_written_gives_the_same_figures(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    first = simulated(tmp_path, "--warm-seconds", "0", "--write-trace", str(path))
    out = tmp_path / "again.json"
    main(["simulate", "--devices=1", f"--trace={path}", "--seconds=1", "--concurrency=4", f"--json={out}"])
    assert json.loads(out.read_bytes())["policies"] == first["policies"]


def test_bei_s_rules_and_the_front_are_taken_over(tmp_path: Path) -> None:
    few = ("--trace", "backfill", "--policies", "bei")
    plain, capped, slow = (
        simulated(tmp_path, *few, *more)["policies"]["bei"]
        for more in ((), ("--step-cap-ms", "10"), ("--front-request-ms", "30", "--front-cores", "1"))
    )
    assert capped["steps"]["mean_tokens"] < plain["steps"]["mean_tokens"]
    assert slow["lanes"]["bulk"]["tokens_per_s"] < plain["lanes"]["bulk"]["tokens_per_s"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--trace", "missing.jsonl"], "is no trace"),
        (["--costs", "missing.json"], "is no table of costs"),
        (["--trace", "backfill", "--load", "0.5"], "--interactive-share"),
        (["--trace", "poisson", "--concurrency", "3"], "--concurrency"),
        (["--policies", "fifo", "--step-cap-ms", "3"], "--step-cap-ms"),
        (["--warm-seconds", "1"], "--warm-seconds"),
        (["--trace", "poisson", "--seconds", "1e-9"], "--seconds"),
        (["--trace", "{trace}", "--load", "0.5", "--seed", "1"], "--load, --seed"),
        (["--trace", "{trace}", "--concurrency", "2"], "--concurrency"),
        (["--trace", "{folder}"], "is no trace"),
    ],
)
def test_what_would_not_be_honoured_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b'{"lane": "bulk", "tokens": [3], "at_s": 1}\n')
    quick = () if "{trace}" in flags else ("--devices", "1", "--seconds", "1")
    arguments = ["simulate", *quick, *(flag.format(trace=trace, folder=tmp_path) for flag in flags)]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert told in line


@pytest.mark.parametrize(
    "flags",
    [["--devices", "0"], ["--load", "nan"], ["--seconds", "inf"], ["--bulk-share", "1"], ["--policies", "bei,lifo"]],
)
def test_numbers_and_names_are_checked(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *flags])
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err
