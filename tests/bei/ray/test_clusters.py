"""Jobs on clusters of Ray, of which parts are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bei.artifact.manifest import Artifact
from bei.bulk.run import JobOptions, opened_source, run_job
from bei.bulk.sources.rows import Columns
from bei.config.settings import ServeConfig
from tests.bei.bulk.conftest import digests, save_rows
from tests.bei.offline.given import texts
from tests.bei.ray.conftest import Scenario
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


@pytest.fixture
def alone(artifact: Artifact, rows: Path, tmp_path: Path) -> dict[str, str]:
    """The output of the job in one process."""
    options = JobOptions((str(rows),), str(tmp_path / "alone"), columns=Columns(id="id"), shard_rows=10)
    with opened_source(options) as source:
        run_job(source, artifact.path, options, ServeConfig(tune="off", tokenizer_threads=1), lambda _: None)
    return digests(tmp_path / "alone")


@pytest.mark.parametrize("fault", ["job_with_a_node_killed", "job_with_its_driver_killed"])
def test_a_job_on_a_cluster_of_which_a_part_is_killed_writes_what_one_process_writes(
    fault: str, scenario: Scenario, artifact: Artifact, rows: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    done = scenario("cluster", fault, artifact.path, rows, tmp_path)
    assert (done["shards_done"], done["rows"], done["dead"]) == (21, 200, 2)
    assert digests(tmp_path / "out") == alone
