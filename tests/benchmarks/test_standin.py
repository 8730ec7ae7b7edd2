"""The stand-in of the benchmarks of several processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bei.artifact.certificate.canary import check_canary
from bei.multiprocess.supervisor import supervisor
from bei.service import loader
from benchmarks import standin
from tests.support.artifacts import save_artifact


def test_what_the_stand_in_replaces_is_where_the_server_looks_for_it(tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "tiny")
    assert artifact.certificate is not None
    row = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    with standin.standing_in():
        check_canary("tiny", artifact.certificate, row)
        assert vars(loader)["load_engine"] is standin.load_engine
        assert "benchmarks.standin" in supervisor.COMMAND
