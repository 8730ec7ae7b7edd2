"""Columns that are copied: values of Arrow's types are in the output, or refused by name before the engine runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from bei.bulk.job import _copied
from bei.bulk.run import JobProgress
from bei.bulk.sources.rows import Columns
from bei.errors import BeiError, ConfigError, JobInputError
from tests.bei.bulk.conftest import RunJob
from tests.bei.offline.given import texts

_COLUMNS = Columns(carried=("odd",))
_FORMATS = ("parquet", "jsonl", "npy", "lance")


def _run(run: RunJob, folder: Path, column: pa.Array, form: str = "parquet") -> JobProgress:
    feather.write_feather(pa.table({"text": texts(len(column)), "odd": column}), str(folder / "rows.arrow"))
    return run(inputs=(str(folder / "rows.arrow"),), columns=_COLUMNS, output_format=form, shard_rows=2)


def _values(folder: Path, form: str) -> list[Any]:
    if form == "parquet":
        return list(pq.read_table(folder / "out")["odd"].to_pylist())
    parts = sorted((folder / "out").glob("part-*.jsonl"))
    return [json.loads(line)["odd"] for path in parts for line in path.read_text().splitlines()]


def _encoded(values: Sequence[str]) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(values))


@pytest.mark.parametrize("form", ["parquet", "jsonl", "npy"])
@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(["a", None, "c" * 99], pa.string_view()), ["a", None, "c" * 99]),
        (_encoded(["a", "b"]), ["a", "a", "b"]),
        (pa.array([["a"], None, ["b", None]]).cast(pa.list_(pa.string_view())), [["a"], None, ["b", None]]),
        (pa.array([{"a": "b"}, None]).cast(pa.struct({"a": pa.string_view()})), [{"a": "b"}, None]),
        (pa.array(["a", None, "a"]).dictionary_encode(), ["a", None, "a"]),
    ],
    ids=["view", "runs", "list of views", "struct of views", "dictionary"],
)
def test_values_of_types_that_arrow_reads_in_other_ways_are_copied(
    column: pa.Array, expected: list[Any], form: str, run: RunJob, tmp_path: Path
) -> None:
    """There were tracebacks, after the engine had run."""
    assert _run(run, tmp_path, column, form).rows == len(column)
    assert _values(tmp_path, form) == expected


def test_views_of_bytes_are_copied(run: RunJob, tmp_path: Path) -> None:
    _run(run, tmp_path, pa.array([b"a", None, b"c"], pa.binary_view()))
    assert _values(tmp_path, "parquet") == [b"a", None, b"c"]


_UNION = pa.dense_union([pa.field("a", pa.int32())])


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *((pa.month_day_nano_interval(), form) for form in ("parquet", "lance")),
        *((_UNION, form) for form in ("parquet", "lance")),
        (pa.struct([]), "parquet"),
        (pa.duration("s"), "jsonl"),
        *((pa.run_end_encoded(pa.int32(), pa.string_view()), form) for form in _FORMATS),
        (pa.map_(pa.string(), pa.string_view()), "lance"),
    ],
    ids=str,
)
def test_types_that_cannot_be_copied_are_refused_before_there_is_a_plan(
    kind: pa.DataType, form: str, run: RunJob, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, JobInputError), match=r"'odd'.* leave it out"):
        _run(run, tmp_path, pa.nulls(3, kind), form)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", _FORMATS)
def test_lists_of_runs_are_refused(form: str, run: RunJob, tmp_path: Path) -> None:
    column = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), _encoded(["a", "b"]))
    with pytest.raises((ConfigError, JobInputError), match=r"'odd'.* leave it out"):
        _run(run, tmp_path, column, form)


@pytest.mark.parametrize("form", ["jsonl", "npy"])
def test_json_has_times_to_the_nanosecond_at_any_depth(form: str, run: RunJob, tmp_path: Path) -> None:
    at, of_day = pa.array([1, None, 10**9], pa.timestamp("ns")), pa.array([1, None, 10**9], pa.int64())
    column = pa.StructArray.from_arrays([at, of_day.cast(pa.time64("ns"))], ["at", "of_day"])
    _run(run, tmp_path, column, form)
    assert _values(tmp_path, form) == [
        {"at": "1970-01-01 00:00:00.000000001", "of_day": "00:00:00.000000001"},
        {"at": None, "of_day": None},
        {"at": "1970-01-01 00:00:01.000000000", "of_day": "00:00:01.000000000"},
    ]


@pytest.mark.parametrize("kind", [pa.date32(), pa.date64(), pa.timestamp("s"), pa.timestamp("us", tz="UTC")], ids=str)
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_time_that_json_cannot_have_is_named_with_its_row(
    kind: pa.DataType, is_nested: bool, run: RunJob, tmp_path: Path
) -> None:
    far = pa.array([1, None, 0, 10**8 if kind == pa.date32() else 86_400_000 * 10**10], kind)
    column = pa.StructArray.from_arrays([far], ["at"]) if is_nested else far
    with pytest.raises(JobInputError, match="column 'odd' has in row 1 of part-00001"):
        _run(run, tmp_path, column, "jsonl")


def test_a_value_that_cannot_be_written_ends_the_job_with_a_line(
    run: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise pa.ArrowInvalid("too large")

    monkeypatch.setattr("bei.bulk.job._taken", failing)
    with pytest.raises(BeiError, match=r"part-0000.\.parquet cannot be written: too large\. .*leave it out"):
        _run(run, tmp_path, pa.array(["a", "b", "c"]))


class _SmallTable:
    """A table of which three rows at most are taken at a time."""

    def __init__(self, table: pa.Table, error: Exception) -> None:
        self._table = table
        self._error = error

    def slice(self, start: int, length: int) -> _SmallTable:
        """As of a table."""
        return _SmallTable(self._table.slice(start, length), self._error)

    def take(self, places: pa.Array) -> pa.Table:
        """As of a table."""
        if len(places) > 3:
            raise self._error
        return self._table.take(places)


@pytest.mark.parametrize("error", [pa.ArrowInvalid("offset overflow"), pa.ArrowCapacityError("more than 2147483646")])
def test_rows_that_together_have_more_bytes_than_an_array_holds_are_copied_in_pieces(error: Exception) -> None:
    table = pa.table({"a": ["a", "b", "c", "d"]})
    owners = [0, 0, 0, 0, 0, 2, 2, 3]
    assert _copied(_SmallTable(table, error), owners).to_pydict() == table.take(owners).to_pydict()
    assert _copied(table, []).num_rows == 0
