"""Input files: their rows, whatever the format, and what is refused."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.bulk.sources import lines
from bei.bulk.sources.rows import Columns
from bei.bulk.sources.source import Contents, ShardSize, Source
from bei.errors import JobInputError

_COLUMNS = Columns(id="id", carried=("n",))
_Row = dict[str, Any]
_Write = Callable[[Path, Sequence[_Row]], Path]


def _parquet(group: int) -> _Write:
    def write(folder: Path, rows: Sequence[_Row]) -> Path:
        path = folder / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(list(rows), _SCHEMA), path, row_group_size=group)
        return path

    return write


def _arrow(folder: Path, rows: Sequence[_Row]) -> Path:
    path = folder / "rows.arrow"
    feather.write_feather(pa.Table.from_pylist(list(rows), _SCHEMA), str(path), chunksize=3)
    return path


def _lance(folder: Path, rows: Sequence[_Row]) -> Path:
    """Two versions of several fragments, of which the first has rows that were deleted."""
    path = folder / "rows.lance"
    gone = [{"id": "gone", "text": "gone", "n": -1}] * 2
    lance.write_dataset(pa.Table.from_pylist([*gone, *rows[:4]], _SCHEMA), path, mode="overwrite", max_rows_per_file=3)
    lance.dataset(str(path)).delete("n = -1")
    if rows[4:]:
        lance.write_dataset(pa.Table.from_pylist(list(rows[4:]), _SCHEMA), path, mode="append", max_rows_per_file=7)
    return path


def _jsonl(folder: Path, rows: Sequence[_Row]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def _gzipped(folder: Path, rows: Sequence[_Row]) -> Path:
    path = folder / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + _jsonl(folder, rows).read_bytes()))
    return path


def _csv(folder: Path, rows: Sequence[_Row]) -> Path:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["n", "id", "text"])
    writer.writeheader()
    writer.writerows(rows)
    path = folder / "rows.csv"
    path.write_text(text.getvalue(), encoding="utf-8", newline="")
    return path


_SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string()), ("n", pa.int64())])
_FORMATS: dict[str, _Write] = {
    **{f"parquet, groups of {group}": _parquet(group) for group in (1, 7, 1000)},
    **{"arrow": _arrow, "lance": _lance, "jsonl": _jsonl, "jsonl.gz": _gzipped, "csv": _csv},
}
# What CSV can hold as well: no text that is empty, as its row would be no other than one without a text.
_ROWS = st.lists(
    st.fixed_dictionaries(
        {"id": st.text('abc\n",;', min_size=1), "text": st.text(min_size=1, max_size=8), "n": st.integers(0, 9)}
    ),
    min_size=1,
    max_size=30,
)


def _read(source: Source, contents: Contents, shards: Sequence[int]) -> list[_Row]:
    reader = source.reader(contents)
    found: list[_Row] = []
    for shard in shards:
        rows = reader.shard(shard)
        assert not rows.errors
        copied = rows.copied.to_pylist()
        found += [{**row, "text": text} for row, text in zip(copied, rows.inputs, strict=True)]
    return found


@pytest.mark.parametrize("form", _FORMATS)
@settings(max_examples=25)
@given(rows=_ROWS, size=st.integers(1, 12))
def test_shards_have_all_rows_once_in_their_order(
    form: str, rows: list[_Row], size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if form == "csv":  # quoted breaks of lines are kept, bare carriage returns are not told apart
        rows = [{name: str(value).replace("\r", "") or "x" for name, value in row.items()} for row in rows]
    path = _FORMATS[form](tmp_path_factory.mktemp("rows"), rows)
    source = Source([str(path)], _COLUMNS)
    contents = source.contents(ShardSize(size))
    shards = [*range(len(contents.shards))]
    assert _read(source, contents, shards) == rows
    # Each by itself, as another process would read it.
    assert [row for shard in reversed(shards) for row in _read(source, contents, [shard])[::-1]] == rows[::-1]


def test_rows_of_several_files_are_numbered_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{i}\n" for i in range(5)))
    (tmp_path / "_plan.json").write_text("{}")
    (tmp_path / ".hidden.txt").write_text("no\n")
    source = Source([str(tmp_path)], Columns())
    contents = source.contents(ShardSize(4))
    reader = source.reader(contents)
    assert [file.name for file in contents.files] == ["a.txt", "b.txt"]
    assert [*reader.shard(1).inputs] == ["a4", "b0", "b1", "b2"]
    assert [reader.file_of(row) for row in (4, 5, 9)] == [("a.txt", 4), ("b.txt", 0), ("b.txt", 4)]


def test_a_shard_ends_where_it_has_so_many_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join("x" * 99 + "\n" for _ in range(10)))
    pq.write_table(
        pa.table({"text": ["x" * 1000] * 50}), tmp_path / "b.parquet", row_group_size=10, use_dictionary=False
    )
    text = Source([str(tmp_path / "a.txt")], Columns()).contents(ShardSize(1000, 250))
    assert [place.row for place in text.shards] == [0, 3, 6, 9]
    assert len(Source([str(tmp_path / "b.parquet")], Columns()).contents(ShardSize(1000, 5000)).shards) >= 9


def test_only_the_first_rows_are_read_where_so_few_are_wanted(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{i}\n" for i in range(5)))
    source = Source([str(tmp_path)], Columns())
    contents = source.contents(ShardSize(3, max_rows=7))
    assert contents.num_rows == 7
    reader = source.reader(contents)
    assert [text for shard in range(3) for text in reader.shard(shard).inputs] == [
        "a0",
        "a1",
        "a2",
        "a3",
        "a4",
        "b0",
        "b1",
    ]


def test_lines_that_cannot_be_read_are_bad_rows_and_cost_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MOST_LINE_BYTES", 64)
    good = json.dumps({"text": "good"}).encode()
    bad = [b"{", b"[1]", b'{"text": "\xff"}', b'{"text": "' + b"x" * 500 + b'"}', b"[" * 60]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(part for line in bad for part in (line, good)))
    source = Source([str(tmp_path / "a.jsonl")], Columns())
    rows = source.reader(source.contents(ShardSize(100))).shard(0)
    assert [*rows.inputs] == [None, "good"] * len(bad)
    assert sorted(rows.errors) == [0, 2, 4, 6, 8]


def test_records_that_are_no_csv_are_bad_rows_and_cost_no_other(tmp_path: Path) -> None:
    records = ["text,n", "good,1", 'b"ad,1', '"ba"d,1', "few", "a,b,c", '"two\nlines",3', "", "last,2"]
    (tmp_path / "a.csv").write_text("\n".join(records))
    source = Source([str(tmp_path / "a.csv")], Columns(carried=("n",)))
    rows = source.reader(source.contents(ShardSize(100))).shard(0)
    good = [text for place, text in enumerate(rows.inputs) if place not in rows.errors]
    assert good == ["good", 'b"ad', "two\nlines", "last"]
    assert len(rows.errors) == 3


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("bad", ['"stray,1', 'stray,"1', '"stray,"1'])
def test_a_quote_that_is_not_closed_costs_its_own_line_alone(bad: str, ending: str, tmp_path: Path) -> None:
    """All rows behind it were one bad one. Shards that begin behind it are the same when they are read alone."""
    records = [f"text {n},{n}" for n in range(500)]
    records[10] = bad
    records[20], records[30] = '"two\nlines",20', '"a, b",30'
    content = "\n".join(["text,n", *records]).encode()
    path = _touch(tmp_path / f"a.csv{ending}", gzip.compress(content) if ending else content)
    source = Source([str(path)], Columns(carried=("n",)))
    contents = source.contents(ShardSize(7))
    assert contents.num_rows == 500
    shards = [*range(len(contents.shards))]
    whole, reader = [], source.reader(contents)
    for rows in map(reader.shard, shards):
        whole += [n for place, n in enumerate(rows.copied["n"].to_pylist()) if place not in rows.errors]
    assert whole == [str(n) for n in range(500) if n != 10]
    alone = [source.reader(contents).shard(shard) for shard in shards]
    assert [text for rows in alone for text in rows.inputs][20] == "two\nlines"
    assert [str(error) for rows in alone for error in rows.errors.values()] == [
        str(error) for shard in shards for error in reader.shard(shard).errors.values()
    ]
    assert source.contents(ShardSize(7)) == contents


def test_a_record_of_several_lines_with_another_count_of_fields_is_one_bad_row(tmp_path: Path) -> None:
    """Its inner lines may look like records."""
    path = _touch(tmp_path / "a.csv", b'id,text\n1,"a\nfoo,bar\nb",x\n2,last\n')
    source = Source([str(path)], Columns())
    rows = source.reader(source.contents(ShardSize(7))).shard(0)
    assert [*rows.inputs][1:] == ["last"]
    assert "3 lines by its quotes" in str(rows.errors[0])


def test_a_file_of_quotes_that_are_not_closed_is_refused_and_not_read_for_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its lines would have the rest read once more."""
    monkeypatch.setattr(lines, "_MOST_READ_ANEW_BYTES", 100_000)
    path = _touch(tmp_path / "a.csv", b"text,n\n" + b'foo","bar\n' * 500)
    with pytest.raises(JobInputError, match="has many quotes that are not closed, one at byte"):
        Source([str(path)], Columns()).contents(ShardSize(7))


def test_a_record_of_several_lines_that_are_not_all_utf_8_is_one_bad_row(tmp_path: Path) -> None:
    path = _touch(tmp_path / "a.csv", b'text\n"one\ntwo \xff\nthree"\nlast\n')
    source = Source([str(path)], Columns())
    rows = source.reader(source.contents(ShardSize(7))).shard(0)
    assert ([*rows.errors], rows.inputs[1:]) == ([0], ["last"])


def test_a_line_with_a_column_twice_is_a_bad_row(tmp_path: Path) -> None:
    """The last value was read. What is no column, or stands deeper, is as it was."""
    content = [
        '{"text": "a", "n": 1}',
        '{"text": "a", "text": "b", "n": 1}',
        '{"n": 1, "text": "a", "n": 2}',
        '{"text": "text", "n": 1, "other": {"text": "b"}, "more": [{"n": 1, "n": 2}], "less": 1, "less": 2}',
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(content))
    source = Source([str(tmp_path)], Columns(carried=("n",)))
    rows = source.reader(source.contents(ShardSize(10))).shard(0)
    assert {place: str(error) for place, error in rows.errors.items()} == {
        1: "The line has 'text' twice: leave one out.",
        2: "The line has 'n' twice: leave one out.",
    }
    assert (rows.inputs[3], rows.copied.column("n").to_pylist()[3]) == ("text", 1)


def test_a_value_of_another_type_than_the_first_rows_have_makes_its_row_a_bad_one(tmp_path: Path) -> None:
    values = [1, 2, "three", 2**70, None, 4]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": "t", "n": 0}) for _ in range(lines.SAMPLED_ROWS)))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": "t", "n": value}) for value in values))
    source = Source([str(tmp_path)], Columns(carried=("n",)))
    contents = source.contents(ShardSize(lines.SAMPLED_ROWS))
    rows = source.reader(contents).shard(1)
    assert rows.copied.column("n").to_pylist() == [1, 2, None, None, None, 4]
    assert sorted(rows.errors) == [2, 3]
    assert "int64" in str(rows.errors[2])


@pytest.mark.parametrize("first", ["", "\n", '{"id": null, "text": "z"}\n'])
def test_types_of_json_are_those_of_the_first_rows_of_all_files(first: str, tmp_path: Path) -> None:
    (tmp_path / "part-0.jsonl").write_text(first)
    (tmp_path / "part-1.jsonl").write_text("".join(json.dumps({"id": n, "text": f"text {n}"}) + "\n" for n in (1, 2)))
    source = Source((str(tmp_path),), Columns(id="id"))
    rows = source.reader(source.contents(ShardSize(100))).shard(0)
    assert not rows.errors
    assert rows.copied.column("id").to_pylist()[-2:] == [1, 2]


def test_an_empty_file_of_csv_has_no_rows_wherever_it_stands(tmp_path: Path) -> None:
    for name, content in {"a": "", "b": "text,n\nx,1\n", "c": "\n", "d": "\nn,text\n2,y\n"}.items():
        (tmp_path / f"{name}.csv").write_text(content)
    source = Source((str(tmp_path),), Columns(carried=("n",)))
    rows = source.reader(source.contents(ShardSize(100))).shard(0)
    assert ([*rows.inputs], rows.copied.column("n").to_pylist(), rows.errors) == (["x", "y"], ["1", "2"], {})


@pytest.mark.parametrize("form", ["parquet", "arrow", "lance"])
def test_a_file_without_rows_decides_neither_columns_nor_types(form: str, tmp_path: Path) -> None:
    tables = {"a": pa.table({"other": pa.nulls(0)}), "b": pa.table({"text": ["x"], "n": [1]})}
    tables["c"] = pa.table({"text": pa.array([], pa.float64()), "n": pa.array([], pa.string())})
    for name, table in tables.items():
        path = tmp_path / f"{name}.{form}"
        if form == "lance":
            lance.write_dataset(table, path)
        else:
            (pq.write_table if form == "parquet" else feather.write_feather)(table, str(path))
    # Each by its name: in a folder a dataset of Lance without rows is not seen.
    source = Source([str(tmp_path / f"{name}.{form}") for name in tables], Columns(carried=("n",)))
    file, kinds = source.kinds()
    assert Path(file).name == f"b.{form}"
    assert kinds["text"].kinds == {"text"}
    assert _read(source, source.contents(ShardSize(100)), [0]) == [{"text": "x", "n": 1}]


def _touch(path: Path, content: bytes = b"") -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("make", "columns", "fault"),
    [
        (lambda folder: folder / "missing.parquet", Columns(), "means no file"),
        (lambda folder: folder / "*.parquet", Columns(), "means no file"),
        (lambda folder: _touch(folder / "a.dat"), Columns(), "--input-format"),
        (lambda folder: _touch(folder / "a.parquet"), Columns(), "cannot be read"),
        (lambda folder: _touch(folder / "a.parquet", b"PAR1" + b"\xff" * 60 + b"PAR1"), Columns(), "cannot be read"),
        (lambda folder: _touch(folder / "a.arrow", b"no"), Columns(), "cannot be read"),
        (lambda folder: _touch(folder / "a.jsonl.gz", b"no"), Columns(), "cannot be read"),
        (lambda folder: _touch(folder / "a.csv", b"title\nx\n"), Columns(), "it has title"),
        (lambda folder: _touch(folder / "a.csv", b"text,text\nx,y\n"), Columns(), "two columns of one name"),
        (lambda folder: _touch(folder / "a.jsonl", b'{"title": "x"}\n'), Columns(), "which have title"),
        (
            lambda folder: _touch(folder / "a.jsonl", b'{"text": "x", "n": 1}\n{"text": "y", "n": "z"}'),
            Columns(carried=("n",)),
            "several types",
        ),
        (lambda folder: _touch(folder / "a.txt", b"x\n"), Columns(id="id"), "no columns"),
        (lambda _: Path("nowhere://bucket/a.parquet"), Columns(), "cannot be read"),
    ],
)
def test_files_that_cannot_be_read_are_refused_by_name(
    make: Callable[[Path], Path], columns: Columns, fault: str, tmp_path: Path
) -> None:
    pattern = str(make(tmp_path)).replace(":/b", "://b")
    with pytest.raises(JobInputError, match=fault):
        Source([pattern], columns).contents(ShardSize(10))


def test_a_shard_whose_file_has_changed_since_is_not_read(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text("one\ntwo\n")
    source = Source((str(tmp_path),), Columns())
    contents = source.contents(ShardSize(1))
    reader = source.reader(contents)
    (tmp_path / "b.txt").write_text("eno\nowt\n")
    for shard in (0, 1, 4, 5):
        assert len(reader.shard(shard).inputs) == 1
    for shard in (2, 3):
        with pytest.raises(JobInputError, match=r"b\.txt has changed"):
            reader.shard(shard)


def test_a_number_with_decimals_is_not_cut_to_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "SAMPLED_ROWS", 2)
    rows = [{"text": "a", "n": n, "list": [n]} for n in (1, 2, 3.0, 1.5, None)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = Source((str(tmp_path / "rows.jsonl"),), Columns(carried=("n", "list")))
    found = source.reader(source.contents(ShardSize(100))).shard(0)
    assert found.errors.keys() == {3}
    assert found.copied.column("n").to_pylist() == [1, 2, 3, None, None]


def test_an_object_with_other_keys_than_the_first_rows_have_makes_its_row_a_bad_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "SAMPLED_ROWS", 2)
    tags: list[Any] = [
        {"a": 1, "b": [{"c": 1}]},
        {"a": 2},
        {"a": 3, "new": 4},
        {"b": [{"c": 1}, {"d": 1}]},
        {"b": None},
    ]
    rows = [{"text": "a", "tags": tag} for tag in tags]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = Source((str(tmp_path / "rows.jsonl"),), Columns(carried=("tags",)))
    found = source.reader(source.contents(ShardSize(100))).shard(0)
    assert {place: str(error) for place, error in found.errors.items()}.keys() == {2, 3}
    assert "tags" in str(found.errors[2])


def test_a_dataset_of_lance_is_found_by_its_name_in_a_folder_and_by_a_pattern(tmp_path: Path) -> None:
    rows = [{"id": str(n), "text": f"text {n}", "n": n} for n in range(9)]
    (tmp_path / "sub").mkdir()
    for number, folder in enumerate((tmp_path, tmp_path / "sub")):
        _lance(folder, rows[number:])
    (tmp_path / "sub" / "notes.md").touch()
    both = Source((str(tmp_path),), _COLUMNS)
    assert [file.name for file in both.files] == ["rows.lance", "sub/rows.lance"]
    contents = both.contents(ShardSize(100))
    assert [row["n"] for row in _read(both, contents, [0])] == [*range(9), *range(1, 9)]
    for pattern in (f"{tmp_path}/rows.lance/", f"{tmp_path}/*.lance"):
        assert [file.name for file in Source((pattern,), _COLUMNS).files] == ["rows.lance"]


def test_a_dataset_of_lance_that_gets_rows_after_the_plan_has_changed(tmp_path: Path) -> None:
    rows = [{"id": str(n), "text": f"text {n}", "n": n} for n in range(9)]
    source = Source((str(_lance(tmp_path, rows)),), _COLUMNS)
    contents = source.contents(ShardSize(100))
    source.check_unchanged()
    lance.write_dataset(pa.Table.from_pylist(rows, _SCHEMA), tmp_path / "rows.lance", mode="append")
    with pytest.raises(JobInputError, match="has changed"):
        source.check_unchanged()
    assert not Source((str(tmp_path / "rows.lance"),), _COLUMNS).is_as_before(contents.files)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(JobInputError, match="is a pipe or a device"):
        Source((str(tmp_path / "rows.jsonl"),), Columns())


def test_files_of_different_schemas_are_refused_by_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x"], "n": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["x"], "n": ["1"]}), tmp_path / "b.parquet")
    with pytest.raises(JobInputError, match=r"'n' is string in .*b\.parquet and int64"):
        Source([str(tmp_path)], Columns(carried=("n",))).contents(ShardSize(10))


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    path = _touch(tmp_path / "a.txt", b"x\n")
    with pytest.raises(JobInputError, match="named twice"):
        Source([str(path), str(tmp_path)], Columns())


def test_a_file_that_lost_rows_after_the_plan_ends_the_job(tmp_path: Path) -> None:
    path = _touch(tmp_path / "a.txt", b"x\n" * 5)
    source = Source([str(path)], Columns())
    contents = source.contents(ShardSize(2))
    _touch(path, b"x\n" * 4)
    reader = source.reader(contents)
    with pytest.raises(JobInputError, match="changed"):
        _ = [reader.shard(shard) for shard in range(3)]


def test_a_file_that_was_written_to_after_the_plan_is_seen_to_have_changed(tmp_path: Path) -> None:
    path = _touch(tmp_path / "a.txt", b"x\n" * 5)
    source = Source([str(path)], Columns())
    contents = source.contents(ShardSize(2))
    source.check_unchanged()
    assert Source([str(path)], Columns()).is_as_before(contents.files)
    _touch(path, b"y\n" * 5)
    assert not Source([str(path)], Columns()).is_as_before(contents.files)
    with pytest.raises(JobInputError, match="changed"):
        source.check_unchanged()


def test_a_column_of_parquet_may_have_a_dot_in_its_name(tmp_path: Path) -> None:
    digests = set()
    for text in ("aaaa", "bbbb"):
        table = pa.table({"meta.text": [text], "meta": [{"text": "inner"}]})
        pq.write_table(table, tmp_path / "rows.parquet", write_statistics=False)
        digests.add(Source((str(tmp_path),), Columns(text="meta.text")).contents(ShardSize(10)).files[0].digest)
    assert len(digests) == 2


def test_a_parquet_file_with_other_values_of_the_same_sizes_is_another_one(tmp_path: Path) -> None:
    """Their footers are equal."""

    def contents(name: str, text: str, other: str = "x", most: int | None = None) -> Contents:
        path = tmp_path / name / "rows.parquet"
        path.parent.mkdir(exist_ok=True)
        table = pa.table({"text": ["a text", text, "a text"], "other": [other] * 3})
        pq.write_table(table, path, row_group_size=1, write_statistics=False)
        return Source((str(path),), Columns()).contents(ShardSize(10, max_rows=most))

    def digest(*given: Any) -> str:
        return contents(*given).files[0].digest

    assert digest("a", "one") != digest("b", "two")
    footers = [(tmp_path / name / "rows.parquet").read_bytes()[-300:] for name in ("a", "b")]
    assert footers[0] == footers[1]
    # A copy, another column, and rows that are not asked for.
    assert digest("a", "one") == digest("c", "one") == digest("d", "one", "y")
    assert digest("a", "one", "x", 1) == digest("b", "two", "x", 1)
