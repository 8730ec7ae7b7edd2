"""Jobs whose every row would be an error are refused before anything is computed, by what their columns hold."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bei.bulk.input_check import check_inputs
from bei.bulk.parts import PLAN
from bei.bulk.sources.kinds import JSON_VALUES, STRINGS, ColumnKinds, kinds_of
from bei.bulk.sources.rows import Columns
from bei.errors import ConfigError
from tests.bei.bulk.conftest import RunJob


def manifest(name: str, *, texts: bool = True, images: bool = True, by_token: bool = False) -> Any:
    tower = SimpleNamespace(sequence=msgspec.UNSET) if images else None
    return SimpleNamespace(name=name, reads_texts=texts, image_tower=tower, reads_images_by_token=by_token)


OF_TEXTS = manifest("minilm", images=False)
OF_BOTH = manifest("clip")
OF_IMAGES = manifest("dinov2", texts=False)
OF_PAGES = manifest("colpali", by_token=True)
FILE_STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def check(manifest: Any, held: ColumnKinds, task: str = "embed", **given: Any) -> None:
    chunks = given.pop("chunks", False)
    check_inputs({"body": held}, "rows.parquet", manifest, task, given, chunks=chunks)


@pytest.mark.parametrize(
    ("column", "kinds"),
    [
        (pa.string(), {"text"}),
        (pa.large_string(), {"text"}),
        (pa.string_view(), {"text"}),
        (pa.dictionary(pa.int32(), pa.string()), {"text"}),
        (pa.list_(pa.int64()), {"ids"}),
        (pa.list_(pa.string()), {"texts"}),
        (pa.binary(), {"image"}),
        (pa.large_binary(), {"image"}),
        (FILE_STRUCT, {"image"}),
        (pa.struct([("path", pa.string())]), set()),
        (pa.list_(pa.float32()), set()),
        (pa.int64(), set()),
        (pa.json_(), {"text"}),
        (pa.struct([("text", pa.string()), ("image", FILE_STRUCT)]), {"both"}),
        (pa.struct([("text", pa.string()), ("image", pa.string())]), set()),
        (pa.null(), {"text", "ids", "texts", "image", "both"}),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)
def test_a_type_tells_what_its_values_can_be(column: pa.DataType, kinds: set[str]) -> None:
    assert kinds_of(column).kinds == kinds


@pytest.mark.parametrize(
    ("manifest", "held", "task"),
    [
        (OF_TEXTS, STRINGS, "embed"),
        (OF_TEXTS, kinds_of(pa.list_(pa.int32())), "sparse"),
        (OF_TEXTS, JSON_VALUES, "tokens"),
        (OF_TEXTS, kinds_of(pa.list_(pa.string())), "classify"),
        (OF_TEXTS, kinds_of(pa.null()), "rerank"),
        (OF_BOTH, STRINGS, "embed"),
        (OF_BOTH, kinds_of(pa.binary()), "embed"),
        (OF_IMAGES, kinds_of(FILE_STRUCT), "embed"),
        (OF_PAGES, kinds_of(FILE_STRUCT), "tokens"),
        (OF_PAGES, STRINGS, "tokens"),
    ],
)
def test_columns_that_the_model_reads_are_taken(manifest: SimpleNamespace, held: ColumnKinds, task: str) -> None:
    check(manifest, held, task)


@pytest.mark.parametrize(
    ("manifest", "held", "given", "named"),
    [
        (OF_IMAGES, STRINGS, {}, "holds strings, and dinov2 reads images"),
        (OF_IMAGES, JSON_VALUES, {}, "dinov2 reads images"),
        (OF_IMAGES, kinds_of(pa.list_(pa.int32())), {}, "dinov2 reads images"),
        (OF_TEXTS, kinds_of(pa.binary()), {}, "holds binary, and minilm reads texts or token ids"),
        (OF_TEXTS, kinds_of(pa.int64()), {}, "holds int64"),
        (OF_BOTH, kinds_of(pa.binary()), {"task": "tokens"}, "reads texts for --task tokens"),
        (OF_BOTH, kinds_of(pa.binary()), {"chunks": True}, "reads texts for --task embed with --chunk-tokens"),
        (OF_TEXTS, kinds_of(pa.list_(pa.string())), {"task": "rerank"}, "--text-column and --query-column"),
        (OF_IMAGES, kinds_of(pa.binary()), {"chunks": True}, "--chunk-tokens is for texts"),
        (OF_IMAGES, kinds_of(pa.binary()), {"prompt": "a"}, "--prompt is for texts, and dinov2 reads images alone"),
        (OF_IMAGES, kinds_of(pa.binary()), {"truncate_prompt_tokens": 7}, "--max-tokens"),
        (OF_IMAGES, kinds_of(pa.binary()), {"truncate": False}, "--truncate"),
    ],
)
def test_what_the_model_does_not_read_is_refused_by_name(
    manifest: SimpleNamespace, held: ColumnKinds, given: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        check(manifest, held, **given)


@pytest.mark.parametrize("column", [pa.binary(), pa.float64()])
def test_a_job_over_a_column_of_another_kind_leaves_no_plan(column: pa.DataType, run: RunJob, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([None, None], column)}), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"The column 'text' of .*rows\.parquet holds"):
        run(inputs=(str(tmp_path / "rows.parquet"),), columns=Columns())
    assert not (tmp_path / "out" / PLAN).exists()
