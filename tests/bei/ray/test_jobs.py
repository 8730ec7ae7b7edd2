"""Where the workers of a job are placed, and what is made of what they say, without Ray."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.artifact.store import load
from bei.bulk.parts import ShardRecord
from bei.bulk.run import JobOptions, opened_source
from bei.config.settings import ServeConfig
from bei.errors import JobError
from bei.ray import jobs
from bei.ray.jobs import Cluster, ShippedArtifact, _placement, run_on_ray
from tests.support.artifacts import save_artifact


@given(cpus=st.lists(st.integers(1, 64), min_size=1, max_size=6), workers=st.integers(1, 40))
def test_every_worker_fits_on_a_node_and_has_as_many_cpus_as_can_be(cpus: list[int], workers: int) -> None:
    ray = SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": {"CPU": float(count)}} for count in cpus])
    placement = _placement(ray, "cpu", Cluster("auto", workers))
    room = sum(count // placement.num_cpus for count in cpus)
    assert room >= min(workers, sum(cpus))
    assert sum(count // (placement.num_cpus + 1) for count in cpus) < workers


def test_copies_of_artifacts_on_a_node_are_removed_when_no_job_has_begun_with_them_for_a_month(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda part: part))
    built = save_artifact(tmp_path / "tiny")
    files = {str(one.relative_to(built.path)): [one.read_bytes()] for one in built.path.rglob("*") if one.is_file()}
    copies = tmp_path / "cache" / "ray"
    for name, age_s in {"old": 31 * 86_400, "new": 29 * 86_400}.items():
        (copies / name).mkdir(parents=True)
        os.utime(copies / name, (time.time() - age_s,) * 2)
    shipped = ShippedArtifact("/nowhere", built.manifest.digest, files)
    for _ in range(2):
        folder = shipped.on_this_node(tmp_path / "cache")
        assert load(folder).manifest == built.manifest
        os.utime(folder, (0, 0))  # used again, it stays
    os.utime(folder)
    assert {one.name for one in copies.iterdir() if one.is_dir()} == {"new", built.manifest.digest}


class _OtherDisks:
    """Workers that write where the driver does not look."""

    opening: tuple[Any, JobOptions, ServeConfig]

    def __init__(self, _: object, opening: Any, placement: object) -> None:
        type(self).opening = opening

    def opened(self) -> tuple[str, int]:
        return "plan", 2

    def run(self, todo: Seq[int]) -> Iterator[ShardRecord]:
        for shard in todo:
            yield ShardRecord("plan", shard, rows=1, dead=0, truncated=0, tokens=1)


def test_parts_that_the_driver_does_not_find_are_no_done_job_and_paths_hold_in_any_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 1.0}}]
    ray = SimpleNamespace(init=lambda **_: None, nodes=lambda: nodes, put=lambda part: part, shutdown=lambda: None)
    monkeypatch.setattr(jobs, "libraries", SimpleNamespace(load=lambda *_: ray))
    monkeypatch.setattr(jobs, "_Crew", _OtherDisks)
    monkeypatch.setattr(jobs, "_SEEN_WITHIN_S", 0.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    options = JobOptions(("rows.jsonl",), "out")
    artifact = save_artifact(tmp_path / "tiny")
    with opened_source(options) as source, pytest.raises(JobError, match="every node must find the same folder"):
        run_on_ray(source, artifact.path, options, ServeConfig(tune="off"), Cluster("auto"), lambda _: None)
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    _, given_options, _ = _OtherDisks.opening
    assert (given_options.inputs, given_options.output) == ((f"{tmp_path}/rows.jsonl",), f"{tmp_path}/out")
