"""The newest 200 open text models of MTEB's own list, which is code in a package: names, months, and where they stand.

The list tells of a repository its base model, the numbers of parameters in all and in the table, the width of its
vectors, the library and prompts; some files say more. Models without parameters (BM25) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

PACKAGE = "mteb 2.26.24"
_MONTHS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

# By month of release, the newest first.
NEWEST: Mapping[str, tuple[str, ...]] = {
    month: tuple(name for names in files.values() for name in names) for month, files in _MONTHS.items()
}
# The file of the package that lists a repository.
FILES: Mapping[str, str] = {name: file for files in _MONTHS.values() for file, names in files.items() for name in names}
# What the list and other texts say of those without a row, and what is missing: by that text, the repositories.
UNKNOWN: Mapping[str, tuple[str, ...]] = {
    what: tuple(names)
    for what, names in yaml.safe_load((Path(__file__).parent / "unknown.yaml").read_text(encoding="utf-8")).items()
}
