"""The tables of benchmarks/README.md, made of results/*.json by the template tables.md.

    python -m benchmarks.tables [--write]

In the template ``{NAME[key][key]:format}`` is a value of results/NAME.json, ``{NAME.machine}`` says where it was
measured, and ``{NAME.versions[PACKAGE]}`` with what; ``!l`` gives a length. A line ``@NAME[key] key=value | row``
stands for a row for each entry of that object or list whose fields have these values, with ``{key}`` and
``{row[...]}``. Without ``--write`` it ends with 1 where the README disagrees.
"""

from __future__ import annotations

import json
import re
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import parsed
from benchmarks.harness.record import COMMITTED

_FOLDER = Path(__file__).parent
README, TEMPLATE = _FOLDER / "README.md", _FOLDER / "tables.md"
_BEGIN, _END = "<!-- tables: python -m benchmarks.tables --write -->\n", "<!-- end of tables -->\n"
_EACH = re.compile(r"@(?P<source>[\w-]+(?:\[[^]]*\])*)(?P<filters>(?: \w+=\S+)*) (?P<row>\|.*)")


class _Object(dict[str, Any]):
    """A JSON object, whose keys may be numbers."""

    def __missing__(self, key: object) -> Any:
        if isinstance(key, int):
            return self[str(key)]
        raise KeyError(key)


class Results(_Object):
    """The results of a JSON file."""

    def __init__(self, name: str) -> None:
        content = json.loads((COMMITTED / f"{name}.json").read_bytes(), object_hook=_Object)
        super().__init__(content["results"])
        self._machine = content["machine"]
        self.versions: dict[str, str] = content.get("versions", {})

    @property
    def machine(self) -> str:
        machine = self._machine
        kinds = machine.get("computes in")
        precision = "" if kinds is None else f", {'BF16' if 'BF16' in kinds else 'FP32'}"
        return f"{machine['cpu'].removesuffix(' Processor')}, {machine['cores']} cores{precision}"


class _Formatter(string.Formatter):
    def convert_field(self, value: Any, conversion: Any) -> Any:
        return len(value) if conversion == "l" else super().convert_field(value, conversion)


class _Files(dict[str, Results]):
    def __missing__(self, name: str) -> Results:
        self[name] = Results(name)
        return self[name]


def main() -> int:
    options = parsed(__doc__, write=False)
    now = README.read_text()
    wanted = with_tables(now, rendered(TEMPLATE.read_text()))
    if options.write:
        README.write_text(wanted)
    return 0 if options.write or now == wanted else 1


def with_tables(readme: str, tables: str) -> str:
    begin, _, rest = readme.partition(_BEGIN)
    return f"{begin}{_BEGIN}\n{tables}\n{_END}{rest.partition(_END)[2]}"


def rendered(template: str) -> str:
    files = _Files()
    lines = [line for source in template.splitlines() for line in _lines(source, files)]
    return re.sub(r"(?<=\d)%", " %", "\n".join(lines)) + "\n"


def _lines(source: str, files: _Files) -> Iterator[str]:
    each = _EACH.fullmatch(source)
    if each is None:
        yield _Formatter().vformat(source, (), files)
        return
    entries: Any = files[re.split(r"\[", each["source"])[0]]
    for key in re.findall(r"\[([^]]*)\]", each["source"]):
        entries = entries[key]
    filters = dict(pair.split("=") for pair in each["filters"].split())
    for key, row in entries.items() if isinstance(entries, dict) else enumerate(entries):
        if all(str(row[name]) == value for name, value in filters.items()):
            yield _Formatter().vformat(each["row"], (), {"key": key, "row": row})


if __name__ == "__main__":
    sys.exit(main())
