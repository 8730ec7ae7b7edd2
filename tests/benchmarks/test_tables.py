"""The README's tables are those of the JSON."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.harness.record import COMMITTED


def test_the_readme_has_the_tables_of_the_json() -> None:
    now = tables.README.read_text()
    assert now == tables.with_tables(now, tables.rendered(tables.TEMPLATE.read_text())), (
        "python -m benchmarks.tables --write"
    )


def test_every_json_has_a_table_or_a_document() -> None:
    template, readme = tables.TEMPLATE.read_text(), tables.README.read_text()
    for path in COMMITTED.glob("*.json"):
        assert re.search(rf"[{{@]{path.stem}[\[.]", template) or f"`{path.stem}`" in readme, path


def test_rows_are_made_of_the_entries_that_have_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = '{"machine": {"cpu": "A CPU", "cores": 2, "computes in": ["BF16"]}, "versions": {"a-b": "1.2"}, '
    content += '"results": {"runs": [{"load": 0.5, "p99": 1234.5, "ids": [1, 2]}, {"load": 0.9, "p99": 2}], '
    content += '"statuses": {"429": 0.955}}}'
    (tmp_path / "one.json").write_text(content)
    monkeypatch.setattr(tables, "COMMITTED", tmp_path)
    template = "{one.machine}, {one.versions[a-b]}: {one[statuses][429]:.1%}\n"
    template += "@one[runs] load=0.5 | {key} | {row[p99]:,.0f} | {row[ids]!l} |"
    assert tables.rendered(template) == "A CPU, 2 cores, BF16, 1.2: 95.5 %\n| 0 | 1,234 | 2 |\n"
