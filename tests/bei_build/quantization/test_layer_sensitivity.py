"""Effects of rounding single layers, against graphs in which only that layer is rounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bei.core import Encoding, Float32Array, Limits, PackedBatch
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.quantization import layer_sensitivity as module
from bei_build.quantization.emulation import emulated_engine
from bei_build.quantization.layer_sensitivity import measure_effects
from bei_build.spec.quantization import Format, Quantization
from tests.bei_build.targets.test_fp8 import quantization_of
from tests.bei_build.targets.tiny import case_named, read_case
from tests.support.zoo import encodings_of

LENGTHS = [5, 33, 17, 2, 26]


def outputs_of(
    checkpoint: Checkpoint, quantization: Quantization, encodings: list[Encoding], scratch: Path
) -> dict[str, Float32Array]:
    limits = Limits(256, 16, checkpoint.max_seq_len)
    with emulated_engine(checkpoint.spec, checkpoint.weights().read, quantization, limits, scratch) as engine:
        return dict(engine.run(PackedBatch.from_encodings(encodings)))


@pytest.mark.parametrize("number_format", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["BertForSequenceClassification", "LlamaModel", "DebertaV2Model"])
def test_it_is_what_a_graph_with_that_layer_rounded_alone_changes(
    tmp_path: Path, name: str, number_format: Format
) -> None:
    case = case_named(name)
    checkpoint = read_case(case, tmp_path)
    encodings = encodings_of(case, LENGTHS, checkpoint.spec.embeddings.vocab_size)
    # Nothing is clipped: numpy clips INT8 at -127, and the graph at -128.
    quantization = quantization_of(checkpoint.spec, number_format, amax=8.0, smooth=name == "LlamaModel")
    read = checkpoint.weights().read
    found = measure_effects(checkpoint.spec, read, quantization, encodings, checkpoint.max_seq_len, tmp_path)
    assert found is not None
    assert found.keys() == quantization.layers.keys()
    exact = outputs_of(checkpoint, Quantization(number_format), encodings, tmp_path)
    for layer in list(quantization.layers)[::2]:
        alone = Quantization(number_format, {layer: quantization.layers[layer]})
        changed = outputs_of(checkpoint, alone, encodings, tmp_path)
        expected = sum(float(np.square(changed[it] - exact[it]).sum() / np.square(exact[it]).sum()) for it in exact)
        assert found[layer] == pytest.approx(
            expected, rel=0.1, abs=1e-9
        )  # a value between two numbers may go to either


def test_it_is_not_measured_where_that_would_take_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_named("BertModel")
    checkpoint = read_case(case, tmp_path)
    encodings = encodings_of(case, LENGTHS, checkpoint.spec.embeddings.vocab_size)
    quantization = quantization_of(checkpoint.spec, "fp8")
    monkeypatch.setattr(module, "_MOST_OPERATIONS", 1.0)
    read = checkpoint.weights().read
    assert measure_effects(checkpoint.spec, read, quantization, encodings, checkpoint.max_seq_len, tmp_path) is None
