"""What is said where another plan is in the folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from bei.artifact.image_processor import ImageProcessor
from bei.artifact.manifest import ImageTower
from bei.bulk.folder import folder_at
from bei.bulk.parts import PLAN
from bei.bulk.plan import JobPlan, machine_for, versions_for
from bei.bulk.run import JobOptions, _shard_rows
from bei.errors import JobDiffersError
from tests.bei.bulk.conftest import RunJob


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
