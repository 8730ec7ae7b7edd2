"""Packages for GPUs that this machine does not have: a process compiles the one for each compute capability, without
weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from bei.errors import CompileError
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.quantization import Quantization
from bei_build.targets.cuda_choices import Choices, choices_of
from bei_build.targets.cuda_toolkit import extensions

MOST_OF_REASON = 600  # characters of messages from PyTorch's compilers


@dataclass(frozen=True)
class Wanted:
    """The package in ``path``. ``one_scale``: of each matrix in FP8 by its layer's path, whether it has one scale."""

    spec: ModelSpec
    max_seq_len: int
    dtype: str
    quantization: Quantization | None
    one_scale: Mapping[str, bool]
    capability: int
    path: Path


@dataclass(frozen=True)
class Compiled:
    """A package's choices, and the shape and type of each weight that it reads."""

    choices: Choices
    weights: Mapping[str, tuple[tuple[int, ...], str]]


def compile_apart(wanted: Wanted) -> Compiled:
    """Compile in a process of its own. Raises CompileError."""
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        try:
            return processes.submit(compiled, wanted).result()
        except BrokenProcessPool as error:  # LLVM ends the process over code that it does not know
            raise CompileError(
                f"The process that compiled for compute capability {wanted.capability / 10} has died: memory was "
                "short, or a compiler failed (its words are above)."
            ) from error


def compiled(wanted: Wanted) -> Compiled:
    """Compile in this process, which has compiled for no other GPU. Raises CompileError."""
    import torch

    from bei_build.torch_graph.model import PackedModel
    from bei_build.torch_graph.package import weights_of, write_package
    from bei_build.torch_graph.parameters import TensorOptions, join_linear_layers
    from bei_build.torch_graph.pretended_gpu import export_without_values, model_without_values, pretended

    def made() -> PackedModel:
        options = TensorOptions(torch.device("cuda", 0), getattr(torch, wanted.dtype))
        model = PackedModel(wanted.spec, wanted.max_seq_len, options, quantization=wanted.quantization)
        join_linear_layers(model)
        return model

    extensions()  # before the compiler imports it
    warnings.simplefilter("ignore")  # PyTorch's compiler uses deprecated parts of PyTorch
    try:
        with TemporaryDirectory(dir=wanted.path.parent) as folder, pretended(wanted.capability, {}, Path(folder)):
            model = model_without_values(made, wanted.one_scale)
            program = export_without_values(model)
            weights = {name: (tuple(it.shape), str(it.dtype)) for name, it in weights_of(program).items()}
            with _names_read() as names:
                write_package(program, wanted.path)
            if unknown := sorted(names.difference(weights)):
                raise CompileError(f"The package reads {unknown[0]}, which is no weight of the model. This is a bug.")
            return Compiled(choices_of(model), {name: weights[name] for name in sorted(names)})
    except CompileError:
        raise
    except Exception as error:  # of the compiler's parts, which another process may not know
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CompileError(
            f"PyTorch {torch.__version__} could not compile the model for compute capability "
            f"{wanted.capability / 10}: {reason[:MOST_OF_REASON]}"
        ) from None


@contextmanager
def _names_read() -> Iterator[set[str]]:
    """The names of the constants that a package asks for that is compiled within: it cannot be loaded here."""
    from torch._inductor.codecache import AotCodeCompiler

    compile_code = AotCodeCompiler.compile
    names: set[str] = set()

    def compile_noted(graph: Any, *arguments: Any, **options: Any) -> Any:
        known = graph.dynamo_flat_name_to_original_fqn
        names.update(known.get(name) or graph.allocated_constant_name[name] for name in graph.constants)
        return compile_code(graph, *arguments, **options)

    with mock.patch.object(AotCodeCompiler, "compile", compile_noted):
        yield names
