"""The summary that the benchmark of certificates keeps."""

from __future__ import annotations

import json

import msgspec

from bei.artifact.certificate.record import LayerSensitivity
from benchmarks.certificates import summary
from tests.support.quality_certificates import agreement, certificate, quantization, retrieval

LAYERS = [LayerSensitivity(layer=f"layers.{i}.mlp.down", error=i / 100, is_high=i in (3, 9)) for i in range(10)]
CERTIFICATE = certificate(quantization=quantization(layers=LAYERS), retrieval=retrieval(), outputs=[agreement()])


def test_a_summary_has_the_figures_and_no_texts() -> None:
    kept = json.loads(json.dumps(summary(CERTIFICATE)))
    (row,) = CERTIFICATE.outputs
    figures = {name: value for name, value in msgspec.to_builtins(row).items() if name in kept["outputs"][0]}
    assert kept["outputs"] == [figures]
    assert figures.keys() == {*msgspec.to_builtins(row)} - {"histogram", "worst_texts"}
    assert not any(text.text in json.dumps(kept) for text in row.worst_texts)
    assert kept["quantization"]["left_high"] == {"layers.9.mlp.down": 0.09, "layers.3.mlp.down": 0.03}
    assert list(kept["quantization"]["worst_others"]) == [f"layers.{i}.mlp.down" for i in (8, 7, 6, 5, 4)]
