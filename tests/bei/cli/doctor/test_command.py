"""``bei doctor`` as a command, on the machine that runs the tests, and how its report is printed."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from bei.artifact.manifest import EngineRequirements
from bei.cli import main
from bei.cli.doctor.facts import EXTRAS, Extra
from bei.cli.doctor.targets import ENGINES, TARGETS
from bei.cli.doctor.text import as_text, show
from bei.engine.load import load_engine
from bei.errors import ArtifactWrongTargetError, BeiError
from tests.bei.cli.doctor.machines import (
    KERNEL_DRIVER,
    Cuda,
    StandInBuilder,
    examined,
    install_library,
    machine,
    with_engines,
)
from tests.support.artifacts import save_artifact

QUICK = ("--head-sizes", "64", "--compute-capability", "89")
ROOT = Path(__file__).parents[4]
PATH = os.pathsep.join([str(ROOT), str(ROOT / "build")])


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``bei doctor`` in a new process."""
    return subprocess.run(
        [sys.executable, "-m", "bei", "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": PATH, **environment},
    )


@pytest.fixture(scope="module")
def of_this_machine() -> Any:
    result = doctor("--json", *QUICK)
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


def test_this_machine_serves_for_cpu_and_says_so_first(of_this_machine: Any) -> None:
    assert of_this_machine["summary"][0].startswith("This machine can build and serve for cpu (")
    cpu = next(target for target in of_this_machine["targets"] if target["name"] == "cpu")
    assert cpu["auto"] == ("bf16" if "BF16" in of_this_machine["cpu"]["computes_in"] else "fp32")


def test_what_it_says_of_building_is_what_the_compilers_say(of_this_machine: Any) -> None:
    from bei_build.config import TARGETS as BUILT
    from bei_build.config import BuildConfig
    from bei_build.targets.choose import compiler_for

    for target in of_this_machine["targets"]:
        if target["name"] not in BUILT:
            assert target["can_build"]["verdict"] == "no"
            continue
        capabilities = ("89",) if target["name"] == "tensorrt-rtx" else ()
        reason = ""
        try:
            compiler_for(BuildConfig(model="any", target=target["name"], compute_capability=capabilities)).check_able()
        except BeiError as error:
            reason = " ".join(str(error).split())
        assert target["can_build"] == {"verdict": "no" if reason else "yes", "reason": reason}


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None, reason="tensorrt_rtx_bindings is not installed"
)
def test_attention_layers_are_built_with_the_library_that_is_here(of_this_machine: Any) -> None:
    layers = [layer for layer in of_this_machine["attention"] if layer["target"] == "tensorrt-rtx"]
    assert len(layers) == 12
    assert {layer["capability"] for layer in layers} == {89}
    assert {layer["fused"] for layer in layers if layer["form"] == "padded" and layer["precision"] == "bf16"} == {"yes"}


def test_every_target_has_its_answer(of_this_machine: Any) -> None:
    assert tuple(target["name"] for target in of_this_machine["targets"]) == TARGETS


@pytest.mark.parametrize(("target", "code"), [("cpu", 0), ("cuda", 1)])
def test_with_a_target_the_exit_code_says_whether_it_can_be_used_at_all(
    target: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found: object = 0
    try:
        main.main(["doctor", "--target", target, "--no-attention"])
    except SystemExit as ended:
        found = ended.code
    assert found == code
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"This machine can {'neither build nor serve' if code else 'build and serve'} for {target}")


@pytest.mark.parametrize(
    "arguments",
    [["--target", "tpu"], ["--head-sizes", "0"], ["--head-sizes", "64,"], ["--compute-capability", "8.9"], ["x"]],
    ids=" ".join,
)
def test_wrong_arguments_are_exit_code_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["doctor", *arguments])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("See 'bei doctor --help'.")


def test_without_the_builder_the_command_still_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "bei_build"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    main.main(["doctor"])
    shown = capsys.readouterr().out
    assert "This machine can serve for cpu" in shown
    assert "pip install 'bei[cpu]'" in shown


def test_in_a_terminal_it_is_coloured_and_no_line_is_wider_than_it() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "bei", "doctor", "--no-attention"],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,  # progress
        env={**os.environ, "PYTHONPATH": PATH, "COLUMNS": "80", "TERM": "xterm", "NO_COLOR": ""},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux's end of a terminal
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.wait() == 0
    assert b"\x1b[32myes" in shown
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()
    assert max(map(len, lines)) <= 80


# Reports as text


def test_a_report_in_a_pipe_is_plain_and_begins_with_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cuda().install(monkeypatch)
    install_library(monkeypatch, "tensorrt", None)
    with_engines(monkeypatch)
    report = examined(machine(tmp_path, driver=KERNEL_DRIVER))
    lines = as_text(report, width=80).splitlines()
    assert lines[0] == report.summary[0]
    assert all(len(line) <= 80 and line == line.rstrip() and "\x1b" not in line for line in lines)
    titles = ["Machine", "NVIDIA", "Packages", "Targets", "Not known", "What to do"]
    assert [line for line in lines if line in titles] == titles


def test_targets_that_the_machine_has_no_gpu_for_share_a_sentence_and_an_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_library(monkeypatch, "tensorrt", None)
    install_library(monkeypatch, "tensorrt_rtx", "1.7.1.116")
    report = examined(machine(tmp_path), StandInBuilder(), with_attention=False)
    gpus = "tensorrt, tensorrt-rtx, cuda, trtllm"
    assert report.summary[-1].startswith(f"It has no NVIDIA GPU, so nothing is served here for {gpus}; ")
    assert [step for step in report.to_do if "NVIDIA" in step] == [
        f"{gpus}: take a machine with an NVIDIA GPU (bei doctor --target NAME says what else)"
    ]
    lines = as_text(report, width=200).splitlines()
    assert "NVIDIA" not in lines
    assert len(lines[lines.index("Targets") :][: lines[lines.index("Targets") :].index("")]) == 2, "cpu alone"
    assert sum("NVIDIA GPU" in line for line in lines) == 2


def test_an_advice_stands_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda().install(monkeypatch)
    install_library(monkeypatch, "tensorrt", None)
    text = as_text(examined(machine(tmp_path, driver=KERNEL_DRIVER), target="tensorrt"), width=200)
    assert "  tensorrt  build no, serve no" in text
    assert "  build, serve: needs the Python package 'tensorrt': pip install 'bei[tensorrt]'" in " ".join(
        text.split("\n")
    )
    assert text.count("install 'bei[tensorrt]'") == 2, "the reason, and what to do"


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_one_of_the_project_s_and_known_by_a_package_of_it(extra: str) -> None:
    declared = re.search(rf"^{extra} = \[(.*?)\]$", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert declared is not None
    assert re.search(rf'"{EXTRAS[extra][0]}\b', declared[1])


def test_every_extra_is_a_target_s_or_known_but_for_those_of_work_on_bei() -> None:
    optional = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    of_users = optional.split("trt-ci = ")[0]
    assert {*re.findall(r"^([\w-]+) = ", of_users, re.M)} == {"build", *TARGETS, *EXTRAS}


def test_missing_extras_are_named_with_the_command_that_installs_them(tmp_path: Path) -> None:
    there = Extra(name="bench", is_installed=True, purpose="bei bench")
    missing = Extra(name="sign", is_installed=False, purpose="signatures of artifacts")
    report = msgspec.structs.replace(examined(machine(tmp_path)), extras=[there, missing])
    lines = as_text(report).splitlines()
    assert "  extras         bench" in lines
    assert "  without extra  sign (signatures of artifacts): pip install 'bei[sign]'" in lines


def test_names_in_brackets_are_printed_in_terminals_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda().install(monkeypatch)
    install_library(monkeypatch, "tensorrt", "10.0.0.1")
    stream = io.StringIO()
    show(examined(machine(tmp_path)), Console(file=stream, force_terminal=True, width=100, color_system=None))
    assert "pip install 'bei[tensorrt]'" in stream.getvalue()


def test_equal_answers_share_a_table_and_different_ones_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_library(monkeypatch, "tensorrt_rtx", "1.7.1.116")
    Cuda(0, "cudaErrorInsufficientDriver").install(monkeypatch)
    equal = as_text(examined(machine(tmp_path), StandInBuilder(), head_sizes=(64, 96)))
    assert "Fused attention, tensorrt-rtx, compute capability 8.9, 12.0\n" in equal
    assert "  bf16, fp16  padded  yes  yes\n" in equal
    assert "              packed  no   no\n" in equal
    answers = iter(["yes"] * 8 + ["unknown"] * 8)
    other = as_text(examined(machine(tmp_path), StandInBuilder(fused=lambda form: next(answers)), head_sizes=(64, 96)))
    assert "Fused attention, tensorrt-rtx, compute capability 8.9\n" in other
    assert "Fused attention, tensorrt-rtx, compute capability 12.0\n" in other
    assert "unknown: why" in other


@pytest.mark.parametrize("target", ENGINES)
def test_it_knows_the_engines_that_load_engine_knows(tmp_path: Path, target: str) -> None:
    artifact = save_artifact(tmp_path / "artifact")
    engine = EngineRequirements(compiler="any", compiler_version="1", device="any", capabilities=[])
    manifest = msgspec.structs.replace(artifact.manifest, target=target, engine=engine)
    with pytest.raises(BeiError) as caught:
        load_engine(artifact.engine_dir, manifest)
    has_engine = importlib.util.find_spec(ENGINES[target]) is not None
    assert isinstance(caught.value, ArtifactWrongTargetError) == (not has_engine)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--no-attention", "--head-sizes", "64"), "--head-sizes has no effect with --no-attention"),
        (
            ("--target", "cpu", "--compute-capability", "89"),
            "--compute-capability works with target tensorrt-rtx only, not with cpu",
        ),
    ],
)
def test_flags_that_would_change_nothing_are_refused(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["doctor", *arguments])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
