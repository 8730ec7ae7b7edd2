"""Results of benchmarks as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.harness import record


def test_a_run_adds_to_results_of_such_a_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert record.kept("one") == {}
    record.write("one", {"cell": 1})
    assert record.kept("one") == {"cell": 1}
    content = json.loads((tmp_path / "one.json").read_bytes())
    content["machine"]["cpu"] = "another"
    (tmp_path / "one.json").write_text(json.dumps(content))
    assert record.kept("one") == {}
    assert record.recorded("one") == {"cell": 1}
