"""The build of packages for a GPU that is elsewhere, up to the link, as facts in JSON. PyTorch needs no CUDA for that.

python -m tests.bei_build.targets.elsewhere PRECISION
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from safetensors import safe_open
from torch._inductor import codecache

from bei.artifact.manifest import CUDA_WEIGHTS
from bei.core import Limits
from bei_build.spec.model_spec import HeadSpec
from bei_build.spec.parts import DenseSpec, RopeSpec
from bei_build.targets import cuda, cuda_elsewhere
from bei_build.targets.base import Numerics
from bei_build.torch_graph import package
from tests.bei_build.targets.test_fp8 import quantization_of
from tests.bei_build.targets.tiny import HIDDEN, MAX_SEQ_LEN, random_weights, tiny_spec
from tests.support.fake_gpu import BeforeTheLinkError, register_guard, stop

_CONSTANT = re.compile(r'original_fqn = "([^"]+)"')


def main() -> None:
    (precision,) = sys.argv[1:]
    compile_package = package.write_package

    def write_package(program: Any, path: Path) -> None:
        try:
            compile_package(program, path)
        except BeforeTheLinkError as stopped:
            path.write_text(stopped.wrapper)

    # Two labels: PyTorch would write a bias of two numbers into the code. Both layers have the same rotations.
    head = HeadSpec("logits", ("cls",), layers=(DenseSpec("classifier", HIDDEN, 2),))
    rope = RopeSpec(tuple(np.geomspace(1.0, 1e-3, 8).tolist()))
    spec = replace(tiny_spec(rope=rope), heads=(head,))
    numerics = Numerics(precision, quantization_of(spec, "fp8") if precision == "fp8" else None)
    weights: Any = mock.Mock(read=random_weights(spec))
    compiler = cuda.CudaCompiler("cuda", precision, ("90",))
    with tempfile.TemporaryDirectory() as name, mock.patch.object(package, "write_package", write_package):
        folder = Path(name)
        register_guard(folder)
        with (
            mock.patch.object(codecache.AotCodeCompiler, "compile", stop),
            mock.patch.object(cuda, "compile_apart", cuda_elsewhere.compiled),
            mock.patch.object(cuda, "driver_stub", mock.MagicMock()),
        ):
            needs = compiler.compile(spec, weights, numerics, Limits(256, 8, MAX_SEQ_LEN), folder, lambda _: None)
        (path,) = folder.glob("*.pt2")
        with safe_open(folder / CUDA_WEIGHTS, "pt") as file:
            finite = {key: bool(torch.isfinite(file.get_tensor(key).float()).all()) for key in file.keys()}  # noqa: SIM118
        facts = {"package": path.name, "needs": msgspec.to_builtins(needs), "stored": finite}
        json.dump({**facts, "read": sorted(set(_CONSTANT.findall(path.read_text())))}, sys.stdout)


if __name__ == "__main__":
    main()
