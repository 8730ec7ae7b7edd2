"""Builds in int8, from checkpoint to certificate: calibration, layers in high precision, and errors that a certificate
catches."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from rich.console import Console

from bei.artifact.certificate.record import Thresholds
from bei.artifact.manifest import Artifact
from bei.cli.main import main
from bei.engine import openvino as runtime
from bei.engine.cpu_features import EXACT_INT8
from bei.errors import ConfigError, VerificationError
from bei_build.config import BuildConfig
from bei_build.job import Job
from bei_build.onnx_graph.writer import GraphWriter
from bei_build.progress import Progress
from bei_build.quantization.calibrate import QUANTIZATION, Calibration, reaching, read_quantization, with_more_high
from bei_build.quantization.calibration_texts import CalibrationTexts
from bei_build.quantization.scales import ChosenScales
from bei_build.spec.dtypes import DType
from bei_build.spec.quantization import LayerQuantization, Quantization
from bei_build.targets import openvino
from bei_build.verification.certify import allowed_share
from tests.bei_build.targets.rtx import needs_rtx
from tests.support.builds import build_artifact
from tests.support.checkpoints import read_tensors, save_checkpoint, save_static, write_tensors
from tests.support.quality_certificates import agreement, certificate, retrieval

OUTLIER = "layers.1.mlp.down"


def build(checkpoint: Path, out: Path, **settings: Any) -> Artifact:
    return build_artifact(checkpoint, out, **{"precision": "int8", "calibration_size": 40, **settings})


def record_of(artifact: Artifact) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((artifact.path / QUANTIZATION).read_bytes())
    return record


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("int8") / "tiny")


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build(checkpoint, tmp_path_factory.mktemp("first") / "artifact")


def with_outlier(folder: Path) -> Path:
    """In the second layer one input channel of the last product is far larger than the others, for all tokens, but the
    others matter."""
    save_checkpoint(folder)
    tensors = read_tensors(folder)
    up, down = (f"encoder.layer.1.{part}.dense" for part in ("intermediate", "output"))
    prefix = next(name for name in tensors if name.endswith(f"{up}.bias"))[: -len(f"{up}.bias")]
    tensors[f"{prefix}{up}.bias"][5] = 4000.0
    tensors[f"{prefix}{down}.weight"] *= 4.0
    width, generator = tensors[f"{prefix}{down}.weight"].shape[0], torch.Generator().manual_seed(0)
    tensors[f"{prefix}{down}.weight"][:, 5] = 1e-6 * torch.randn(width, generator=generator)
    return write_tensors(folder, tensors)


def test_the_artifact_says_what_was_quantized_and_with_which_texts(artifact: Artifact) -> None:
    record = record_of(artifact)
    assert (record["format"], record["method"], record["texts"], record["num_texts"]) == (
        "int8",
        "mse",
        "bei's own list",
        40,
    )
    assert record["num_tokens"] > 40
    assert len(record["texts_sha256"]) == 64
    assert len(record["layers"]) == 4 * artifact.manifest.spec.num_layers
    assert all(layer["input_amax"] > 0 and 0 <= layer["error"] < 0.2 for layer in record["layers"].values())
    assert QUANTIZATION in {file.path for file in artifact.manifest.files}
    assert artifact.certificate.passed


def matrices_of(artifact: Artifact) -> list[npt.NDArray[np.int8]]:
    from openvino import Core

    model = Core().read_model(artifact.engine_dir / "model.xml")
    stored = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
    return [
        node.data
        for node in stored
        if len(node.get_output_shape(0)) == 2 and node.get_element_type().get_type_name() == "i8"
    ]


@pytest.mark.parametrize(("cpu", "largest"), [(["INT8"], 63), (["INT8", EXACT_INT8], 127)])
def test_the_engine_has_int8_matrices_whose_sums_the_cpu_computes_exactly(
    cpu: list[str], largest: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (openvino, runtime):
        monkeypatch.setattr(module, "cpu_capabilities", lambda: ["FP32", *cpu])
    artifact = build(checkpoint, tmp_path / "artifact", verify=False)  # one of them is built for another CPU
    matrices = matrices_of(artifact)
    assert len(matrices) == 4 * artifact.manifest.spec.num_layers
    assert {int(np.abs(matrix.astype(np.int32)).max()) for matrix in matrices} == {largest}
    assert artifact.manifest.engine.capabilities == cpu
    assert {layer.matrix_bits for layer in read_quantization(artifact.path).layers.values()} == {
        7 if largest == 63 else 8
    }


def test_the_same_build_gives_the_same_scales_and_digest(artifact: Artifact, checkpoint: Path, tmp_path: Path) -> None:
    again = build(checkpoint, tmp_path / "again")
    assert record_of(again) == record_of(artifact)
    assert again.manifest.digest == artifact.manifest.digest


def test_other_texts_give_other_scales(artifact: Artifact, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("the cat sat on the mat\nhello world\n")
    other = record_of(build(checkpoint, tmp_path / "other", calibration_data=str(file)))
    assert (other["texts"], other["num_texts"]) == ("mine.txt", 2)
    assert other["layers"] != record_of(artifact)["layers"]


def test_a_layer_with_an_outlier_is_left_high_and_the_artifact_says_so(tmp_path: Path) -> None:
    folder = with_outlier(tmp_path / "checkpoint")
    built = build(folder, tmp_path / "artifact", calibration_method="max", min_cosine=0.995)
    layers = record_of(built)["layers"]
    assert [name for name, layer in layers.items() if layer["is_high"]] == [OUTLIER]
    assert layers[OUTLIER]["error"] == max(layer["error"] for layer in layers.values())
    assert built.certificate.passed
    assert built.certificate.quantization is not None
    worst, *others = built.certificate.quantization.by_sensitivity
    assert (worst.layer, worst.is_high, worst.effect) == (OUTLIER, True, layers[OUTLIER]["effect"])
    assert all(layer.effect is not None and not layer.is_high for layer in others)
    kept = read_quantization(built.path)
    assert (kept.format, kept.layers.keys()) == ("int8", layers.keys() - {OUTLIER})
    assert all(kept.layers[name].input_amax == layers[name]["input_amax"] for name in kept.layers)


def calibrated_of(effects: dict[str, float] | None) -> Calibration:
    """Five layers, of which three may stay in high precision; their own errors rise in the order of falling effects."""
    layers = dict.fromkeys("abcde", LayerQuantization(1.0))
    errors = {name: 0.01 * (1 + index) for index, name in enumerate(layers)}
    chosen, texts = ChosenScales(Quantization("fp8", layers), errors), CalibrationTexts("a list", ("a text",))
    return Calibration(chosen, "max", texts, num_tokens=3, seed=0, most_high=3, effects=effects)


def test_effects_say_which_layers_are_left_high_and_how_many_that_takes() -> None:
    found = calibrated_of({"a": 8.0, "b": 4.0, "c": 2.0, "d": 1.0, "e": 1.0})
    for share, names in ((0.5, "a"), (0.25, "ab"), (0.2, "abc"), (0.01, "abc")):
        more = found.with_more_high(share)
        assert more is not None
        assert more.high == set(names)
        assert more.quantization.layers.keys() == set("abcde") - set(names)
        assert (more.with_more_high(0.5) is None) == (names == "abc")  # no more may be
        assert [layer.effect for layer in more.record.layers] == [8.0, 4.0, 2.0, 1.0, 1.0]
    assert [found.needed(share) for share in (0.5, 0.25, 0.2, 0.01)] == [1, 2, 3, 5]  # allowed or not


def test_where_no_more_may_be_left_high_a_note_says_how_many_it_would_take() -> None:
    said = io.StringIO()
    full = replace(calibrated_of({"a": 8.0, "b": 4.0, "c": 2.0, "d": 1.0, "e": 1.0}), high=frozenset("abc"))
    assert with_more_high(mock.Mock(spec=Job), full, 0.5, Progress(Console(file=said, width=200))) is None
    assert "about 4 of 5 linear layers would have to stay unquantized; 3 may (--max-highprec-layers)" in said.getvalue()


def test_layers_stay_high_for_the_aim_only_where_they_reach_it() -> None:
    found, silent = calibrated_of({"a": 8.0, "b": 4.0, "c": 2.0, "d": 1.0, "e": 1.0}), Progress(Console(quiet=True))
    job = mock.Mock(spec=Job)
    more = reaching(job, found, 0.25, silent)
    assert more is not None
    assert more.high == set("ab")
    assert reaching(job, found, 0.01, silent) is None
    assert reaching(job, calibrated_of({}), 0.25, silent) is None


def test_where_effects_are_not_known_there_are_twice_as_many_by_their_own_errors() -> None:
    found: Calibration | None = calibrated_of({})
    for names in ("e", "ed", "edc"):
        assert found is not None
        found = found.with_more_high(0.5)
        assert found is not None
        assert found.high == set(names)
    assert found is not None
    assert found.with_more_high(0.5) is None


def test_the_figure_that_is_farthest_off_says_what_may_stay() -> None:
    needed = Thresholds(mean=0.99, p1=0.9, min=0.5)
    row = agreement(cosine_mean=0.98, cosine_p1=0.6, cosine_min=0.4)
    assert allowed_share(certificate(thresholds=needed, outputs=[agreement(), row])) == pytest.approx(0.25)
    retrieval_only = certificate(thresholds=needed, outputs=[agreement()], retrieval=retrieval(failures=["lost"]))
    assert allowed_share(retrieval_only) == 0.5


def test_without_layers_left_high_it_fails(tmp_path: Path) -> None:
    folder = with_outlier(tmp_path / "checkpoint")
    with pytest.raises(VerificationError, match="embedding: mean cosine"):
        build(folder, tmp_path / "a", calibration_method="max", min_cosine=0.995, max_highprec_layers=0)
    assert not (tmp_path / "a").exists()


def test_smoothing_makes_it_unnecessary(tmp_path: Path) -> None:
    folder = with_outlier(tmp_path / "checkpoint")
    built = build(folder, tmp_path / "artifact", calibration_method="mse", min_cosine=0.995, max_highprec_layers=0)
    assert built.certificate.passed
    assert record_of(built)["layers"][OUTLIER]["smoothing"] is not None


def test_scales_that_are_off_by_two_fail_the_build(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = GraphWriter._stored

    def wrong(self: GraphWriter, name: str, array: Any, dtype: DType) -> str:
        is_it = name == "layers.1.mlp.down.weight.scale"
        return write(self, name, np.float32(2) * array if is_it else array, dtype)

    monkeypatch.setattr(GraphWriter, "_stored", wrong)
    with pytest.raises(VerificationError, match="embedding: "):
        build(checkpoint, tmp_path / "artifact", max_highprec_layers=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "bf16", "calibration_size": 9}, "calibration_size is a setting of quantized precisions"),
        ({"precision": "auto", "max_highprec_layers": 1}, "max_highprec_layers is a setting of quantized precisions"),
        ({"calibration_size": 0}, "calibration_size must be from 1 to"),
        ({"fp8_outputs": True}, "fp8_outputs is a setting of target tensorrt or tensorrt-rtx, not of cpu"),
        (
            {"fp8_outputs": True, "target": "tensorrt-rtx", "precision": "bf16"},
            "fp8_outputs is a setting of quantized precisions: leave it out, or build with --precision fp8",
        ),
        ({"calibration_percentile": 0.0}, "calibration_percentile must be above 0 and at most 100"),
        ({"max_highprec_layers": -1}, "max_highprec_layers must be from 0 to"),
        ({"calibration_method": "entropy"}, "calibration_method must be one of auto, max, percentile, mse"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BuildConfig(model="a", **{"precision": "int8", **settings})


@needs_rtx
@pytest.mark.slow
def test_what_projections_give_is_rounded_too_where_it_is_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"target": "tensorrt-rtx", "compute_capability": ("89",), "fp8_outputs": True, "verify_retrieval": False}
    record = record_of(build(checkpoint, tmp_path / "artifact", precision="fp8", **settings))
    rounded = {name for name, layer in record["layers"].items() if layer["output_amax"] is not None}
    assert rounded == {name for name in record["layers"] if name.endswith(".attention.qkv")}
    assert all(record["layers"][name]["output_amax"] > 0 for name in rounded)


def test_what_has_no_linear_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no linear layers to quantize"):
        build(save_static(tmp_path / "checkpoint"), tmp_path / "artifact")


def test_the_command_says_what_it_did(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            *("build", str(checkpoint), "--out", str(tmp_path / "artifact"), "--precision", "int8"),
            *("--calibration-method", "percentile", "--calibration-percentile", "99.9", "--calibration-size", "12"),
        ]
    )
    said = " ".join(capsys.readouterr().err.split())
    assert "Calibrate (int8, percentile)" in said
    assert "12 texts of bei's own list" in said
