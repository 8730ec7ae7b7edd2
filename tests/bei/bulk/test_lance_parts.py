"""Jobs that write a Lance dataset."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pytest
import s3fs

from bei.bulk.parts import SUCCESS
from bei.bulk.sources.rows import Columns
from bei.errors import ConfigError, MissingDependencyError
from tests.bei.bulk.conftest import NUM_ROWS, RunJob, digests, save_rows
from tests.bei.offline.given import expected, texts


def _rows(folder: Path) -> list[dict[str, Any]]:
    dataset = lance.dataset(str(folder / "data.lance"))
    rows: list[dict[str, Any]] = dataset.to_table().to_pylist()
    return rows


def test_the_dataset_has_every_row_in_the_order_of_the_input(run: RunJob, tmp_path: Path) -> None:
    run(output_format="lance")
    rows = _rows(tmp_path / "out")
    assert [row["id"] for row in rows] == [f"id-{number}" for number in range(NUM_ROWS)]
    vectors = np.array([row["embedding"] for row in rows], np.float32)
    np.testing.assert_allclose(vectors, expected(texts(NUM_ROWS)), atol=1e-6)
    dataset = lance.dataset(str(tmp_path / "out" / "data.lance"))
    assert (dataset.version, len(dataset.get_fragments())) == (1, 5)


def test_there_is_no_dataset_before_all_parts_are(run: RunJob, tmp_path: Path) -> None:
    for index in (2, 0, 1):
        assert not (tmp_path / "out" / "data.lance" / "_versions").exists()
        run(output_format="lance", part=(index, 3))
    assert len(_rows(tmp_path / "out")) == NUM_ROWS


def test_parts_that_are_missing_are_made_again_and_the_dataset_stays_as_it_is(run: RunJob, tmp_path: Path) -> None:
    run(output_format="lance")
    whole, rows = digests(tmp_path / "out"), _rows(tmp_path / "out")
    (tmp_path / "out" / "data.lance" / "data" / "part-00001.lance").unlink()
    (tmp_path / "out" / "_records" / "part-00003.json").write_bytes(b"{")
    (tmp_path / "out" / SUCCESS).unlink()
    assert run(output_format="lance").resumed == 3
    assert digests(tmp_path / "out") == whole
    assert _rows(tmp_path / "out") == rows
    assert len([*(tmp_path / "out" / "data.lance" / "_versions").iterdir()]) == 1


@pytest.mark.parametrize("on_error", ["skip", "null"])
def test_rows_without_an_answer_are_left_out_or_null(on_error: str, run: RunJob, tmp_path: Path) -> None:
    save_rows(tmp_path / "rows.parquet", [*texts(10), *[None] * 10, *texts(3), ""])
    run(inputs=(str(tmp_path / "rows.parquet"),), output_format="lance", on_error=on_error)
    rows = _rows(tmp_path / "out")
    assert [row["n"] for row in rows if row["embedding"] is not None] == [*range(10), *range(20, 23)]
    assert len(rows) == (13 if on_error == "skip" else 24)


def test_a_job_on_a_bucket_has_the_same_dataset(bucket: str, run: RunJob, tmp_path: Path) -> None:
    run(output_format="lance")
    run(output_format="lance", output=f"{bucket}/{tmp_path.name}-lance")
    s3fs.S3FileSystem().get(f"{bucket}/{tmp_path.name}-lance", str(tmp_path / "fetched"), recursive=True)
    assert digests(tmp_path / "fetched") == digests(tmp_path / "out")
    assert _rows(tmp_path / "fetched") == _rows(tmp_path / "out")


def test_a_dataset_of_a_bucket_is_read(
    bucket: str, run: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")  # Lance's own, as the stand-in has no certificate
    run(output_format="lance")
    url = f"{bucket}/{tmp_path.name}-in/data.lance"
    s3fs.S3FileSystem().put(str(tmp_path / "out" / "data.lance"), url, recursive=True)
    run(inputs=(url,), output=str(tmp_path / "again"), columns=Columns(text="id", id="id"), output_format="lance")
    assert [row["id"] for row in _rows(tmp_path / "again")] == [f"id-{number}" for number in range(NUM_ROWS)]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([pa.MonthDayNano([1, 2, 3])] * 3, pa.month_day_nano_interval()),
        pa.array([{"a": 1}, {"a": None}, {"a": 2}]),  # of which one could be null
    ],
    ids=["interval", "struct"],
)
def test_columns_that_lance_does_not_hold_are_refused_by_name(column: pa.Array, run: RunJob, tmp_path: Path) -> None:
    feather.write_feather(pa.table({"text": texts(3), "days": column}), str(tmp_path / "rows.arrow"))
    with pytest.raises(ConfigError, match="'days'"):
        run(inputs=(str(tmp_path / "rows.arrow"),), columns=Columns(carried=("days",)), output_format="lance")
    assert not (tmp_path / "out").exists()


def test_dates_and_lists_are_copied(run: RunJob, tmp_path: Path) -> None:
    days, lists = [datetime.date(2026, 1, 2), None] * 6, [[["x"], None], []] * 6
    save_rows(tmp_path / "rows.parquet", texts(12), day=days, lists=lists)
    columns = Columns(id="id", carried=("day", "lists"))
    run(inputs=(str(tmp_path / "rows.parquet"),), columns=columns, output_format="lance")
    assert [(row["day"], row["lists"]) for row in _rows(tmp_path / "out")] == [*zip(days, lists, strict=True)]


def test_without_its_package_the_format_is_refused_with_the_extra(run: RunJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(MissingDependencyError, match=r"bei\[lance\]"):
        run(output_format="lance")
