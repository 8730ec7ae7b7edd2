"""The code of models for GPUs that are not there, as facts in JSON by case.

python -m tests.bei_build.torch_graph.generated CAPABILITY CASE...

A case is a structure and a precision: "BERT, FP8". Structures are those of ``SPECS``, and by name the cases
of the zoo and those of ``tests.support.other_models``.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bei_build.spec.model_spec import ModelSpec
from bei_build.torch_graph.model import PackedModel
from bei_build.torch_graph.parameters import TensorOptions, join_linear_layers
from bei_build.torch_graph.pretended_gpu import Kernel
from benchmarks.gpu.shapes import SHAPES
from tests.bei_build.targets.test_fp8 import quantization_of
from tests.bei_build.targets.tiny import MAX_SEQ_LEN, case_named, read_case
from tests.bei_build.torch_graph.test_parity_graph import SPECS as BY_STRUCTURE
from tests.support.fake_gpu import Generated, generate

# Where a kernel of Inductor's writes, and the name of the value.
_STORE = re.compile(r"tl\.store\((\w+) \+ .*?, (tmp\d+),")


def with_attention(spec: ModelSpec, **changes: Any) -> ModelSpec:
    layers = (layer.with_attention(**changes) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


SPECS: dict[str, Callable[[], ModelSpec]] = {
    "BERT": lambda: SHAPES["bert-large"].shrunk().spec,
    "Mistral": lambda: SHAPES["mistral-7b"].shrunk().spec,
    "Mistral with a soft cap": lambda: with_attention(SHAPES["mistral-7b"].shrunk().spec, softcap=30.0),
    **{name: lambda name=name: BY_STRUCTURE[name] for name in BY_STRUCTURE},  # type: ignore[misc]
}


def spec_of(name: str) -> ModelSpec:
    if name in SPECS:
        return SPECS[name]()
    from tests.support.other_models import OTHERS  # it imports much, and few cases are there

    with tempfile.TemporaryDirectory() as folder:
        if name in OTHERS:
            return OTHERS[name].read(Path(folder)).spec
        return read_case(case_named(name), Path(folder)).spec


def code_of(case: str, capability: int) -> Generated:
    name, _, precision = case.rpartition(", ")
    spec, cuda = spec_of(name), torch.device("cuda")
    quantization = quantization_of(spec, "fp8") if precision == "FP8" else None

    def made() -> PackedModel:
        options = TensorOptions(cuda, torch.bfloat16)
        model = PackedModel(spec, MAX_SEQ_LEN, options, quantization=quantization)
        join_linear_layers(model)
        return model

    return generate(made, capability)


def facts_of(generated: Generated) -> dict[str, Any]:
    return {
        "launches": dict(generated.launches),
        "kernels": {name: _facts_of_kernel(kernel) for name, kernel in generated.kernels.items()},
    }


def _facts_of_kernel(kernel: Kernel) -> dict[str, Any]:
    lines = kernel.ptx.splitlines()
    return {
        "signature": dict(kernel.signature),
        "target": next(line for line in lines if line.startswith(".target")),
        "fp64": sum(".f64" in line for line in lines),
        "cubin": len(kernel.cubin),
        "stored": dict(_STORE.findall(kernel.source)),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    capability, *cases = sys.argv[1:]
    found = {}
    for case in cases:
        print(case, file=sys.stderr)  # noqa: T201 - which case it was, if a compiler ends the process
        found[case] = facts_of(code_of(case, int(capability)))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
