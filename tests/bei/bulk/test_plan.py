"""What is said where another plan is in the folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from bei.artifact.image_processor import ImageProcessor
from bei.artifact.manifest import ImageTower
from bei.bulk.chunks import ChunkSize
from bei.bulk.folder import folder_at
from bei.bulk.parts import PLAN
from bei.bulk.plan import JobPlan, machine_for, versions_for
from bei.bulk.run import JobOptions, _shard_rows
from bei.bulk.sources.rows import Columns
from bei.errors import JobDiffersError
from tests.bei.bulk.conftest import NUM_ROWS, RunJob, digests, save_rows
from tests.bei.offline.given import texts
from tests.support.artifacts import save_artifact

_GOOD = texts(NUM_ROWS)


def test_a_machine_with_other_instructions_is_told_what_to_do(run: RunJob, tmp_path: Path) -> None:
    run()
    path = tmp_path / "out" / PLAN
    plan = msgspec.json.decode(path.read_bytes(), type=JobPlan)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(plan, machine="x86_64 avx2")))
    with pytest.raises(JobDiffersError, match=r"instructions \(x86_64 avx2, now .* go on on a machine with the former"):
        run()
    assert folder_at(str(tmp_path / "out")).exists("part-00004.parquet")


def test_instructions_that_engines_choose_by_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu avx2 avx512f sse2\n")
    assert machine_for("cpu", "a CPU", tmp_path / "cpuinfo").endswith(" avx2 avx512f")
    assert machine_for("cuda", "NVIDIA H100", tmp_path / "cpuinfo") == "NVIDIA H100"


def test_kernels_that_cpu_engines_use_belong_to_the_plan_where_they_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bei.bulk.plan.version", lambda name: f"1.0 of {name}")
    assert versions_for("cpu")["bei-kernels-cpu"] == "1.0 of bei-kernels-cpu"
    assert "bei-kernels-cpu" not in versions_for("cuda")


@pytest.mark.parametrize(
    ("target", "package"), [("tensorrt-rtx", "tensorrt_rtx_cu13_libs"), ("trtllm", "tensorrt-llm"), ("cpu", "pillow")]
)
def test_what_runs_and_what_decodes_belong_to_the_plan(
    target: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bei.bulk.plan.version", lambda name: f"1.0 of {name}")
    assert versions_for(target, None, "pillow")[package] == f"1.0 of {package}"


def test_shards_of_images_are_bounded_by_what_these_take_as_the_model_reads_them() -> None:
    size, half = (224, 224), (0.5, 0.5, 0.5)
    processor = ImageProcessor(
        shortest_edge=None, resize=size, resample="bicubic", crop=None, rescale=1 / 255, mean=half, std=half
    )
    unread: Any = None
    options = JobOptions((), "out")
    for given, most in ((processor, 900), (msgspec.structs.replace(processor, fractions=True), 225)):
        tower = ImageTower(
            processor=given,
            image_size=size,
            patch_size=32,
            class_token=True,
            pooling="cls",
            spec=unread,
            engine=unread,
            max_num_tokens=50,
            max_batch_size=1,
            max_seq_len=50,
        )
        manifest: Any = SimpleNamespace(dimension=lambda _: 384, max_seq_len=77, image_tower=tower)
        assert most // 2 < _shard_rows(manifest, options, 1) < most
        assert _shard_rows(manifest, options, 4) == _shard_rows(manifest, options, 1) // 4
    assert _shard_rows(manifest, options, 0) == 10_000


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"task_options": {"dimensions": 4}}, "It differs: --dimensions was not given, now 4. Give it"),
        ({"task_options": {"normalize": False}}, "--normalize was not given, now False"),
        ({"columns": Columns(id="id")}, "It differs: --columns was n, now not given. Give"),
        ({"columns": Columns(carried=("n",))}, "It differs: --id-column was id, now not given. Give"),
        ({"shard_rows": 11}, r"rows of a shard \(10, now 11\)"),
        ({"on_error": "null"}, "--on-error was skip, now null"),
        ({"output_format": "npy"}, "--output-format was parquet, now npy"),
        ({"chunk_size": ChunkSize(5)}, "--chunk-tokens was not given, now 5"),
        ({"max_rows": 20}, "It differs: --max-rows was not given, now 20. Give"),
        ({"settings": {"auto_truncate": False}}, "--auto-truncate was True, now False"),
        ({"task_options": {"truncate_prompt_tokens": 4}}, "--max-tokens was not given, now 4"),
    ],
)
def test_another_job_in_the_folder_is_refused_with_what_differs(
    changed: dict[str, Any], named: str, run: RunJob, tmp_path: Path
) -> None:
    run()
    before = digests(tmp_path / "out")
    with pytest.raises(JobDiffersError, match=named):
        run(**changed)
    assert digests(tmp_path / "out") == before


def test_another_model_or_changed_input_is_refused(run: RunJob, tmp_path: Path) -> None:
    save_rows(tmp_path / "rows.parquet", _GOOD)
    given = {"inputs": (str(tmp_path / "rows.parquet"),)}
    run(**given)
    other = save_artifact(tmp_path / "other", name="other")
    with pytest.raises(JobDiffersError, match="the model"):
        run(other.path, **given)
    save_rows(tmp_path / "rows.parquet", _GOOD[::-1])
    with pytest.raises(JobDiffersError, match=r"changed: rows\.parquet"):
        run(**given)
    save_rows(tmp_path / "rows.parquet", _GOOD)  # the same content with another time
    assert run(**given).resumed == 5


def test_lines_that_are_read_in_another_format_are_another_job(run: RunJob, tmp_path: Path) -> None:
    """Their digests and the bounds of shards are equal."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    given = {"inputs": (str(tmp_path / "rows.jsonl"),), "columns": Columns()}
    run(**given)
    with pytest.raises(JobDiffersError, match="--input-format was jsonl, now text"):
        run(input_format="text", **given)


def test_an_input_that_has_grown_behind_the_rows_that_are_read_is_named(run: RunJob, tmp_path: Path) -> None:
    """The message named nothing."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' * 3)
    given = {"inputs": (str(path),), "columns": Columns(), "max_rows": 2}
    run(**given)
    path.write_text('{"text": "a"}\n' * 5)
    with pytest.raises(JobDiffersError, match=r"It differs: .*grown or cut: rows\.jsonl, 42 bytes, now 70"):
        run(**given)


def test_cutting_texts_by_the_setting_matters_where_no_option_says_it(run: RunJob) -> None:
    run(task_options={"truncate": True})
    assert run(task_options={"truncate": True}, settings={"auto_truncate": False}).resumed == 5


def test_a_folder_with_other_files_is_refused(run: RunJob, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(JobDiffersError, match=PLAN):
        run()
    (tmp_path / "out" / PLAN).write_text("{}")
    with pytest.raises(JobDiffersError, match="not a plan"):
        run()
