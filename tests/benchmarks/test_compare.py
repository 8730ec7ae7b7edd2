"""A benchmark in two checkouts: what is read of its output, which figures are compared, and what is left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compare import comparison, figures, last_object, results_of

# A benchmark as another checkout may have it: it prints progress and its results, and writes into its own folder.
_BENCHMARK = """
import json, pathlib, sys
results = pathlib.Path(__file__).parent / "results"
(results / "one.json").write_text("changed")
(results / "new.json").write_text("new")
print("{")
print("progress", sys.argv[1:])
print(json.dumps({"rate": 2.5, "more": {"ms": 1}}, indent=2))
"""


def test_figures_are_the_numbers_that_have_a_name_of_their_own() -> None:
    results = {"a": {"median": 2, "values": [1, 2, 3], "is_dry": True}, "b, ms": 0.5, "commit": "abc"}
    assert dict(figures(results)) == {"a > median": 2.0, "b, ms": 0.5}


def test_results_are_the_object_at_the_end() -> None:
    assert last_object('{\n  "rounds": 1\n}\nround 1\n{\n  "a": {\n    "b": 1\n  }\n}\n') == {"a": {"b": 1}}
    assert last_object('{\n  "a": 1\n}\n') == {"a": 1}


def test_only_figures_of_all_runs_are_compared_and_ratios_are_of_rounds() -> None:
    runs = {
        "now": [{"a": 2.0, "b": 1.0}, {"a": 8.0, "b": 0.0}],
        "before": [{"a": 1.0, "b": 1.0}, {"a": 4.0, "b": 2.0, "c": 1.0}],
    }
    found = comparison(runs)
    assert found.keys() == {"a", "b"}
    assert found["a"]["now / before"] == {"of medians": 2.0, "mean within rounds": 2.0, "its standard error": 0.0}
    assert found["a"]["now"]["values"] == [2.0, 8.0]
    assert found["b"]["now / before"]["mean within rounds"] is None


def test_a_benchmark_runs_as_its_checkout_has_it_and_leaves_the_results_there_as_they_were(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks"
    (folder / "results").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "results" / "one.json").write_text("kept")
    (folder / "speed.py").write_text(_BENCHMARK)
    assert results_of(tmp_path, "speed", ["--dry"]) == {"rate": 2.5, "more": {"ms": 1}}
    assert {path.name: path.read_text() for path in (folder / "results").iterdir()} == {"one.json": "kept"}
    with pytest.raises(SystemExit, match="ended with 1"):
        results_of(tmp_path, "nothing", [])


def test_the_command_says_what_it_needs() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.compare", "startup"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--before" in done.stderr
