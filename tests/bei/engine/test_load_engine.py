"""load_engine: from a manifest's target to the engine, or to an error that says what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from bei.engine import openvino
from bei.engine.cpu_features import EXACT_INT8
from bei.engine.load import load_engine
from bei.errors import (
    ArtifactWrongDeviceError,
    ArtifactWrongTargetError,
    ConfigError,
    EngineError,
    MissingDependencyError,
)
from tests.support.artifacts import save_artifact


@pytest.mark.parametrize("target", ["fake", ""])
def test_a_target_without_an_engine_says_how_to_get_one(tmp_path: Path, target: str) -> None:
    artifact = save_artifact(tmp_path / "artifact", target=target)
    with pytest.raises(ArtifactWrongTargetError, match="Build it again with --target cpu"):
        load_engine(artifact.engine_dir, artifact.manifest)


@pytest.mark.parametrize(("option", "setting"), [("cuda_graphs", "graph_megabytes"), ("memory", "gpu_megabytes")])
def test_an_option_of_another_target_is_refused_by_the_setting_that_gave_it(
    option: str, setting: str, tmp_path: Path
) -> None:
    artifact = save_artifact(tmp_path / "artifact", target="cpu")
    message = rf"The setting {setting} is for target .*cuda; this artifact is for cpu: leave it out\."
    with pytest.raises(ConfigError, match=message):
        load_engine(artifact.engine_dir, artifact.manifest, {option: 100})


def test_without_openvino_the_extra_to_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = save_artifact(tmp_path / "artifact", target="cpu")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'bei\[cpu\]'"):
        load_engine(artifact.engine_dir, artifact.manifest)


def test_a_cpu_without_what_the_engine_needs_is_named(tmp_path: Path) -> None:
    manifest = save_artifact(tmp_path / "artifact", target="cpu").manifest
    needs = msgspec.structs.replace(manifest.engine, capabilities=["FP32", "QUANTUM"])
    with pytest.raises(ArtifactWrongDeviceError, match=r"computes in QUANTUM; this one offers .*--precision fp32"):
        load_engine(tmp_path / "artifact" / "engine", msgspec.structs.replace(manifest, engine=needs))


@pytest.mark.parametrize(
    "needed",
    [
        pytest.param(["INT8", EXACT_INT8], id="matrices of 8 bits"),
        pytest.param(["BF16"], id="built before artifacts said it"),
        pytest.param(["INT8"], id="matrices of 7 bits"),
    ],
)
def test_int8_that_a_cpu_without_vnni_would_clip_is_refused_there(
    needed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino, "cpu_capabilities", lambda: ["FP32", "BF16", "INT8"])
    manifest = save_artifact(tmp_path / "artifact", target="cpu", precision="int8").manifest
    needs = msgspec.structs.replace(manifest.engine, capabilities=needed)
    refused = pytest.raises(
        ArtifactWrongDeviceError, match=r"computes in EXACT_INT8; this one offers FP32, BF16, INT8 \(it has no VNNI"
    )
    with pytest.raises(EngineError, match="could not compile") if needed == ["INT8"] else refused:  # there is no model
        load_engine(tmp_path / "artifact" / "engine", msgspec.structs.replace(manifest, engine=needs))


def test_files_that_openvino_does_not_read_are_an_engine_error(tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "artifact", target="cpu")
    with pytest.raises(EngineError, match="OpenVINO could not compile"):
        load_engine(artifact.engine_dir, artifact.manifest)
