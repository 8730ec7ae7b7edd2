"""What the benchmark of certificates keeps of one, and the tables it makes."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from bei.artifact.certificate.record import LayerSensitivity, QuantizationRecord
from benchmarks.certificates import Clock, OutOfTimeError, Work, summary, tables
from tests.support.quality_certificates import agreement, certificate, retrieval

LAYERS = [LayerSensitivity(layer=f"layers.{i}.mlp.down", error=i / 100, is_high=i in (3, 9)) for i in range(10)]
QUANTIZATION = QuantizationRecord(
    format="fp8",
    method="max",
    calibration="Texts.",
    num_texts=2,
    num_tokens=3,
    texts_sha256="b" * 64,
    layers=LAYERS,
)
CERTIFICATE = certificate(quantization=QUANTIZATION, retrieval=retrieval(), outputs=[agreement()])


def test_a_summary_has_the_figures_and_no_texts() -> None:
    kept = json.loads(json.dumps(summary(CERTIFICATE)))
    (row,) = CERTIFICATE.outputs
    figures = {name: value for name, value in msgspec.to_builtins(row).items() if name in kept["outputs"][0]}
    assert kept["outputs"] == [figures]
    assert figures.keys() == {*msgspec.to_builtins(row)} - {"histogram", "worst_texts"}
    assert not any(text.text in json.dumps(kept) for text in row.worst_texts)
    assert kept["quantization"]["left_high"] == {"layers.9.mlp.down": 0.09, "layers.3.mlp.down": 0.03}
    assert list(kept["quantization"]["worst_others"]) == [f"layers.{i}.mlp.down" for i in (8, 7, 6, 5, 4)]


def test_the_tables_name_every_model_and_say_what_was_lost() -> None:
    results = {
        "one": {"fp8": summary(CERTIFICATE), "scifact": {"auto": 0.5, "fp8": 0.49}},
        "two": {"int8": summary(CERTIFICATE)},
    }
    said = tables(results)
    assert "| one | fp8, emulated | passed |" in said
    assert "| 2 of 10 |" in said
    assert "| one | 0.5000 | - | 0.4900 (-2.00%) |" in said
    assert sum(line.startswith("| two") for line in said.splitlines()) == 1


def test_work_of_another_schema_is_built_again_and_its_vectors_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, vectors, others = tmp_path / "minilm-int8", tmp_path / "minilm-int8-0.npy", tmp_path / "minilm-auto"
    artifact.mkdir()
    (artifact / "manifest.json").write_text('{"schema_version": 3}')
    vectors.touch()
    others.mkdir()
    built: list[str] = []
    monkeypatch.setattr("benchmarks.certificates.build", lambda config, *_: built.append(config.out))
    Work("minilm", tmp_path, Clock(None))._artifact("int8")
    assert built == [str(artifact)]
    assert not artifact.exists()
    assert not vectors.exists()
    assert others.is_dir()


def test_nothing_is_begun_after_the_time() -> None:
    Clock(None).check()
    Clock(1).check()
    with pytest.raises(OutOfTimeError):
        Clock(-1).check()
