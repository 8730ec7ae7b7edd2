"""docs/clients.md has the rows of the tests that exist, and flags that exist. The clients need not be installed."""

from __future__ import annotations

import argparse
import re

import pytest

from bei.cli import main
from bei.cli.other_servers_flags import INSTEAD, SAME, table
from bei.errors import ConfigError
from tests.clients.table import FOLDERS, HEADING, PAGE, ROOT, Row, all_rows, rows_by_test, section, with_bases

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


def test_the_section_is_written_as_it_stands() -> None:
    text = PAGE.read_text("utf-8")
    versions = dict(re.findall(r"^\| ([^|]+) \| (\d[\d., ]*) \|$", text, re.M))
    assert HEADING + text.partition(HEADING)[2] == section(all_rows(), versions)


def test_the_base_urls_are_those_of_the_tests() -> None:
    text = PAGE.read_text("utf-8")
    assert text == with_bases(text, all_rows()), "run python -m tests.clients.table"
    assert "| ollama | Python | Ollama | `/`, `/ollama` |" in text


def flags_of(command: str) -> set[str]:
    (commands,) = (a for a in main._parser(command)._actions if isinstance(a, argparse._SubParsersAction))
    return {flag for action in commands.choices[command]._actions for flag in action.option_strings}


def test_flags_of_other_servers_lead_to_flags_that_exist() -> None:
    for theirs, ours in {SAME: " ".join(f"`{flag}`" for flag in SAME), **INSTEAD}.items():
        named = re.findall(r"`(?:bei (build) )?(--[a-z-]+)", ours)
        assert named or "`--" not in ours, theirs
        for command, flag in named:
            assert flag in flags_of(command or "serve"), flag


def test_the_page_has_the_flags_that_the_command_line_answers() -> None:
    section = PAGE.read_text("utf-8").split("\n## Flags of other servers\n")[1].split("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("| `")] == table()


@pytest.mark.parametrize("flag", [flag for flags in INSTEAD for flag in flags])
def test_a_flag_of_another_server_gets_the_page_s_answer(flag: str) -> None:
    for words in ([flag, "1"], [f"{flag}=1"], ["model", flag]):
        with pytest.raises(ConfigError, match=f"^{flag}: (use|not needed: ) *[^`]+ See 'bei serve --help'"):
            main._parser("serve").parse_args(["serve", *words])
