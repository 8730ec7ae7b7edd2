"""``bei inspect --certificate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bei.artifact import store
from bei.artifact.certificate.record import LayerSensitivity, Thresholds
from bei.artifact.manifest import CERTIFICATE, Artifact, OutputInfo
from bei.cli.certificate import as_json, as_tables
from bei.cli.main import main
from bei.engine.fake import DIMENSION
from tests.support.artifacts import save_artifact
from tests.support.quality_certificates import agreement, certificate, quantization, retrieval

QUANTIZATION = quantization(
    layers=[
        LayerSensitivity(layer="layers.0.mlp.up", error=0.01, is_high=False),
        LayerSensitivity(layer="layers.1.mlp.up", error=0.2, is_high=True),
    ],
)


def shown(folder: Path, **fields: Any) -> tuple[Artifact, str]:
    outputs = [
        OutputInfo(name="embedding", dimension=DIMENSION),
        OutputInfo(name="token_embedding", dimension=DIMENSION, per_token=True),
    ]
    artifact = save_artifact(folder / "artifact", outputs=outputs)
    artifact = store.recertify(artifact, certificate(**fields))
    return artifact, as_tables(artifact)


def test_the_whole_certificate_is_shown(tmp_path: Path) -> None:
    failed = agreement(output="token_embedding", failures=["mean cosine 0.9 below 0.995"], kendall_tau=0.75)
    asked = Thresholds(mean=0.995, p1=0.95, min=0.75, ndcg_loss=0.005)
    _, text = shown(
        tmp_path,
        outputs=[agreement(), failed],
        passed=False,
        retrieval=retrieval(),
        thresholds=asked,
        quantization=QUANTIZATION,
    )
    for said in (
        "BELOW THRESHOLD on 101 texts",
        "token_embedding: mean cosine 0.9 below 0.995",
        "transformers 5.0, FP32 (independent of bei)",
        "101 of 101, sha256 " + "a" * 64,
        "mean 0.995, p1 0.95, min 0.75",
        "0.5% of the reference's nDCG@10",
        "0.80987, the reference's 0.81234",
        "fp8, max",
        "20 texts, 1,234 tokens",
        "1 of 2 layers",
        "mean 0.999123, p1 0.991000, min 0.981234",
        "0.750000",
        "0.981234 '<script>alert(\\'worst\\')</script> & \"quoted\"'",
        "not quantized",
    ):
        assert "".join(said.split()) in "".join(text.split()), said  # long ones go on in the next line
    bars = [line.split() for line in text.splitlines() if "###" in line]
    assert ["0.999700", "40", "#" * 40] in bars
    assert bars.index(["0.999900", "10", "#" * 10]) < bars.index(["0.999700", "40", "#" * 40])
    names = [line.split()[0] for line in text.splitlines() if line.strip().startswith("layers.")]
    assert names == ["layers.1.mlp.up", "layers.0.mlp.up"]


def test_layers_are_ordered_by_their_effects_where_these_were_measured(tmp_path: Path) -> None:
    effects = (0.02, 0.00034)
    layers = [
        msgspec.structs.replace(layer, effect=effect)
        for layer, effect in zip(QUANTIZATION.layers, effects, strict=True)
    ]
    _, text = shown(tmp_path, quantization=msgspec.structs.replace(QUANTIZATION, layers=layers))
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("layers.")]
    assert [row[:2] for row in rows] == [["layers.0.mlp.up", "2.0e-02"], ["layers.1.mlp.up", "3.4e-04"]]
    assert "effect on the outputs" in text


def test_there_are_no_escape_sequences_and_no_trailing_blanks(tmp_path: Path) -> None:
    _, text = shown(tmp_path, device="\x1b[31mred\x07", reference="[b]bold[/b]")
    assert "\x1b" not in text
    assert "[b]bold[/b]" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_json_is_the_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact, text = shown(tmp_path)
    assert json.loads(as_json(artifact)) == json.loads((artifact.path / CERTIFICATE).read_text())
    main(["inspect", "--certificate", "--json", str(artifact.path)])
    assert capsys.readouterr().out.rstrip("\n") == as_json(artifact)
    main(["inspect", "--certificate", str(artifact.path)])
    assert capsys.readouterr().out.rstrip("\n") == text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "none", "outputs": [], "passed": False, "thresholds": None}, "NOT VERIFIED"),
        ({"kind": "pending", "outputs": [], "passed": False, "device": ""}, "nothing yet"),
        ({"thresholds": Thresholds(mean=0.9, p1=0.5, min=0.1, ndcg_loss=0.005)}, "not measured: the time"),
        ({"retrieval": msgspec.structs.replace(retrieval(), is_judged=False)}, "not judged"),
    ],
    ids=["none", "pending", "left out", "not judged"],
)
def test_what_was_not_compared_is_named(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    assert said in " ".join(shown(tmp_path, **fields)[1].split())
