"""Jobs whose every row would be an error are refused before anything is computed, by what their columns hold."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bei.bulk.input_check import check_inputs, images_a_row
from bei.bulk.parts import PLAN
from bei.bulk.sources.kinds import JSON_VALUES, STRINGS, ColumnKinds, kinds_of
from bei.bulk.sources.rows import Columns
from bei.errors import ConfigError
from tests.bei.bulk.conftest import RunJob


def manifest(
    name: str, *, texts: bool = True, images: bool = True, by_token: bool = False, most_images: int = 0
) -> Any:
    sequence = SimpleNamespace(around=("<", ">"), most_images=most_images) if most_images else msgspec.UNSET
    tower = SimpleNamespace(sequence=sequence) if images else None
    return SimpleNamespace(
        name=name, reads_texts=texts, image_tower=tower, reads_images_by_token=by_token, tasks=["embed"]
    )


OF_TEXTS = manifest("minilm", images=False)
OF_BOTH = manifest("clip")
OF_IMAGES = manifest("dinov2", texts=False)
OF_PAGES = manifest("colpali", by_token=True)
OF_ONE = manifest("embeddinggemma", most_images=1)
OF_SEVERAL = manifest("qwen3vl", most_images=64)
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
        (pa.list_(pa.binary()), {"images"}),
        (pa.large_list(FILE_STRUCT), {"images"}),
        (pa.struct([("text", pa.string()), ("image", pa.list_(FILE_STRUCT))]), {"text and images"}),
        (pa.null(), {"text", "ids", "texts", "image", "images", "both", "text and images"}),
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
        (OF_SEVERAL, kinds_of(pa.list_(pa.binary())), "embed"),
        (OF_SEVERAL, kinds_of(pa.struct([("text", pa.string()), ("image", pa.list_(FILE_STRUCT))])), "embed"),
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
        (
            OF_BOTH,
            kinds_of(pa.list_(pa.binary())),
            {},
            r"holds list<.*binary>, and clip reads texts or token ids or images",
        ),
        (OF_ONE, kinds_of(pa.list_(FILE_STRUCT)), {}, "embeddinggemma reads .* or structs of a text and an image for"),
        (OF_PAGES, kinds_of(pa.list_(pa.binary())), {"task": "tokens"}, "colpali reads texts or images"),
    ],
)
def test_what_the_model_does_not_read_is_refused_by_name(
    manifest: SimpleNamespace, held: ColumnKinds, given: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        check(manifest, held, **given)


@pytest.mark.parametrize(
    ("manifest", "held", "task", "named"),
    [
        (OF_BOTH, STRINGS, "embed", None),
        (OF_PAGES, STRINGS, "tokens", None),
        (OF_SEVERAL, kinds_of(pa.list_(pa.string())), "embed", None),
        (OF_SEVERAL, JSON_VALUES, "embed", None),
        (OF_BOTH, kinds_of(pa.list_(pa.string())), "embed", "clip reads images .*, or data URLs or whole paths"),
        (OF_SEVERAL, kinds_of(pa.int64()), "embed", "or lists of images, or data URLs .* by --image-column"),
        (OF_TEXTS, STRINGS, "embed", "--image-column is for models"),
        (OF_PAGES, STRINGS, "embed", "--image-column is for models"),
    ],
)
def test_strings_are_images_in_a_column_that_is_said_to_hold_them(
    manifest: Any, held: ColumnKinds, task: str, named: str | None
) -> None:
    with nullcontext() if named is None else pytest.raises(ConfigError, match=named):
        check_inputs({"page": held}, "rows.jsonl", manifest, task, {}, chunks=False, image="page")


@pytest.mark.parametrize(
    ("manifest", "column", "image", "most"),
    [
        (OF_BOTH, pa.string(), None, 0),
        (OF_TEXTS, pa.binary(), None, 0),
        (OF_BOTH, pa.binary(), None, 1),
        (OF_BOTH, pa.string(), "body", 1),
        (OF_SEVERAL, FILE_STRUCT, None, 1),
        (OF_SEVERAL, pa.list_(pa.binary()), None, 4),
        (OF_SEVERAL, pa.list_(pa.string()), None, 0),
        (OF_SEVERAL, pa.list_(pa.string()), "body", 4),
    ],
)
def test_shards_are_counted_by_images_of_a_row(
    manifest: Any, column: pa.DataType, image: str | None, most: int
) -> None:
    assert images_a_row({"body": kinds_of(column)}, manifest, image) == most


@pytest.mark.parametrize("column", [pa.binary(), pa.float64()])
def test_a_job_over_a_column_of_another_kind_leaves_no_plan(column: pa.DataType, run: RunJob, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([None, None], column)}), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"The column 'text' of .*rows\.parquet holds"):
        run(inputs=(str(tmp_path / "rows.parquet"),), columns=Columns())
    assert not (tmp_path / "out" / PLAN).exists()
