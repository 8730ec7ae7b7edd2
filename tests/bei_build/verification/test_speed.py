"""The line that says where a quantized engine is slower than the usual one on the machine of the build."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bei.engine.load import load_engine
from bei_build.config import BuildConfig
from bei_build.pipeline import build
from bei_build.progress import Progress
from bei_build.targets.openvino import OpenVINOCompiler
from bei_build.verification import speed
from tests.support.checkpoints import save_checkpoint

USUAL = OpenVINOCompiler().resolve_precision("auto")


def said_by_a_build(tmp_path: Path, precision: str) -> str:
    said = io.StringIO()
    settings: dict[str, Any] = {"calibration_size": 8} if precision == "int8" else {}
    checkpoint, out = save_checkpoint(tmp_path / "checkpoint"), str(tmp_path / "artifact")
    config = BuildConfig(model=str(checkpoint), out=out, precision=precision, verify=False, **settings)
    build(config, load_engine, Progress(Console(file=said, width=200)))
    assert [path.name for path in tmp_path.glob("*") if path.name not in ("checkpoint", "artifact")] == []
    return said.getvalue()


@pytest.mark.parametrize(("ratio", "is_slower"), [(0.84, True), (1.3, False)])
def test_a_build_says_that_int8_is_slower_here_and_only_then(
    ratio: float, is_slower: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "_ratio", lambda engines, batch: ratio)
    said = said_by_a_build(tmp_path, "int8")
    assert f"Compare speed with {USUAL}" in said
    assert f"{ratio:.2f} times as fast" in said
    assert (f"int8 is slower than {USUAL} on this machine" in said) == is_slower


def test_both_engines_are_measured(tmp_path: Path) -> None:
    assert "times as fast" in said_by_a_build(tmp_path, "int8")


def test_other_precisions_are_not_compared(tmp_path: Path) -> None:
    assert "Compare speed" not in said_by_a_build(tmp_path, "fp32")
