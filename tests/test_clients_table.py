"""docs/clients.md has the rows of the tests that exist. The clients need not be installed."""

from __future__ import annotations

from tests.clients.table import FOLDERS, PAGE, ROOT, Row, all_rows, rows_by_test

LINES = PAGE.read_text("utf-8").splitlines()


def lines_of(rows: list[Row]) -> list[str]:
    return [row.line() for row in rows]


def test_the_page_has_a_row_for_each_call_that_is_tested() -> None:
    start = LINES.index("| dialect | client | at | call | result | test |") + 2
    assert LINES[start:] == lines_of(all_rows()), "run python -m tests.clients.table"


def test_no_two_rows_are_the_same() -> None:
    rows = all_rows()
    assert len(set(rows)) == len(rows)


def test_every_test_of_the_tier_has_a_row() -> None:
    modules = sorted((ROOT / FOLDERS[0]).glob("test_*.py"))
    assert len(modules) >= 5
    without = [name for module in modules for name, rows in rows_by_test(module) if not rows]
    assert without == []


def test_every_client_has_a_version() -> None:
    start, end = (
        LINES.index("| client | version |") + 2,
        LINES.index("| dialect | client | at | call | result | test |"),
    )
    named = {line.split(" | ")[0].removeprefix("| ") for line in LINES[start : end - 1]}
    assert named == {row.package for row in all_rows()}
