"""Whoever starts ``bei`` may have no home, no name and no UTF-8: no command ends with a traceback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from bei.artifact.manifest import Artifact
from tests.e2e import measured
from tests.e2e.process import ROOT, serve
from tests.support.artifacts import save_artifact

# A user of whom passwd knows nothing, to Python: what the C library would say of a uid without an entry.
NOBODY = """
import pwd
def nobody(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = nobody
"""
STRANGER = 54321  # has no entry in passwd anywhere
NAME = "modèle 世"


@pytest.fixture(scope="module")
def nameless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH in which passwd knows nobody."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(NOBODY)
    return os.pathsep.join((str(folder), str(ROOT), str(ROOT / "build")))


@pytest.fixture(scope="module")
def latin_1(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a latin-1 locale, which is made here; else Python's own words for it."""
    folder = tmp_path_factory.mktemp("locales")
    has_files = Path("/usr/share/i18n/locales/de_DE").is_file() and shutil.which("localedef")
    command = ["localedef", "-i", "de_DE", "-f", "ISO-8859-1", str(folder / "de_DE.ISO-8859-1")]
    if has_files and subprocess.run(command, capture_output=True, check=False).returncode in (0, 1):  # 1: warnings
        return {"LOCPATH": str(folder), "LC_ALL": "de_DE.ISO-8859-1"}
    return {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "latin-1:strict"}


def without(env: Mapping[str, str], *names: str, **more: str) -> dict[str, str]:
    return {**{name: value for name, value in env.items() if name not in names}, **more}


ENVIRONMENTS = ["no home", "nobody", "a home that is a file", "C", "POSIX", "ASCII", "latin-1", "nothing at all"]


@pytest.fixture
def odd(
    request: pytest.FixtureRequest, env: Mapping[str, str], nameless: str, latin_1: dict[str, str], tmp_path: Path
) -> dict[str, str]:
    """The environment that a test's parameter names."""
    (tmp_path / "home").write_text("no folder")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    return {
        "no home": without(env, "HOME"),
        "nobody": without(env, "HOME", PYTHONPATH=nameless),
        "a home that is a file": without(env, HOME=str(tmp_path / "home")),
        "C": without(env, "LANG", LC_ALL="C"),
        "POSIX": without(env, "LANG", LC_ALL="POSIX"),
        "ASCII": without(env, "LANG", **ascii_only),
        "latin-1": without(env, "LANG", **latin_1),
        "nothing at all": without(env, "LANG", "HOME", "PATH", **{**latin_1, "PYTHONPATH": nameless}),
    }[request.param]


def tiers(*fast: str) -> list[object]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow, id=name) for name in ENVIRONMENTS]


def ends_well(ended: measured.Ended) -> str:
    assert ended.returncode == 0, ended.said
    assert "Traceback" not in ended.stderr, ended.said
    return ended.stdout


def ends_in_a_line(ended: measured.Ended) -> str:
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False), ended.said
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert errors == ended.stderr.splitlines()[-1:], ended.said
    return errors[0]


@pytest.mark.parametrize("odd", tiers("nothing at all", "ASCII"), indirect=True)
def test_inspect(odd: dict[str, str], tmp_path: Path) -> None:
    path = save_artifact(tmp_path / "artifact", name=NAME, prompts={"query": "Frage: ¿世?"}).path
    assert "mod" in ends_well(measured.run(["inspect", path], odd, tmp_path))
    content = json.loads(ends_well(measured.run(["inspect", "--json", path], odd, tmp_path)).encode())
    assert content["manifest"]["precision"] == "fp32"
    assert "is not an artifact" in ends_in_a_line(measured.run(["inspect", tmp_path / "é世"], odd, tmp_path))


@pytest.mark.parametrize("odd", tiers("nothing at all"), indirect=True)
def test_doctor(odd: dict[str, str], tmp_path: Path) -> None:
    assert "cpu" in ends_well(measured.run(["doctor", "--no-attention", "--target", "cpu"], odd, tmp_path))


@pytest.mark.parametrize("odd", tiers("nothing at all"), indirect=True)
def test_serve(odd: dict[str, str], tiny: Artifact, tmp_path: Path) -> None:
    with serve([tiny.path], odd, tmp_path) as server:
        assert server.embed("été 世").status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert not any("Traceback" in line for line in server.log)


@pytest.mark.parametrize("odd", tiers(), indirect=True)
def test_build_and_serve(odd: dict[str, str], checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["build", checkpoint, "--out", tmp_path / "out", "--precision", "fp32", "--reference", "engine"]
    ends_well(measured.run(arguments, odd, tmp_path))
    with serve([tmp_path / "out"], without(odd, BEI_TUNE="auto"), tmp_path) as server:
        assert server.embed("été 世").status_code == 200
        assert not any("Traceback" in line for line in server.log)
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("odd", tiers(), indirect=True)
def test_tune(odd: dict[str, str], tiny: Artifact, tmp_path: Path) -> None:
    assert "best step" in ends_well(measured.run(["tune", tiny.path], odd, tmp_path))
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("odd", ["nobody", "a home that is a file"], indirect=True)
def test_a_checkpoint_that_is_served_needs_a_place_to_be_built(
    odd: dict[str, str], checkpoint: Path, tmp_path: Path
) -> None:
    assert "--cache-dir" in ends_in_a_line(measured.run(["serve", checkpoint], odd, tmp_path))
    assert not (tmp_path / "~").exists()


@pytest.fixture
def public(checkpoint: Path) -> Iterator[Path]:
    """A folder that everybody can read and write, and a checkpoint in it."""
    with tempfile.TemporaryDirectory(prefix="bei-") as name:
        folder = Path(name)
        shutil.copytree(checkpoint, folder / "checkpoint")
        for file in (folder / "checkpoint").iterdir():
            file.chmod(0o644)  # safetensors may keep what it writes to its owner
        folder.chmod(0o777)
        yield folder


def can_be_read_by_all(path: Path) -> bool:
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.resolve().parents)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(not can_be_read_by_all(ROOT / "bei"), reason="this checkout is not for everybody's eyes")
@pytest.mark.skipif(not can_be_read_by_all(Path(sys.executable)), reason="others cannot run this Python")
def test_a_user_without_an_entry_in_passwd(env: Mapping[str, str], public: Path) -> None:
    """As OpenShift starts containers: no name, no home, and files that belong to others."""
    mine = without(env, "HOME", "LANG")
    out = public / "out"
    arguments = ["build", public / "checkpoint", "--out", out, "--precision", "fp32", "--reference", "engine"]
    ends_well(measured.run(arguments, mine, public, user=STRANGER))
    assert "BertModel" in ends_well(measured.run(["inspect", out], mine, public, user=STRANGER))
    ends_well(measured.run(["doctor", "--no-attention", "--target", "cpu"], mine, public, user=STRANGER))
    ends_well(measured.run(["tune", out], mine, public, user=STRANGER))
    served = measured.run(["serve", public / "checkpoint"], mine, public, user=STRANGER)
    assert "--cache-dir" in ends_in_a_line(served)
    assert not (public / "~").exists()
