"""Build every structure of the list, compare it, and write docs/coverage.csv and .md: ``python -m tests.hub_matrix``.

``--only TEXT`` (as often as needed) runs the entries whose repositories have TEXT in their names, prints their verdicts
and writes nothing; with ``--write`` it writes both files, and all other rows keep the verdicts that they have there.
``--tokenizers`` measures published tokenizers anew, which a package carries.
The exit code is 1 where a row is wrong or crashes.
"""

from __future__ import annotations

import argparse
import sys
import traceback

import torch
from transformers.utils import logging

from tests.hub_matrix import published
from tests.hub_matrix.document import DOCUMENT, document, written_comparisons
from tests.hub_matrix.entries import ENTRIES
from tests.hub_matrix.structures import Entry
from tests.hub_matrix.table import TABLE, text_of, written_verdicts
from tests.hub_matrix.verdicts import Verdict, verdict_of


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="a part of the repositories' names")
    parser.add_argument("--write", action="store_true", help="write the documents after --only too")
    parser.add_argument("--tokenizers", action="store_true", help=f"measure those of {published.PACKAGE} anew too")
    arguments = parser.parse_args()
    only = [text.lower() for text in arguments.only]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)  # tiny matrices are slower on several
    entries = [entry for entry in ENTRIES if not only or _is_asked_for(entry, only)]
    verdicts = {entry.repository: _verdict(entry) for entry in entries}
    tokenizers = published.measured_rows() if arguments.tokenizers else published.written_rows()
    if not only or arguments.write:
        compared = written_comparisons() if only else sum(verdict.num_compared for verdict in verdicts.values())
        merged = {**written_verdicts(), **verdicts}
        TABLE.write_text(text_of(merged), "utf-8")
        DOCUMENT.write_text(document(merged, tokenizers, compared), "utf-8")
    return int(any(verdict.is_fault for verdict in verdicts.values()))


def _is_asked_for(entry: Entry, only: list[str]) -> bool:
    return any(text in name.lower() for text in only for name in entry.repositories)


def _verdict(entry: Entry) -> Verdict:
    try:
        verdict = verdict_of(entry.structure)
    except Exception:
        print(f"{entry.repository}: the entry itself is at fault", file=sys.stderr)  # noqa: T201
        traceback.print_exc()
        verdict = Verdict("WRONG", "the entry itself is at fault")
    print(f"{entry.repository}: {verdict}", flush=True)  # noqa: T201
    return verdict


if __name__ == "__main__":
    sys.exit(main())
