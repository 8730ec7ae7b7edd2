"""The weights that packages for GPUs elsewhere read, against those of the models on a CPU, for every family: faults as
JSON by case.

python -m tests.bei_build.targets.elsewhere_weights
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from bei.errors import CompileError
from bei_build.spec.model_spec import ModelSpec
from bei_build.targets import cuda
from bei_build.targets.cuda_choices import choices_of
from bei_build.targets.cuda_elsewhere import Compiled
from bei_build.torch_graph.model import PackedModel
from bei_build.torch_graph.package import weights_of
from bei_build.torch_graph.parameters import TensorOptions, join_linear_layers
from bei_build.torch_graph.pretended_gpu import export_without_values, model_without_values, pretended
from tests.bei_build.targets.test_fp8 import quantization_of
from tests.bei_build.targets.tiny import MAX_SEQ_LEN
from tests.bei_build.torch_graph.generated import SPECS, spec_of
from tests.support.fake_gpu import register_guard
from tests.support.zoo import FIRST_OF_FAMILY

CAPABILITY = 90


def model_of(spec: ModelSpec, device: str, precision: str) -> PackedModel:
    quantization = quantization_of(spec, "fp8") if precision == "FP8" else None
    options = TensorOptions(torch.device(device), torch.bfloat16)
    model = PackedModel(spec, MAX_SEQ_LEN, options, quantization=quantization)
    join_linear_layers(model)
    return model


def fault_of(spec: ModelSpec, precision: str) -> str | None:
    tensors = cuda._tensors_of(model_of(spec, "cpu", precision))
    with tempfile.TemporaryDirectory() as folder, pretended(CAPABILITY, {}, Path(folder)):
        register_guard(Path(folder))
        model = model_without_values(lambda: model_of(spec, "cuda", precision))
        read = weights_of(export_without_values(model))
        weights = {name: (tuple(it.shape), str(it.dtype)) for name, it in read.items()}
        try:
            cuda._check_same(Compiled(choices_of(model), weights), tensors)
        except CompileError as error:
            return str(error)
    return None


def main() -> None:
    warnings.simplefilter("ignore")
    names = sys.argv[1:] or [*SPECS, *(case.name for case in FIRST_OF_FAMILY)]
    cases = [(name, precision) for name in names for precision in ("BF16", "FP8")]
    found = {f"{name}, {precision}": fault_of(spec_of(name), precision) for name, precision in cases}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
