"""Calibration texts: the bundled list, or the user's file."""

from __future__ import annotations

import csv
import hashlib
import io
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec

from bei.errors import ConfigError
from bei.utils.named_files import MOST_TEXTS_BYTES, open_named
from bei.utils.untrusted_files import home_expanded
from bei_build.reference.held_out import held_out_texts

_COLUMN = "text"
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_JOINED = 12  # texts: most bundled ones are short, so every fourth is joined with those after it, this many in all


@dataclass(frozen=True)
class CalibrationTexts:
    """``source``: the origin of the texts, for people."""

    source: str
    texts: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Hash of all texts, in order."""
        return hashlib.sha256("\0".join(self.texts).encode()).hexdigest()


def calibration_texts(path: str | None, column: str | None, size: int, seed: int) -> CalibrationTexts:
    """``size`` texts, chosen by ``seed``, from the file ``path`` (None: the bundled list), without held-out ones.

    A .txt file has a text per line; .jsonl, .csv and .tsv files have them in ``column`` (None: "text"). Raises
    ConfigError.
    """
    held_out = set(held_out_texts())
    if path is None:
        if column is not None:
            raise ConfigError(
                "calibration_column needs a file of texts: name one with --calibration-data, or leave it out."
            )
        found, source = _bundled(), "bei's own list"
    else:
        found, source = list(_read(home_expanded(path), column)), Path(path).name
    usable = [text for text in dict.fromkeys(found) if text.strip() and text not in held_out]
    if not usable:
        raise ConfigError(f"{path} has no texts to calibrate with that are not held-out texts of the certificate.")
    chosen = usable if len(usable) <= size else random.Random(seed).sample(usable, size)
    return CalibrationTexts(source, tuple(chosen))


def _bundled() -> list[str]:
    content = (resources.files("bei_build") / "data" / "calibration.txt").read_text(encoding="utf-8")
    lines = [line for line in content.splitlines() if line and not line.startswith("#")]
    return [_with_following(lines, index) if index % 4 == 3 else line for index, line in enumerate(lines)]


def _with_following(lines: Sequence[str], index: int) -> str:
    return " ".join(lines[(index + step) % len(lines)] for step in range(_JOINED))


def _read(path: Path, column: str | None) -> Iterator[str]:
    suffix = path.suffix.lower()
    if suffix not in (".txt", ".jsonl", *_SEPARATORS):
        raise ConfigError(f"{path}: calibration texts are read from .txt, .jsonl, .csv and .tsv files.")
    try:
        newline = "" if suffix in _SEPARATORS else None
        content = open_named("The file of calibration texts", path, MOST_TEXTS_BYTES)
        with io.TextIOWrapper(content, encoding="utf-8", newline=newline) as file:
            if suffix == ".txt":
                if column is not None:
                    raise ConfigError(f"{path} is a .txt file, which has no column {column!r}: leave it out.")
                yield from (line.rstrip("\n") for line in file)
            elif suffix == ".jsonl":
                yield from _column_of(map(_record, file), column or _COLUMN, path)
            else:
                yield from _column_of(csv.DictReader(file, delimiter=_SEPARATORS[suffix]), column or _COLUMN, path)
    except (OSError, UnicodeDecodeError, RecursionError, msgspec.DecodeError, csv.Error) as error:
        raise ConfigError(f"The calibration texts {path} cannot be read: {error}.") from error


def _record(line: str) -> dict[str, object]:
    return msgspec.json.decode(line, type=dict[str, object]) if line.strip() else {}


def _column_of(records: Iterable[dict[str, object]], column: str, path: Path) -> Iterator[str]:
    for number, record in enumerate(records, 1):
        if not record:
            continue
        text = record.get(column)
        if not isinstance(text, str):
            columns = ", ".join(str(name) for name in record)
            raise ConfigError(
                f"{path}, record {number}: {column!r} is no text. It has: {columns}. "
                "Say which with --calibration-column."
            )
        yield text
