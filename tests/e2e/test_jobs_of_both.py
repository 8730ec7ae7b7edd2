"""``bei embed`` over texts and images of one input: structs, two columns, lists of images; killed jobs go on."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bei.artifact.manifest import Artifact
from bei.bulk.run import JobOptions, opened_source, run_job
from bei.bulk.sources.rows import Columns
from bei.config.settings import ServeConfig
from bei.core import Float32Array
from bei.errors import ConfigError
from tests.e2e.test_image_faults import kill_after, parts
from tests.support import qwen3_vl
from tests.support.builds import build_artifact
from tests.support.two_towers import drawn_files, save_clip

FILES = drawn_files()[:3]
CAPTION = "a caption of two words"
# Texts and images of rows, and their inputs in order.
ROWS: list[tuple[str | None, bytes | None]] = [(CAPTION, FILES[0]), (None, FILES[1]), (CAPTION, None), ("", FILES[2])]
INPUTS: list[tuple[str | bytes, ...]] = [(FILES[0], CAPTION), (FILES[1],), (CAPTION,), (FILES[2],)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_vl.save_qwen3_vl(tmp_path_factory.mktemp("qwen3_vl") / "qwen3_vl")


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifact") / "qwen3_vl", verify=False)


def table(*, structs: bool, of_datasets: bool = False, times: int = 1) -> pa.Table:
    images: list[Any] = [image for _, image in ROWS] * times
    if of_datasets:
        images = [None if image is None else {"bytes": image, "path": None} for image in images]
    texts = [text for text, _ in ROWS] * times
    numbers = [*range(len(texts))]
    if not structs:
        return pa.table({"number": numbers, "caption": texts, "page": images})
    return pa.table({"number": numbers, "both": [{"text": t, "image": i} for t, i in zip(texts, images, strict=True)]})


def job(artifact: Artifact, rows: pa.Table, folder: Path, columns: Columns, **asked: Any) -> pa.Table:
    pq.write_table(rows, folder / "rows.parquet")
    return done(artifact, folder / "rows.parquet", columns, **asked)


def done(artifact: Artifact, file: Path, columns: Columns, **asked: Any) -> pa.Table:
    """The output of a job over the rows of ``file``, in their order."""
    options = JobOptions((str(file),), str(file.parent / "out"), columns=columns, **asked)
    options.check()
    with opened_source(options) as source:
        run_job(source, artifact, options, ServeConfig(tune="off"), lambda progress: None)
    return pq.read_table(sorted((file.parent / "out").glob("*.parquet"))).sort_by("number")


@pytest.mark.parametrize(
    ("structs", "of_datasets"),
    [(True, False), (False, True), pytest.param(True, True, marks=pytest.mark.slow)],
    ids=["structs", "two columns", "structs of the datasets library's"],
)
def test_a_row_has_one_vector_of_its_text_and_image(
    structs: bool, of_datasets: bool, artifact: Artifact, checkpoint: Path, tmp_path: Path
) -> None:
    columns = Columns("both", id="number") if structs else Columns("caption", id="number", image="page")
    found = job(artifact, table(structs=structs, of_datasets=of_datasets), tmp_path, columns)
    expected: list[Float32Array] = qwen3_vl.library_vectors(checkpoint, INPUTS)
    np.testing.assert_allclose(np.array(found["embedding"].to_pylist()), np.array(expected), atol=2e-4)


def test_a_row_of_nothing_or_of_a_damaged_image_is_a_bad_one(artifact: Artifact, tmp_path: Path) -> None:
    rows = pa.table({"number": [0, 1, 2], "caption": [None, "a", "b"], "page": [None, b"junk", FILES[0]]})
    found = job(artifact, rows, tmp_path, Columns("caption", id="number", image="page"))
    assert found["number"].to_pylist() == [2]


@pytest.mark.parametrize(
    ("columns", "asked", "named"),
    [
        (Columns("caption", image="caption"), {"task": "tokens"}, "--image-column is for models"),
        (Columns("caption", query="caption", image="page"), {"task": "rerank"}, "--image-column is for --task embed"),
        (Columns("number", image="page"), {}, "'number' .* holds int64, and qwen3_vl reads texts"),
        (Columns("page", image="caption"), {}, "'page' .* by --text-column"),
        (Columns("number", image="number"), {}, "holds int64, and qwen3_vl reads images .* by --image-column"),
        (Columns("caption", image="number"), {}, "by --image-column"),
        (Columns("caption", image="page"), {"task": "sparse"}, "--image-column is for models"),
    ],
)
def test_columns_that_are_not_of_both_are_refused(
    columns: Columns, asked: dict[str, Any], named: str, artifact: Artifact, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        job(artifact, table(structs=False), tmp_path, columns, **asked)


# Rows of several images, some with a text.
LISTS: list[tuple[list[bytes] | None, str | None]] = [
    ([FILES[0], FILES[1]], CAPTION),
    ([FILES[2], FILES[0], FILES[2]], None),
    ([FILES[1]], None),
    (None, CAPTION),
    ([], None),
]


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


@pytest.mark.parametrize("form", ["bytes", "JSON lines", pytest.param("alone", marks=pytest.mark.slow)])
def test_a_list_of_images_is_one_input(form: str, artifact: Artifact, checkpoint: Path, tmp_path: Path) -> None:
    inputs = [(*(images or ()), *([text] if text and form != "alone" else [])) for images, text in LISTS]
    expected: list[Float32Array] = qwen3_vl.library_vectors(checkpoint, [one for one in inputs if one])
    columns = Columns("caption", id="number", image="pages")
    if form == "JSON lines":
        (tmp_path / "page.png").write_bytes(FILES[0])
        shown = {content: data_url(content) for content in FILES} | {FILES[0]: str(tmp_path / "page.png")}
        lines = [
            json.dumps({"number": place, "caption": text, "pages": images and [shown[one] for one in images]})
            for place, (images, text) in enumerate(LISTS)
        ]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    else:
        rows = {"number": [*range(5)], "pages": [images for images, _ in LISTS], "caption": [text for _, text in LISTS]}
        pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
        columns = columns if form == "bytes" else Columns("pages", id="number")
    file = tmp_path / ("rows.jsonl" if form == "JSON lines" else "rows.parquet")
    found = done(artifact, file, columns)
    assert found["number"].to_pylist() == ([0, 1, 2] if form == "alone" else [0, 1, 2, 3])
    np.testing.assert_allclose(np.array(found["embedding"].to_pylist()), np.array(expected), atol=2e-4)


def test_a_model_with_two_towers_reads_no_such_column(tmp_path: Path) -> None:
    artifact = build_artifact(save_clip(tmp_path / "clip"), tmp_path / "artifact", verify=False)
    with pytest.raises(ConfigError, match="--image-column is for models"):
        job(artifact, table(structs=False), tmp_path, Columns("caption", image="page"))
    with pytest.raises(ConfigError, match=r"'both' .* holds struct"):
        job(artifact, table(structs=True), tmp_path, Columns("both"))
    lists = pa.table({"number": [0], "pages": [[FILES[0], FILES[1]]]})
    with pytest.raises(
        ConfigError, match=r"'pages' .* holds list<.*binary>, and .* reads texts or token ids or images"
    ):
        job(artifact, lists, tmp_path, Columns("pages"))


@pytest.mark.slow
def test_a_job_of_texts_and_lists_of_images_that_is_killed_ends_as_one_that_is_not(
    artifact: Artifact, env: Mapping[str, str], tmp_path: Path
) -> None:
    folders = [tmp_path / "whole", tmp_path / "killed"]
    commands = []
    for folder in folders:
        folder.mkdir()
        rows = table(structs=False, times=60)
        pages = [
            None if page is None else [page] * (1 + place % 3) for place, page in enumerate(rows["page"].to_pylist())
        ]
        pq.write_table(rows.set_column(2, "page", [pages]), folder / "rows.parquet")
        command = [sys.executable, "-m", "bei", "embed", str(artifact.path), "--input", str(folder / "rows.parquet")]
        flags = ["--text-column", "caption", "--image-column", "page", "--id-column", "number", "--shard-rows", "6"]
        commands.append([*command, "--output", str(folder / "out"), *flags])
    subprocess.run(commands[0], check=True, capture_output=True)
    kill_after(commands[1], folders[1], 2, 0.01)
    made = parts(folders[1])
    assert 0 < len(made) < 40
    subprocess.run(commands[1], check=True, capture_output=True)
    assert made.items() <= parts(folders[1]).items()  # computed once
    whole, resumed = (pq.read_table([*parts(one)]).sort_by("number") for one in folders)
    assert resumed["number"].to_pylist() == [*range(4 * 60)]
    vectors = [np.array(one["embedding"].to_pylist(), np.float32) for one in (whole, resumed)]
    np.testing.assert_array_equal(vectors[0], vectors[1])
