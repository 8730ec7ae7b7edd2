"""The Dockerfile fits the package, as far as its text shows. ``python -m tests.image`` builds and runs the images."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from bei import __version__
from bei.artifact.model_names import DEFAULT_MODEL
from bei.config.settings import ServeConfig
from bei.config.sources import load
from tests.image import __main__ as image
from tests.image import tools

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXT = tools.DOCKERFILE.read_text("utf-8")
PROJECT: dict[str, Any] = tomllib.loads((tools.ROOT / "pyproject.toml").read_text("utf-8"))
IGNORED = (tools.ROOT / ".dockerignore").read_text("utf-8").splitlines()

# Name -> what it starts from, and its instructions.
STAGES = {
    name: (start, body)
    for start, name, body in re.findall(
        r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", re.sub(r"^#.*\n", "", TEXT, flags=re.M), re.M | re.S
    )
}
IMAGES = ("cuda", "tensorrt", "trtllm", "cpu-build", "cpu")


def test_the_last_stage_is_the_one_for_serving_on_cpus() -> None:
    assert [name for name in STAGES if name in IMAGES] == [*IMAGES]
    assert list(STAGES)[-1] == "cpu"


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_has_a_numeric_user_and_labels(name: str) -> None:
    start, body = STAGES[name]
    assert body.rstrip().endswith("USER 10001:10001")
    text = (STAGES[start][1] if start in STAGES else "") + body
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', text))
    assert {*labels} == {"title", "description", "version", "licenses", "revision"}
    assert labels["version"] == __version__
    assert ("NVIDIA" in labels["licenses"]) == ("cpu" not in name)


def test_what_is_set_in_images_are_settings_of_the_server() -> None:
    found = [dict(re.findall(r"\b(BEI_[A-Z_]+)=(\S+)", body)) for _, body in STAGES.values()]
    assert sum("BEI_HOST" in env for env in found) == 2  # the base of all, and the image on NVIDIA's
    for env in found:
        load(ServeConfig, {}, env=env)


def test_the_image_on_nvidia_s_is_as_the_others() -> None:
    """It starts from another image, so it says the same once more."""
    ours, theirs = STAGES["base"][1], STAGES["trtllm"][1]
    for instruction in ("ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"):
        (one,) = re.findall(rf"^{instruction} (?:.*\\\n)*.*$", ours, re.M)
        assert one in theirs, instruction
    for command in ("groupadd", "useradd", "install", "chgrp"):
        (one,) = re.findall(rf"{command} .*?(?= \\\n|\n)", ours)
        assert one in theirs, command


def test_the_image_for_serving_has_the_engine_of_the_extra() -> None:
    (openvino,) = [one for one in PROJECT["project"]["optional-dependencies"]["cpu"] if one.startswith("openvino")]
    assert f'"{openvino}"' in STAGES["cpu-environment"][1]


def test_extras_of_images_are_of_the_package() -> None:
    extras = {name for found in re.findall(r"\*\.whl\)\[([a-z,-]+)]", TEXT) for name in found.split(",")}
    assert extras == {"cpu", "cuda", "tensorrt", "trtllm", "bulk", "otel", "sign"}
    assert extras <= set(PROJECT["project"]["optional-dependencies"])


def test_the_model_of_the_images_is_the_default_one() -> None:
    assert f"bei build {DEFAULT_MODEL.package} " in STAGES["models"][1]
    assert f"--name {DEFAULT_MODEL.name} " in STAGES["models"][1]


def is_sent(path: str) -> bool:
    """True if the file of a checkout gets to the engine that builds: the last line that matches decides."""
    sent = True
    for line in IGNORED:
        pattern = line.removeprefix("!")
        names = [path, *(str(parent) for parent in Path(path).parents)]
        if not line.startswith("#") and any(
            fnmatch.fnmatch(f"/{name}" if "**" in line else name, pattern.replace("**/", "*/")) for name in names
        ):
            sent = line.startswith("!")
    return sent


def test_only_what_the_wheel_is_made_of_is_sent() -> None:
    needed = [*PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"], "bei/server/ui/index.html"]
    needed += ["pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]]
    assert [path for path in needed if not is_sent(path)] == []
    for path in (".git/config", ".env", "id_rsa", "tests/conftest.py", "bei/__pycache__/core.pyc", "models/secret"):
        assert not is_sent(path), path


def test_the_command_is_skipped_where_it_cannot_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def said() -> str:
        monkeypatch.setattr(sys, "argv", ["tests.image", "--python", str(tmp_path)])
        assert image.main() == image.SKIPPED == 77
        return capsys.readouterr().out

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert said().startswith("skipped: it needs root")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "apt-get install --no-install-recommends buildah mmdebstrap podman runc" in said()
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "pyenv" else f"/usr/bin/{name}")
    assert f"it needs a Python {tools.python_version()} for the base" in said()
