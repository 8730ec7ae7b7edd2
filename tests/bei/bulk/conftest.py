"""Jobs over a tiny artifact, whose vectors are known."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
from moto.server import ThreadedMotoServer

from bei.artifact.manifest import Artifact
from bei.bulk.run import JobOptions, JobProgress, opened_source, run_job
from bei.bulk.sources.rows import Columns
from bei.config.settings import ServeConfig
from bei.engine.fake import FakeEngine
from tests.bei.offline.given import texts
from tests.support.artifacts import LIMITS, save_artifact

RunJob = Callable[..., JobProgress]

NUM_ROWS = 50
COLUMNS = Columns(id="id", carried=("n",))


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return save_artifact(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Parquet file of fifty rows."""
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    save_rows(path, texts(NUM_ROWS))
    return path


def save_rows(path: Path, values: list[Any], **columns: list[Any]) -> None:
    """Rows with these texts and ids of their own."""
    ids = [f"id-{number}" for number in range(len(values))]
    pq.write_table(
        pa.table({"id": ids, "text": values, "n": [*range(len(values))], **columns}), path, row_group_size=13
    )


@pytest.fixture
def run(artifact: Artifact, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunJob:
    """``run(**options)``: a job of ten rows a shard over ``rows`` into ``tmp_path / "out"``, unless they say
    otherwise. ``settings``: of ``ServeConfig``."""
    monkeypatch.setattr("bei.service.loader.load_engine", lambda *_: FakeEngine(LIMITS))

    def run(path: Path | None = None, settings: Mapping[str, Any] = {}, **options: Any) -> JobProgress:
        config = ServeConfig(tune="off", tokenizer_threads=1, **settings)
        given = {
            "inputs": (str(rows),),
            "output": str(tmp_path / "out"),
            "columns": COLUMNS,
            "shard_rows": 10,
            **options,
        }
        job = JobOptions(**given)
        job.check()
        with opened_source(job) as source:
            return run_job(source, path or artifact.path, job, config, lambda _: None)

    return run


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """The URL of a bucket on this machine."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    given = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**given, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
            environment.setenv(name, value)
        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket"
    server.stop()


# Of Lance: they have a time and a name by chance.
_BY_CHANCE = {"_versions", "_transactions"}


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below ``folder`` that is the same in each run."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _BY_CHANCE & {*path.parts}]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
