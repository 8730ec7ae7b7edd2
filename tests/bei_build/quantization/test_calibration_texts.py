"""Calibration texts: their sources, and that none is a text of the certificate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bei.errors import ConfigError
from bei_build.quantization.calibration_texts import calibration_texts
from bei_build.reference.held_out import held_out_texts


def test_the_bundled_list_is_disjoint_from_the_held_out_texts() -> None:
    found = calibration_texts(None, None, 10_000, 0).texts
    assert len(found) >= 150
    for held_out in held_out_texts():
        assert all(held_out not in text for text in found if len(held_out) > 20)


def test_the_seed_chooses_and_the_same_seed_chooses_the_same() -> None:
    first, again, other = (calibration_texts(None, None, 20, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.sha256 == again.sha256 != other.sha256
    assert len(first.texts) == 20


FILES = {
    "texts.txt": "one\n\ntwo\none\n",
    "texts.jsonl": '{"text": "one", "n": 1}\n{"text": "two"}\n',
    "texts.csv": 'text,n\none,1\n"two",2\n',
    "texts.tsv": "n\ttext\n1\tone\n2\ttwo\n",
}


@pytest.mark.parametrize(("name", "content"), FILES.items(), ids=FILES)
def test_files_of_four_kinds_are_read(tmp_path: Path, name: str, content: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    found = calibration_texts(str(file), None, 10, 0)
    assert set(found.texts) == {"one", "two"}
    assert found.source == name


def test_a_column_may_be_called_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"passage": "one"}\n')
    assert calibration_texts(str(file), "passage", 10, 0).texts == ("one",)
    with pytest.raises(ConfigError, match=r"record 1: 'text' is no text\. It has: passage.*--calibration-column"):
        calibration_texts(str(file), None, 10, 0)


def test_held_out_texts_are_never_calibrated_with(tmp_path: Path) -> None:
    held_out = held_out_texts()
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*held_out, "another"]))
    assert calibration_texts(str(file), None, 1000, 0).texts == ("another",)
    file.write_text(json.dumps({"text": held_out[0]}))
    with pytest.raises(ConfigError, match="no texts to calibrate with that are not held-out"):
        calibration_texts(str(file), None, 1000, 0)


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("a.parquet", b"PAR1", None, "read from .txt, .jsonl, .csv and .tsv"),
        ("a.txt", b"\xff\xfe", None, "cannot be read"),
        ("a.txt", b"one", "text", "has no column 'text'"),
        ("a.jsonl", b"{", None, "cannot be read"),
        ("a.jsonl", b"[1]", None, "cannot be read"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000, None, "cannot be read"),
        ("a.csv", b"n\n1\n", None, "'text' is no text"),
        ("a.txt", b"\n\n", None, "no texts to calibrate with"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, column: str | None, message: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        calibration_texts(str(file), column, 10, 0)


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.txt cannot be read"):
        calibration_texts("nowhere.txt", None, 10, 0)


def test_a_column_without_a_file_means_nothing() -> None:
    with pytest.raises(ConfigError, match="calibration_column needs a file"):
        calibration_texts(None, "text", 10, 0)
