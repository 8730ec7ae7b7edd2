"""Jobs: what is in the output, what is done again, and what is refused."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bei.artifact.manifest import Adapters
from bei.bulk.chunks import ChunkSize
from bei.bulk.folder import LocalJobFolder
from bei.bulk.parts import PLAN, SUCCESS, ParquetParts
from bei.bulk.run import JobProgress
from bei.bulk.sources.rows import Columns
from bei.core import Float32Array
from bei.engine.fake import DIMENSION, FakeEngine
from bei.errors import (
    BadRowError,
    BeiError,
    ConfigError,
    EngineError,
    InvalidRequestError,
    JobDiffersError,
    JobError,
    JobInputError,
)
from tests.bei.bulk.conftest import NUM_ROWS, RunJob, digests, save_rows
from tests.bei.offline.given import expected, texts
from tests.support.artifacts import LIMITS, save_artifact, token_ids
from tests.support.engines import NaNEngine, PickyEngine

_GOOD = texts(NUM_ROWS)


def _read(folder: Path) -> list[dict[str, Any]]:
    """The rows, as a reader of the folder gets them: files that are no parts do not disturb it."""
    rows: list[dict[str, Any]] = pq.read_table(folder).to_pylist()
    return rows


def _vectors(folder: Path) -> Float32Array:
    return np.array([row["embedding"] for row in _read(folder)], np.float32)


def test_every_row_has_its_vector_in_the_order_of_the_input(run: RunJob, tmp_path: Path) -> None:
    done = run()
    found = _read(tmp_path / "out")
    assert [row["id"] for row in found] == [f"id-{number}" for number in range(NUM_ROWS)]
    assert [row["n"] for row in found] == [*range(NUM_ROWS)]
    np.testing.assert_allclose(_vectors(tmp_path / "out"), expected(_GOOD), atol=1e-6)
    assert (done.rows, done.shards, done.dead, done.resumed) == (NUM_ROWS, 5, 0, 0)
    success = json.loads((tmp_path / "out" / SUCCESS).read_text())
    assert (success["rows"], success["shards"], success["tokens"]) == (NUM_ROWS, 5, done.tokens)
    assert pq.read_schema(tmp_path / "out" / "part-00000.parquet").field("embedding").type.list_size == DIMENSION


def test_rows_without_an_id_have_their_number(run: RunJob, tmp_path: Path) -> None:
    run(columns=Columns())
    found = _read(tmp_path / "out")
    assert [row["row"] for row in found] == [*range(NUM_ROWS)]
    assert found[0].keys() == {"row", "embedding"}


@pytest.mark.parametrize("form", ["parquet", "jsonl", "npy", "lance"])
def test_the_same_job_elsewhere_writes_the_same_bytes(form: str, run: RunJob, tmp_path: Path) -> None:
    run(output_format=form)
    run(output_format=form, output=str(tmp_path / "again"))
    first, again = digests(tmp_path / "out"), digests(tmp_path / "again")
    assert first == again
    assert len(first) >= 7


def test_formats_hold_the_same_vectors(run: RunJob, tmp_path: Path) -> None:
    for form in ("parquet", "jsonl", "npy"):
        run(output_format=form, output=str(tmp_path / form), task_options={"output_dtype": "float16"})
    vectors = _vectors(tmp_path / "parquet")
    lines = [
        json.loads(line)
        for path in sorted((tmp_path / "jsonl").glob("part-*"))
        for line in path.read_text().splitlines()
    ]
    assert [line["embedding"] for line in lines] == vectors.tolist()
    arrays = [np.load(path) for path in sorted((tmp_path / "npy").glob("*.npy"))]
    assert arrays[0].dtype == np.float16
    np.testing.assert_array_equal(np.concatenate(arrays), vectors)
    beside = [
        json.loads(line)
        for path in sorted((tmp_path / "npy").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert beside == [{"id": line["id"], "n": line["n"]} for line in lines]


def test_json_has_float32_in_as_few_digits_as_give_it_back(run: RunJob, tmp_path: Path) -> None:
    run(output_format="jsonl")
    line = (tmp_path / "out" / "part-00000.jsonl").read_text().splitlines()[0]
    np.testing.assert_array_equal(
        np.array(json.loads(line)["embedding"], np.float32), expected(_GOOD[:1])[0].astype(np.float32)
    )
    assert max(len(number) for number in line.partition("[")[2].split(",")) < 16


def test_a_job_that_is_done_is_not_done_again(run: RunJob, tmp_path: Path) -> None:
    run()
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    done = run()
    assert done.resumed == done.shards == 5
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")} == before


@pytest.mark.parametrize("form", ["parquet", "jsonl", "npy"])
def test_parts_that_are_missing_or_broken_are_made_again(form: str, run: RunJob, tmp_path: Path) -> None:
    run(output_format=form)
    whole = digests(tmp_path / "out")
    (tmp_path / "out" / f"part-00001.{form}").unlink()
    if form == "parquet":
        (tmp_path / "out" / "part-00003.parquet").write_bytes(b"PAR1")
    else:
        (tmp_path / "out" / "_records" / "part-00003.json").write_bytes(b"{")
    assert run(output_format=form).resumed == 3
    assert digests(tmp_path / "out") == whole


def test_a_job_keeps_the_shards_of_its_plan_where_nobody_says_how_many_rows_they_have(
    run: RunJob, tmp_path: Path
) -> None:
    run()
    (tmp_path / "out" / "part-00002.parquet").unlink()
    assert run(shard_rows=None).resumed == 4


def test_parts_of_a_job_make_the_whole(run: RunJob, tmp_path: Path) -> None:
    run()
    shared = tmp_path / "shared"
    for index in (2, 0, 1):
        assert not (shared / SUCCESS).exists()
        run(output=str(shared), part=(index, 3))
    assert digests(shared) == digests(tmp_path / "out")


def test_equal_texts_are_computed_once_and_have_equal_rows(run: RunJob, tmp_path: Path) -> None:
    save_rows(tmp_path / "rows.parquet", ["hello world"] * 30)
    run(inputs=(str(tmp_path / "rows.parquet"),), shard_rows=30)
    assert len(np.unique(_vectors(tmp_path / "out"), axis=0)) == 1


@pytest.fixture
def bad_rows(tmp_path: Path) -> str:
    """Rows of which every fifth is empty or null, and a shard of such alone."""
    values: list[str | None] = [*_GOOD]
    values[0], values[7] = "", None
    values[20:30] = [None] * 10
    save_rows(tmp_path / "bad.parquet", values)
    return str(tmp_path / "bad.parquet")


def test_bad_rows_are_left_out_and_listed(run: RunJob, bad_rows: str, tmp_path: Path) -> None:
    done = run(inputs=(bad_rows,))
    assert (done.rows, done.dead) == (NUM_ROWS - 12, 12)
    kept = [number for number in range(NUM_ROWS) if number not in (0, 7, *range(20, 30))]
    assert [row["n"] for row in _read(tmp_path / "out")] == kept
    np.testing.assert_allclose(_vectors(tmp_path / "out"), expected([_GOOD[number] for number in kept]), atol=1e-6)
    dead = [
        json.loads(line)
        for path in sorted((tmp_path / "out" / "_dead").iterdir())
        for line in path.read_text().splitlines()
    ]
    assert [line["row"] for line in dead] == [0, 7, *range(20, 30)]
    assert dead[1].keys() == {"row", "file", "row_in_file", "id", "code", "reason"}
    assert (dead[1]["id"], dead[1]["file"]) == ("id-7", "bad.parquet")
    assert dead[1]["reason"].startswith("inputs 7 is null (None), and must be a text, ")


def test_bad_rows_may_be_null(run: RunJob, bad_rows: str, tmp_path: Path) -> None:
    run(inputs=(bad_rows,), on_error="null")
    found = _read(tmp_path / "out")
    assert [row["n"] for row in found if row["embedding"] is None] == [0, 7, *range(20, 30)]
    assert len(found) == NUM_ROWS


def test_a_bad_row_may_end_the_job_and_is_named(run: RunJob, bad_rows: str, tmp_path: Path) -> None:
    with pytest.raises(BadRowError, match=r"Row (0|20) of bad\.parquet \(id 'id-(0|20)'"):
        run(inputs=(bad_rows,), on_error="fail")
    assert not (tmp_path / "out" / SUCCESS).exists()
    assert [*(tmp_path / "out" / "_dead").iterdir()]


def test_rows_that_have_an_answer_in_the_next_run_are_listed_no_more(
    run: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bei.service.loader.load_engine", lambda *_: NaNEngine(LIMITS, token_ids("cat")[1]))
    save_rows(tmp_path / "rows.parquet", ["the cat", "hello world"])
    given = {"inputs": (str(tmp_path / "rows.parquet"),), "on_error": "fail"}
    with pytest.raises(BadRowError, match="begin anew in another folder with --on-error skip"):
        run(**given)
    assert [*(tmp_path / "out" / "_dead").iterdir()]
    monkeypatch.setattr("bei.service.loader.load_engine", lambda *_: FakeEngine(LIMITS))
    assert run(**given).dead == 0
    assert not [*(tmp_path / "out" / "_dead").iterdir()]


def test_a_job_whose_parts_are_gone_at_its_end_is_not_done(
    run: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with exit code 0 and without _SUCCESS."""
    record = ParquetParts.record
    gone: list[int] = []
    monkeypatch.setattr(
        ParquetParts, "record", lambda self, folder, shard: None if shard in gone else record(self, folder, shard)
    )
    run(part=(0, 2))
    gone.append(4)  # of the other part
    run(part=(0, 2))
    gone.clear()
    commit = LocalJobFolder.commit

    def committed(self: LocalJobFolder, name: str, content: bytes | memoryview) -> None:
        commit(self, name, content)
        gone[:] = [3] * (name == "part-00004.parquet")

    monkeypatch.setattr(LocalJobFolder, "commit", committed)
    with pytest.raises(JobError, match=r"has not all parts that were written to it: part-00003\.parquet cannot"):
        run()
    assert not (tmp_path / "out" / SUCCESS).exists()


def test_a_text_that_is_too_long_is_cut_and_counted_or_a_bad_row(run: RunJob, tmp_path: Path) -> None:
    save_rows(tmp_path / "long.parquet", ["the " * 200, "the cat"])
    path = (str(tmp_path / "long.parquet"),)
    assert run(inputs=path, output=str(tmp_path / "cut")).truncated == 1
    done = run(inputs=path, task_options={"truncate": False})
    assert (done.rows, done.dead, done.truncated) == (1, 1, 0)
    (line,) = (tmp_path / "out" / "_dead" / "dead-00000.jsonl").read_text().splitlines()
    assert "tokens" in json.loads(line)["reason"]


def test_a_row_that_the_engine_fails_on_costs_no_other(
    run: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = min({*token_ids("zebra")} - {*token_ids("the cat hello world")})
    monkeypatch.setattr("bei.service.loader.load_engine", lambda *_: NaNEngine(LIMITS, poison))
    save_rows(tmp_path / "rows.parquet", ["the cat", "zebra", "hello world"])
    done = run(inputs=(str(tmp_path / "rows.parquet"),))
    assert (done.rows, done.dead) == (2, 1)
    np.testing.assert_allclose(_vectors(tmp_path / "out"), expected(["the cat", "hello world"]), atol=1e-6)


def test_chunks_have_the_vectors_of_their_texts(run: RunJob, tmp_path: Path) -> None:
    whole = [" ".join(texts(9)), "short", " ".join(texts(30))]
    save_rows(tmp_path / "long.parquet", whole)
    run(inputs=(str(tmp_path / "long.parquet"),), chunk_size=ChunkSize(6, 2), shard_rows=2)
    found = _read(tmp_path / "out")
    cut = [whole[row["n"]][row["start"] : row["stop"]] for row in found]
    np.testing.assert_allclose(_vectors(tmp_path / "out"), expected(cut), atol=1e-6)
    for number, text in enumerate(whole):
        own = [row for row in found if row["n"] == number]
        assert [row["chunk"] for row in own] == [*range(len(own))]
        assert (own[0]["start"], own[-1]["stop"]) == (0, len(text))
    assert sum(row["n"] == 2 for row in found) > 10


def test_a_bad_row_of_chunks_is_one_dead_row(run: RunJob, bad_rows: str, tmp_path: Path) -> None:
    done = run(inputs=(bad_rows,), chunk_size=ChunkSize(3))
    assert done.dead == 12
    assert {row["n"] for row in _read(tmp_path / "out")} == {*range(NUM_ROWS)} - {0, 7, *range(20, 30)}
    lines = (tmp_path / "out" / "_dead" / "dead-00000.jsonl").read_text().splitlines()
    assert [json.loads(line)["chunk"] for line in lines] == [0, 0]


def test_a_mistake_in_the_options_leaves_no_plan(run: RunJob, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="dimensions"):
        run(task_options={"dimensions": 17})
    assert not (tmp_path / "out" / PLAN).exists()
    run()


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"task": "rerank"}, ConfigError, "--query-column"),
        ({"columns": Columns(query="id")}, ConfigError, "--query-column"),
        ({"task": "classify", "chunk_size": ChunkSize(4)}, ConfigError, "--chunk-tokens"),
        ({"columns": Columns(carried=("embedding",))}, ConfigError, "'embedding'"),
        ({"columns": Columns(carried=("id", "id"))}, ConfigError, "twice"),
        ({"output_format": "npy", "on_error": "null"}, ConfigError, "--on-error"),
        ({"chunk_size": ChunkSize(1000)}, ConfigError, "--chunk-tokens"),
        ({"task": "sparse"}, BeiError, "cannot make sparse embeddings"),
        ({"inputs": ("-", "a.txt")}, ConfigError, "Standard input"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    options: dict[str, Any], error: type[BeiError], named: str, run: RunJob
) -> None:
    with pytest.raises(error, match=named):
        run(**options)


def test_an_engine_that_answers_otherwise_than_at_build_time_is_refused(run: RunJob, tmp_path: Path) -> None:
    other = save_artifact(tmp_path / "other", canary=[1.0] + [0.0] * (DIMENSION - 1))
    with pytest.raises(EngineError, match="canary"):
        run(other.path)


def test_standard_input_is_read_as_a_file_is(run: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in _GOOD).encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    run(inputs=("-",), columns=Columns())
    np.testing.assert_allclose(_vectors(tmp_path / "out"), expected(_GOOD), atol=1e-6)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert run(inputs=("-",), columns=Columns()).resumed == 5


def test_inputs_of_token_ids_are_run_as_they_are(run: RunJob, tmp_path: Path) -> None:
    ids = [token_ids(text) for text in _GOOD]
    pq.write_table(pa.table({"text": ids}), tmp_path / "ids.parquet")
    run(inputs=(str(tmp_path / "ids.parquet"),), columns=Columns())
    np.testing.assert_allclose(_vectors(tmp_path / "out"), expected(_GOOD), atol=1e-6)


def test_token_ids_are_not_cut_into_chunks_of_their_digits(run: RunJob, tmp_path: Path) -> None:
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"text": token_ids(text)}) + "\n" for text in _GOOD[:3]))
    done = run(inputs=(str(tmp_path / "ids.jsonl"),), columns=Columns(), chunk_size=ChunkSize(6, 2))
    assert (done.rows, done.dead) == (0, 3)
    (line, *_) = (tmp_path / "out" / "_dead" / "dead-00000.jsonl").read_text().splitlines()
    assert "--chunk-tokens" in json.loads(line)["reason"]


@pytest.mark.parametrize("form", ["jsonl", "npy"])
@pytest.mark.parametrize("kind", [pa.binary(), pa.list_(pa.binary(2)), pa.duration("s")])
def test_columns_that_json_does_not_hold_are_refused_by_name(
    kind: pa.DataType, form: str, run: RunJob, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"text": _GOOD[:3], "odd": pa.nulls(3, kind)}), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="'odd'"):
        run(inputs=(str(tmp_path / "rows.parquet"),), columns=Columns(carried=("odd",)), output_format=form)


@pytest.mark.parametrize("form", ["jsonl", "npy"])
@pytest.mark.parametrize(
    ("kind", "wrap"),
    [
        (pa.float64(), lambda value: value),
        (pa.float16(), lambda value: None if value is None else np.float16(value)),
        (pa.list_(pa.float32()), lambda value: [1.5, value]),
        (pa.list_(pa.float32(), 2), lambda value: [1.5, value]),
        (pa.large_list(pa.list_(pa.float32())), lambda value: [[], [value]]),
        (pa.struct([("a", pa.float32()), ("b", pa.string())]), lambda value: {"a": value, "b": "x"}),
        (pa.map_(pa.string(), pa.float32()), lambda value: [("a", value)]),
    ],
    ids=["double", "half", "list", "fixed list", "nested list", "struct", "map"],
)
def test_nan_and_infinity_in_columns_are_refused_by_name_where_json_would_have_null(
    kind: pa.DataType, wrap: Callable[[float | None], Any], form: str, run: RunJob, tmp_path: Path
) -> None:
    def copied(name: str, *values: float | None) -> JobProgress:
        column = pa.array([wrap(value) for value in values], kind)
        pq.write_table(pa.table({"text": _GOOD[:3], "odd": column}), tmp_path / f"{name}.parquet")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        inputs = (str(tmp_path / f"{name}.parquet"),)
        return run(inputs=inputs, columns=Columns(carried=("odd",)), output_format=form)

    assert copied("finite", 0.5, None, 2.5).rows == 3
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(JobInputError, match=r"column 'odd' has .* in row 2 of part-00000"):
            copied("odd", 0.5, None, value)


def test_json_has_times_to_the_nanosecond_whatever_is_installed(run: RunJob, tmp_path: Path) -> None:
    times = pa.array([1, None, 10**18 + 1], pa.timestamp("ns"))
    pq.write_table(pa.table({"text": _GOOD[:3], "at": times}), tmp_path / "rows.parquet")
    run(inputs=(str(tmp_path / "rows.parquet"),), columns=Columns(carried=("at",)), output_format="jsonl")
    lines = (tmp_path / "out" / "part-00000.jsonl").read_text().splitlines()
    found = [json.loads(line)["at"] for line in lines]
    assert found == ["1970-01-01 00:00:00.000000001", None, "2001-09-09 01:46:40.000000001"]


def test_json_has_lists_of_one_length_as_they_are(run: RunJob, tmp_path: Path) -> None:
    lists: dict[str, tuple[list[Any], pa.DataType]] = {
        "holes": ([[1, None], [3, 4]], pa.int32()),
        "whole": ([[1, 2], [3, 4]], pa.int32()),
        "words": ([["a", "b"], ["c", None]], pa.string()),
    }
    arrays = {name: pa.array(values, pa.list_(kind, 2)) for name, (values, kind) in lists.items()}
    pq.write_table(pa.table({"text": _GOOD[:2], **arrays}), tmp_path / "rows.parquet")
    run(inputs=(str(tmp_path / "rows.parquet"),), columns=Columns(carried=tuple(lists)), output_format="jsonl")
    lines = (tmp_path / "out" / "part-00000.jsonl").read_text().splitlines()
    assert not any("." in line.partition('"embedding"')[0] for line in lines)
    assert {name: [json.loads(line)[name] for line in lines] for name in lists} == {
        name: values for name, (values, _) in lists.items()
    }


def test_an_engine_that_lacks_memory_ends_the_job_and_costs_no_row(
    run: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = PickyEngine(LIMITS, lambda ids: len(ids) > 5, MemoryError)
    monkeypatch.setattr("bei.service.loader.load_engine", lambda *_: engine)
    with pytest.raises(JobError, match="memory"):
        run()
    monkeypatch.setattr("bei.service.loader.load_engine", lambda *_: FakeEngine(LIMITS))
    done = run()
    assert (done.rows, done.dead) == (NUM_ROWS, 0)


def test_a_job_is_read_by_its_adapter_and_another_one_is_another_job(run: RunJob, tmp_path: Path) -> None:
    adapters = Adapters(names=["one", "two"], tasks=["one"], is_required=False)
    path = save_artifact(tmp_path / "adapted", adapters=adapters).path

    def adapters_of(name: str, **options: Any) -> set[float]:
        asked = {"output_dtype": "float32", "normalize": False, **options.pop("task_options", {})}
        run(path, output=str(tmp_path / name), task_options=asked, **options)
        return set(_vectors(tmp_path / name)[:, 5].tolist())

    assert adapters_of("none") == {0.0}
    assert adapters_of("two", adapter="two") == {2.0}
    assert adapters_of("one", task_options={"input_type": "one"}) == {1.0}
    with pytest.raises(JobDiffersError, match="--adapter was two, now one"):
        adapters_of("two", adapter="one")
    with pytest.raises(ConfigError, match=r"no adapter 'three'\. Its adapters: one, two"):
        adapters_of("three", adapter="three")


def test_output_below_the_input_is_none_of_it(run: RunJob, rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "rows.parquet").write_bytes(rows.read_bytes())
    output = str(folder / "vectors")
    for given in (str(folder), str(folder / "**" / "*.parquet")):
        run(inputs=(given,), output=output)
        assert run(inputs=(given,), output=output).resumed == 5
    with pytest.raises(JobInputError, match="nothing but this job's output"):
        run(inputs=(output,), output=output)
