"""``bei --version``, ``bei inspect``, ``bei serve CHECKPOINT``: the installed commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from bei import __version__
from bei.artifact.manifest import Artifact
from tests.e2e import process
from tests.e2e.conftest import StartServer
from tests.e2e.process import DEADLINE_S, serve
from tests.support.builds import build_artifact


@pytest.mark.parametrize("command", [[sys.executable, "-m", "bei"], [str(Path(sys.executable).parent / "bei")]])
def test_module_and_script_say_their_version(env: Mapping[str, str], tmp_path: Path, command: list[str]) -> None:
    shown = subprocess.run(
        [*command, "--version"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert (shown.stdout, shown.stderr) == (f"bei {__version__}\n", "")


def test_inspect_shows_a_table_and_json(tiny: Artifact, env: Mapping[str, str], tmp_path: Path) -> None:
    table = process.run(["inspect", tiny.path], env, tmp_path)
    assert (table.returncode, table.stderr) == (0, "")
    assert "BertModel" in table.stdout
    as_json = process.run(["inspect", "--json", tiny.path], env, tmp_path)
    content = json.loads(as_json.stdout)
    assert content["manifest"]["name"] == "tiny"
    assert content["certificate"]["passed"] is True


def test_tune_measures_an_artifact_and_keeps_the_result(tiny: Artifact, env: Mapping[str, str], tmp_path: Path) -> None:
    result = process.run(["tune", tiny.path, "--cache-dir", tmp_path / "cache"], env, tmp_path)
    assert (result.returncode, "Traceback" in result.stderr) == (0, False)
    assert "best step" in result.stdout
    kept = sorted(file.name.rsplit("-", 1)[0] for file in (tmp_path / "cache" / "costs").iterdir())
    assert kept == ["tiny", "tiny-streams"]
    assert str(tmp_path / "cache" / "costs") in result.stdout


def test_a_checkpoint_is_built_once_the_second_start_finds_it_and_nothing_is_reported_to_anybody(
    checkpoint: Path, env: Mapping[str, str], home: Path, tmp_path: Path
) -> None:
    arguments = [checkpoint, "--precision", "fp32", "--cache-dir", tmp_path / "cache"]
    built = "is a checkpoint: building it into"
    with serve(arguments, env, tmp_path) as first:
        assert first.get_status("/ready") == 200
        vector = first.embed("the cat", model=checkpoint.name).json()["data"][0]["embedding"]
        assert sum(built in line for line in first.log) == 1
        assert len([entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]) == 1
        kept = process.run(["cache", "prune", "--all", "--cache-dir", tmp_path / "cache"], env, tmp_path)
        assert "1 in use" in kept.stdout, kept
    with serve(arguments, env, tmp_path) as second:
        assert second.embed("the cat").json()["data"][0]["embedding"] == vector
        assert not any(built in line for line in second.log)
    listed = process.run(["cache", "list", "--json", "--cache-dir", tmp_path / "cache"], env, tmp_path)
    assert [(one["kind"], one["in_use"]) for one in json.loads(listed.stdout)["entries"]] == [("artifact", False)]
    assert not (home / "intel").exists()  # where OpenVINO's telemetry keeps its client id


@pytest.mark.parametrize("flags", [(), ("--access-log",)])
def test_requests_are_logged_where_asked_for(gated: StartServer, flags: tuple[str, ...]) -> None:
    server = gated(*flags)
    server.say("open")
    assert server.embed([1]).status_code == 200
    server.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    assert any("POST /v1/embeddings" in line for line in server.log) == bool(flags)


@pytest.mark.slow
def test_without_a_model_the_embedded_default_is_served(
    minilm: Artifact, env: Mapping[str, str], tmp_path: Path
) -> None:
    with serve(["--cache-dir", tmp_path / "cache"], env, tmp_path) as server:
        response = server.embed("hello", model="all-MiniLM-L6-v2")
        assert len(response.json()["data"][0]["embedding"]) == minilm.manifest.dimension("embedding")
        assert server.get_status("/ready") == 200


def test_an_artifact_that_was_not_verified_says_so_wherever_it_is_shown(
    checkpoint: Path, env: Mapping[str, str], tmp_path: Path
) -> None:
    artifact = build_artifact(checkpoint, tmp_path / "artifact", verify=False)
    assert "NOT VERIFIED" in process.run(["inspect", artifact.path], env, tmp_path).stdout
    with serve([artifact.path], env, tmp_path) as server:
        assert server.get_status("/ready") == 200
        certificate = httpx.get(f"{server.url}/info", timeout=DEADLINE_S).json()["certificate"]
        assert (certificate["kind"], certificate["passed"]) == ("none", False)
        (line,) = (line for line in server.log if "verification:" in line)
        assert "WARNING" in line
        assert "NOT VERIFIED: built with --no-verify" in line
