"""Jobs on clusters of Ray, of which parts are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bei.artifact.manifest import Artifact
from bei.bulk.run import JobOptions, opened_source, run_job
from bei.bulk.sources.rows import Columns
from bei.config.settings import ServeConfig
from bei.engine.fake import FakeEngine
from tests.bei.bulk.conftest import digests, save_rows
from tests.bei.offline.given import texts
from tests.bei.ray.conftest import Scenario
from tests.support.artifacts import LIMITS, save_artifact
from tests.support.builds import build_artifact
from tests.support.checkpoints import save_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("cluster")
    return build_artifact(save_checkpoint(folder / "checkpoint", "bert"), folder / "artifact")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    save_rows(tmp_path / "rows.parquet", [*texts(200), "", None])
    return tmp_path / "rows.parquet"


def _alone(artifact: Artifact, rows: Path, output: Path) -> dict[str, str]:
    """The output of the job in one process."""
    options = JobOptions((str(rows),), str(output), columns=Columns(id="id"), shard_rows=10)
    with opened_source(options) as source:
        run_job(source, artifact.path, options, ServeConfig(tune="off", tokenizer_threads=1), lambda _: None)
    return digests(output)


@pytest.mark.parametrize(
    "fault", ["job_with_a_node_killed", "job_with_its_driver_killed", "job_with_its_driver_terminated"]
)
def test_a_job_on_a_cluster_of_which_a_part_is_killed_writes_what_one_process_writes(
    fault: str, scenario: Scenario, artifact: Artifact, rows: Path, tmp_path: Path
) -> None:
    done = scenario("cluster", fault, artifact.path, rows, tmp_path)
    assert (done["shards_done"], done["rows"], done["dead"]) == (21, 200, 2)
    assert digests(tmp_path / "out") == _alone(artifact, rows, tmp_path / "alone")


def test_the_shards_of_a_worker_that_hangs_are_given_to_another_one(
    scenario: Scenario, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = save_artifact(tmp_path / "artifact")
    done = scenario("cluster", "job_with_a_worker_that_hangs", artifact.path, rows, tmp_path)
    assert done["has_hung"]
    assert (done["shards_done"], done["rows"], done["dead"]) == (21, 200, 2)
    monkeypatch.setattr("bei.service.loader.load_engine", lambda *_: FakeEngine(LIMITS))
    assert digests(tmp_path / "out") == _alone(artifact, rows, tmp_path / "alone")
