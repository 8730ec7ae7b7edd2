"""Two sections of docs/clients.md: base URLs, and every call of every client that a test makes and whether it works.

    python -m tests.clients.table

runs the tests that have a ``client_call`` mark, here and in tests/e2e, and writes them if all of them pass. A mark
is a row: the client's package, the dialect, the path that the client is pointed at, the call and, where the test shows
that something does not work, what (``fails``). The marks are literals, so the rows can be read without the clients:
tests/test_clients_table.py compares them with the page.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clients.md"
FOLDERS = ("tests/clients", "tests/clients/npm", "tests/clients/languages", "tests/e2e")
NPM = " (npm)"  # ends the names of packages for Node
# The programs of the page: what says the version of the language or, of Rust, of the library.
LANGUAGES = {
    "java.net.http (Java)": ("java", "--version"),
    "net/http (Go)": ("go", "version"),
    "ureq (Rust)": ("dpkg-query", "--show", "librust-ureq-dev"),
}
MARK = "client_call"

HEADING = "## Calls of clients"
_INTRODUCTION = f"""\
{HEADING}

Written by `python -m tests.clients.table`, which runs the tests named here against a real server of tiny random models.
Vectors and scores that a client returns are compared with what plain HTTP gets, or with those of transformers.
The base URL is the server's (`http://127.0.0.1:8000`) and the path in the column "at". Where a call does not work, its
test shows how it fails.
"""


class Row(NamedTuple):
    """A line of the table. ``fails`` is empty where the call works."""

    dialect: str
    package: str
    base: str
    call: str
    fails: str
    test: str

    def line(self) -> str:
        """In Markdown."""
        result = f"does not: {self.fails}" if self.fails else "works"
        return f"| {self.dialect} | {self.package} | `{self.base}` | {self.call} | {result} | `{self.test}` |"


def row_of(arguments: Sequence[str], keywords: Mapping[str, str], test: str) -> Row:
    """The row of a mark ``client_call(package, dialect, base, call, fails=...)`` on ``test``."""
    package, dialect, base, call = arguments
    return Row(dialect, package, base, call, keywords.get("fails", ""), test)


def rows_by_test(path: Path) -> Iterator[tuple[str, list[Row]]]:
    """Each test of a module with its rows, read from the source."""
    module = ast.parse(path.read_text("utf-8"))
    assigned = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            name = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
            rows = [row for decorator in node.decorator_list for row in _rows_in(decorator, assigned, name)]
            yield name, rows


def _rows_in(node: ast.expr, assigned: dict[str, ast.expr], test: str) -> Iterator[Row]:
    """Of the marks in a decorator, and in lists of parameters that it names."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(assigned.get(part.id), ast.List):
            yield from _rows_in(assigned[part.id], assigned, test)
        if isinstance(part, ast.Call) and ast.unparse(part.func) in ("row", f"pytest.mark.{MARK}"):
            arguments = [ast.literal_eval(argument) for argument in part.args]
            keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in part.keywords}
            yield row_of(arguments, keywords, test)


def all_rows() -> list[Row]:
    """Of all tests, in the order of the page."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).glob("test_*.py")]
    return sorted(row for path in paths for _, rows in rows_by_test(path) for row in rows)


def version_of(package: str) -> str:
    """Of an installed package, of several that are named together, or of a language."""
    if package in LANGUAGES:
        said = subprocess.run(LANGUAGES[package], check=True, capture_output=True, text=True).stdout
        return str(re.findall(r"\d+(?:\.\d+)+", said)[0])
    if not package.endswith(NPM):
        return metadata.version(package)
    installed = ROOT / "tests" / "clients" / "npm" / "node_modules"
    files = [installed / name / "package.json" for name in package.removesuffix(NPM).split(", ")]
    return ", ".join(json.loads(file.read_text("utf-8"))["version"] for file in files)


def section(rows: Sequence[Row], versions: Mapping[str, str]) -> str:
    """From ``HEADING`` to the end of the page."""
    known = [f"| {package} | {versions[package]} |" for package in sorted({row.package for row in rows})]
    return "\n".join(
        [
            _INTRODUCTION,
            "| client | version |",
            "|---|---|",
            *known,
            "",
            "| dialect | client | at | call | result | test |",
            "|---|---|---|---|---|---|",
            *(row.line() for row in rows),
            "",
        ]
    )


BASES = "## Base URLs"
_BASES_INTRODUCTION = f"""\
{BASES}

What a client is given in the place of its own server's address: `http://127.0.0.1:8000` and the path; for gRPC the
host and `--grpc-port`. Any text is a key where the server asks for none. Written from the tests below, as
`python -m tests.clients.table` found them; what does not work stands there.

| client | language | dialect | path of the base URL |
|---|---|---|---|
"""


def language_of(package: str) -> str:
    """In which ``package`` is written."""
    if package.endswith(NPM):
        return "JavaScript"
    return package.rpartition("(")[2].rstrip(")") if package in LANGUAGES else "Python"


def bases_section(rows: Sequence[Row]) -> str:
    """From ``BASES`` to the next heading."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in sorted(rows, key=lambda row: (row.package.lower(), row.dialect)):
        bases = found.setdefault((row.package, row.dialect), [])
        bases += [row.base] if row.base not in bases else []
    lines = []
    for (package, dialect), bases in found.items():
        paths = ", ".join(f"`{base}`" if base else "none" for base in sorted(bases))
        lines.append(f"| {package} | {language_of(package)} | {dialect} | {paths} |")
    return _BASES_INTRODUCTION + "\n".join(lines) + "\n"


def with_bases(text: str, rows: Sequence[Row]) -> str:
    """The page ``text`` with this section anew."""
    before, _, rest = text.partition(BASES)
    return before + bases_section(rows) + "\n## " + rest.partition("\n## ")[2]


class Recorder:
    """A pytest plugin: the rows whose tests have all passed."""

    def __init__(self) -> None:
        self._rows: dict[str, set[Row]] = {}
        self._failed: set[Row] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the marks."""
        for item in session.items:
            test = item.nodeid.partition("[")[0]
            marks = item.iter_markers(MARK)
            self._rows[item.nodeid] = {row_of(mark.args, mark.kwargs, test) for mark in marks}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that is skipped shows nothing, either."""
        if not report.passed:
            self._failed |= self._rows[report.nodeid]

    @property
    def passed(self) -> set[Row]:
        """Of the tests that were run."""
        return set().union(*self._rows.values()) - self._failed


def main() -> int:
    """Run the tests, write the section. The exit code is 1 where a row's test has not passed."""
    recorder = Recorder()
    arguments = ["-m", f"clients or {MARK}", "-W", "default", "--disable-warnings", "-q", *FOLDERS]
    status = pytest.main(arguments, plugins=[recorder])
    rows = all_rows()
    missing = [row for row in rows if row not in recorder.passed]
    if status or missing:
        sys.stderr.write("".join(f"not passed: {row.line()}\n" for row in missing))
        return 1
    before, _, _ = with_bases(PAGE.read_text("utf-8"), rows).partition(HEADING)
    versions = {row.package: version_of(row.package) for row in rows}
    PAGE.write_text(before + section(rows, versions), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
