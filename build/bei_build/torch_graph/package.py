"""Export of the module for any number of tokens and sequences, and its compilation into a package without weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bei.core import Encoding, PackedBatch
from bei.engine.packing import has_fixed_width
from bei.errors import CompileError
from bei_build.torch_graph.model import PackedModel, tensors_of
from bei_build.weights.safetensors_file import StoredTensor, write_safetensors

# The example for the export, of a usual step's size: Inductor tunes its kernels for it. Its dimensions are all
# different, and none is 0 or 1, which would become constants.
_EXAMPLE_LENGTHS = (2053, 1031, 1009)

# The code has neither weights nor numbers of them: a package fits every fine-tune of one graph, and is compiled in a
# process that has no weights where the GPU is elsewhere.
SETTINGS: Mapping[str, Any] = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
}

_STORED_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Types that PyTorch does not convert to numpy: bits of the same width, and numpy's type.
_BITS = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
}


def export_model(model: PackedModel) -> torch.export.ExportedProgram:
    """``model`` as a graph whose inputs may have any number of tokens, sequences and slots.

    Raises CompileError where PyTorch would fix one of them to the example's.
    """
    encodings = [Encoding(np.zeros(length, np.int32)) for length in _EXAMPLE_LENGTHS]
    inputs = tensors_of(model, PackedBatch.from_encodings(encodings))
    auto, fixed_width = torch.export.Dim.AUTO, torch.export.Dim.STATIC
    shapes = {
        name: {0: auto, 1: fixed_width} if has_fixed_width(name) else dict.fromkeys(range(tensor.ndim), auto)
        for name, tensor in inputs.items()
    }
    program = torch.export.export(model, (inputs,), dynamic_shapes=(shapes,))
    fixed = _fixed_inputs(program)
    if fixed:
        raise CompileError(f"PyTorch exported {', '.join(fixed)} with a constant size. This is a bug.")
    return program


def _fixed_inputs(program: torch.export.ExportedProgram) -> list[str]:
    """The inputs with a dimension that is a number, but for widths that are a part of their names."""
    names = set(program.graph_signature.user_inputs)
    found = []
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            shape = node.meta["val"].shape
            found += [node.name] if any(map(_is_number, shape[:1] if has_fixed_width(node.name) else shape)) else []
    return found


def _is_number(size: int | torch.SymInt) -> bool:
    """True for a symbol too that the code of a module has compared with a number."""
    return isinstance(size, int) or size.node.maybe_as_int() is not None


def write_package(program: torch.export.ExportedProgram, path: Path) -> None:
    """Compile ``program`` for its device into ``path`` (.pt2), for ``AOTIModelPackageLoader``.

    The package has the inputs of the model, and none of its weights. For a CPU it needs a C++ compiler.
    """
    _write_inputs_of_kernels_once()
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=dict(SETTINGS))


def _write_inputs_of_kernels_once() -> None:
    """Without this, Inductor computes a value, such as the embedding, anew for each Triton kernel of ours that reads
    it. The set is Inductor's own; a version without it makes packages that are slower, and right."""
    from torch._inductor import lowering

    written: set[object] = getattr(lowering, "needs_realized_inputs", set())
    written.add(torch.ops.higher_order.triton_kernel_wrapper_mutation)


def names_read(path: Path, device_index: int) -> list[str]:
    """The names of the weights that the package in ``path`` asks for; ``device_index`` -1: of a CPU.

    Of a tensor that several layers share it asks for one.
    """
    package = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, device_index)
    return list(package.get_constant_fqns())


def weights_of(program: torch.export.ExportedProgram) -> dict[str, Tensor]:
    """The tensors of ``program`` by the names that its package may ask for."""
    signature = program.graph_signature
    names = (
        *signature.inputs_to_parameters.values(),
        *signature.inputs_to_buffers.values(),
        *signature.inputs_to_lifted_tensor_constants.values(),
    )
    stored: dict[str, Any] = {**program.constants, **program.state_dict}
    return {name: stored[name] for name in dict.fromkeys(names)}


def write_weights(tensors: Mapping[str, Tensor], path: Path) -> int:
    """Write the weights of packages to ``path`` (safetensors); their bytes. One at a time is copied from the device."""
    # The widest elements first: each tensor is aligned to its elements.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    stored = [_stored(name, tensor) for name, tensor in ordered]
    write_safetensors(path, stored)
    return sum(tensor.num_bytes for tensor in stored)


def _stored(name: str, tensor: Tensor) -> StoredTensor:
    if tensor.dtype not in _STORED_TYPES or not tensor.is_contiguous():
        raise CompileError(f"Weight {name} is a tensor of {tensor.dtype} that cannot be stored. This is a bug.")

    def values() -> npt.NDArray[Any]:
        here = tensor.detach().cpu()
        if tensor.dtype not in _BITS:
            return here.numpy()
        bits, dtype = _BITS[tensor.dtype]
        return here.view(bits).numpy().view(dtype)

    return StoredTensor(name, _STORED_TYPES[tensor.dtype], tuple(tensor.shape), values)
