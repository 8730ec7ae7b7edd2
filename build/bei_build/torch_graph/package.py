"""Export of the module for any number of tokens and sequences, and its compilation into a package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from bei.core import Encoding, PackedBatch
from bei.errors import CompileError
from bei_build.torch_graph.model import PackedModel, tensors_of

# The example for the export, of a usual step's size: Inductor tunes its kernels for it. Its dimensions are all
# different, and none is 0 or 1, which would become constants.
_EXAMPLE_LENGTHS = (2053, 1031, 1009)


def export_model(model: PackedModel) -> torch.export.ExportedProgram:
    """``model`` as a graph whose inputs may have any number of tokens, sequences and slots.

    Raises CompileError where PyTorch would fix one of them to the example's.
    """
    encodings = [Encoding(np.zeros(length, np.int32)) for length in _EXAMPLE_LENGTHS]
    inputs = tensors_of(model, PackedBatch.from_encodings(encodings))
    auto = torch.export.Dim.AUTO
    shapes = {name: dict.fromkeys(range(tensor.ndim), auto) for name, tensor in inputs.items()}
    program = torch.export.export(model, (inputs,), dynamic_shapes=(shapes,))
    fixed = _fixed_inputs(program)
    if fixed:
        raise CompileError(f"PyTorch exported {', '.join(fixed)} with a constant size. This is a bug.")
    return program


def _fixed_inputs(program: torch.export.ExportedProgram) -> list[str]:
    """The inputs with a dimension that is a number."""
    names = set(program.graph_signature.user_inputs)
    nodes = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    return [node.name for node in nodes if any(isinstance(size, int) for size in node.meta["val"].shape)]


def write_package(model: PackedModel, path: Path) -> None:
    """Compile ``model`` for its device into ``path`` (.pt2), for ``torch._inductor.aoti_load_package``.

    The package has the inputs of ``model``. For a CPU it needs a C++ compiler.
    """
    _write_inputs_of_kernels_once()
    torch._inductor.aoti_compile_and_package(export_model(model), package_path=str(path))


def _write_inputs_of_kernels_once() -> None:
    """Without this, Inductor computes a value, such as the embedding, anew for each Triton kernel of ours that reads
    it. The set is Inductor's own; a version without it makes packages that are slower, and right."""
    from torch._inductor import lowering

    written: set[object] = getattr(lowering, "needs_realized_inputs", set())
    written.add(torch.ops.higher_order.triton_kernel_wrapper_mutation)
