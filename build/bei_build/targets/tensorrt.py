"""Target ``tensorrt``: packed ONNX graph to a TensorRT plan, strongly typed in one float type.

What compiles takes the module as an argument: ``tensorrt``, or in tests ``tensorrt_rtx_bindings``, which has the same
parser and type rules and compiles without a GPU. That is all that has run so far: no plan of TensorRT itself has been
built, and none can be served yet, so ``check_able`` refuses until there is an engine to verify a plan with.
"""

from __future__ import annotations

import importlib
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from bei.artifact import EngineRequirements
from bei.core import Limits
from bei.errors import BeiError, CompileError, ConfigError, MissingDependencyError
from bei_build.graph.attention import AttentionCore, is_primitive
from bei_build.graph.transformer import write_graph
from bei_build.graph.writer import DType, GraphTypes
from bei_build.model_weights import ModelWeights
from bei_build.spec import ModelSpec
from bei_build.targets import Say

PLAN_FILE = "model.plan"

_TYPES = {"bf16": DType.BF16, "fp16": DType.FP16, "fp32": DType.FP32}
_VERSIONS = ">=11.1,<12"  # 11.1 moved the lengths of TRT_Attention to inputs 4 and 5, where our graph has them

_LATENCY_TOKENS, _LATENCY_SEQUENCES = 512, 8
_MAX_SLOTS = 1 << 18  # of the padded view by default: TensorRT reserves B x S of them, whatever a batch holds
_KV_LENGTHS = 6  # input of an attention layer: Q, K, V, mask, quantization scale, query lengths, key/value lengths
_ERRORS = ("ERROR", "INTERNAL_ERROR")
_UNUSED = re.compile(r"Unused Input|is unused")

Profile: TypeAlias = dict[str, tuple[int, int, int]]  # dimension name -> min, opt, max


class TensorRTCompiler:
    """Compiles for NVIDIA GPUs with TensorRT. Its graphs are tested; ``compile`` has not met TensorRT itself yet."""

    precisions = tuple(_TYPES)
    longest_by_default = 8192  # the padded view is reserved for the longest sequence

    def resolve_precision(self, precision: str) -> str:
        """``auto`` is bf16: it cannot overflow as fp16 can, and GPUs since Ampere compute in it as fast."""
        if precision == "auto":
            return "bf16"
        if precision not in _TYPES:
            raise ConfigError(f"Target tensorrt has no precision {precision!r}. Precisions: auto, {', '.join(_TYPES)}.")
        return precision

    def default_limits(self, max_seq_len: int) -> Limits:
        """Large batches, which a GPU needs to be busy; fewer long sequences, for the padded view. Not measured yet."""
        return Limits(
            max_num_tokens=max(16384, max_seq_len),
            max_batch_size=min(256, max(_LATENCY_SEQUENCES, _MAX_SLOTS // max_seq_len)),
            max_seq_len=max_seq_len,
        )

    def check_able(self) -> None:
        """Always raises CompileError: nothing here can verify or serve a plan yet. Says what is possible today."""
        try:
            state = f"installed: {load_tensorrt().__version__}"
        except MissingDependencyError:
            state = "not installed here"
        except BeiError as error:
            state = str(error).rstrip(".")
        raise CompileError(
            "Target tensorrt cannot be built yet: this version of bei has no TensorRT engine to verify and serve a "
            f"plan with; that comes later. It will need an NVIDIA GPU and tensorrt{_VERSIONS} ({state}). Today its "
            "graphs can be compile-checked, without a GPU: pip install 'bei[trt-ci]', then pytest "
            "tests/bei_build/targets. To serve the model now, build with --target cpu."
        )

    def cannot_run(self) -> str | None:
        """No engine can run a plan yet."""
        return "there is no engine for it yet"

    def machine(self) -> list[str]:
        """The library and the GPU."""
        return [load_tensorrt().__version__, *current_gpu()]

    def compile(
        self, spec: ModelSpec, weights: ModelWeights, precision: str, limits: Limits, folder: Path, say: Say
    ) -> EngineRequirements:
        """Write ``model.plan`` into ``folder``, for the GPU of this machine. Raises CompileError.

        Tested with TensorRT-RTX in the place of TensorRT; ``check_able`` keeps builds from coming here.
        """
        trt = load_tensorrt()
        device, capability = current_gpu()
        types = GraphTypes(compute=_TYPES[precision], storage=_TYPES[precision])
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            path = write_graph(
                spec, weights.read, Path(scratch), types, AttentionCore.TRT_ATTENTION, limits.max_seq_len
            )
            plan = plan_from_onnx(trt, path, limits, num_attentions(spec))
        (folder / PLAN_FILE).write_bytes(plan)
        return EngineRequirements(
            compiler="tensorrt", compiler_version=trt.__version__, device=device, capabilities=[capability]
        )


def load_tensorrt() -> Any:
    """The module ``tensorrt``. Raises MissingDependencyError, CompileError if it is of a version we do not know."""
    try:
        import tensorrt
    except ImportError as error:
        raise MissingDependencyError("tensorrt", "tensorrt", "Building for the target tensorrt") from error
    version = tuple(int(part) for part in tensorrt.__version__.split(".")[:2])
    if not (11, 1) <= version < (12, 0):
        raise CompileError(
            f"TensorRT {tensorrt.__version__} is installed, bei needs {_VERSIONS}: pip install 'bei[tensorrt]'."
        )
    return tensorrt


def current_gpu() -> tuple[str, str]:
    """Name and compute capability of CUDA's first device (``NVIDIA H200``, ``SM90``): the one TensorRT builds for.

    Raises MissingDependencyError, CompileError where CUDA has no device.
    """
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise MissingDependencyError("cuda-python", "tensorrt", "Building for the target tensorrt") from error
    status, properties = runtime.cudaGetDeviceProperties(0)
    if properties is None:
        raise CompileError(f"CUDA has no GPU here ({status.name}): a plan can only be built on the GPU it is for.")
    return properties.name.decode(), f"SM{properties.major}{properties.minor}"


def num_attentions(spec: ModelSpec) -> int:
    """How many layers of ``spec`` use TensorRT's attention op; the others are written out."""
    return sum(not is_primitive(attention) for attention in spec.attentions)


def plan_from_onnx(trt: Any, path: Path, limits: Limits, num_layers: int) -> bytes:
    """Compile the graph at ``path``, which has ``num_layers`` attention ops, with the two ``profiles`` of ``limits``.

    The workspace stays at TensorRT's default, all the device has. Raises CompileError that quotes TensorRT's log, also
    where TensorRT would have given a plan: after an error in its log, for an input that nothing reads, and for an
    attention that was not given its lengths, because the parser drops what it does not know without a word.
    """
    logger = _logger(trt.ILogger)
    log: list[tuple[str, str]] = logger.lines
    log.clear()
    try:
        builder = trt.Builder(logger)
    except TypeError as error:  # the bindings' word for no builder
        raise _refusal("has no builder here (it needs an NVIDIA GPU and its driver)", _serious(log)) from error
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        raise _refusal("refused the graph", _parser_errors(parser) or _serious(log))
    _check_network(trt, network, num_layers)
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # else pooling, tail and fp32 graphs would be computed with 10 bits
    for profile in profiles(limits):
        _add_profile(builder, network, config, profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None or _serious(log):
        raise _refusal("did not compile the graph", _serious(log))
    return bytes(plan)


def profiles(limits: Limits) -> tuple[Profile, Profile]:
    """Sizes of T, B and S: profile 0 for single queries, profile 1 for full batches up to ``limits``."""
    num_tokens, batch_size, seq_len = (
        _with_filler(size) for size in (limits.max_num_tokens, limits.max_batch_size, limits.max_seq_len)
    )
    query_tokens, query_len = min(num_tokens, _LATENCY_TOKENS), min(seq_len, _LATENCY_TOKENS)
    latency = {
        "T": (1, min(query_tokens, 64), query_tokens),
        "B": (1, 1, min(batch_size, _LATENCY_SEQUENCES)),
        "S": (1, min(query_len, 64), query_len),
    }
    usual_len = min(seq_len, 128)
    throughput = {
        "T": (1, num_tokens, num_tokens),
        "B": (1, min(batch_size, max(1, num_tokens // usual_len)), batch_size),
        "S": (1, usual_len, seq_len),
    }
    return latency, throughput


def _with_filler(size: int) -> int:
    """No less than what ``bei.packing`` makes of ``size``: the next multiple of 8, or at most 1/16 more."""
    return size + max(7, size // 16)


def _add_profile(builder: Any, network: Any, config: Any, ranges: Profile) -> None:
    profile = builder.create_optimization_profile()
    for tensor in _inputs(network):
        names = [tensor.get_dimension_name(axis) for axis in range(len(tensor.shape))]
        lowest, usual, highest = zip(*(ranges[name] for name in names), strict=True)
        profile.set_shape(tensor.name, lowest, usual, highest)
    if config.add_optimization_profile(profile) < 0:
        raise CompileError(f"TensorRT refused the profile {ranges}. This is a bug.")


def _check_network(trt: Any, network: Any, num_layers: int) -> None:
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    attentions = [layer for layer in layers if layer.type == trt.LayerType.ATTENTION_INPUT]
    if len(attentions) != num_layers:
        raise CompileError(f"TensorRT made {len(attentions)} attention layers of {num_layers}. This is a bug.")
    for layer in attentions:
        if layer.num_inputs <= _KV_LENGTHS or layer.get_input(_KV_LENGTHS) is None:
            raise CompileError(
                f"TensorRT did not give {layer.name} its key/value lengths: it would attend to padding. This is a bug."
            )
    tensors = [layer.get_input(index) for layer in layers for index in range(layer.num_inputs)]
    read = {tensor.name for tensor in tensors if tensor is not None}
    unused = [tensor.name for tensor in _inputs(network) if tensor.name not in read]
    if unused:
        raise CompileError(f"Nothing in TensorRT's network reads the input {', '.join(unused)}. This is a bug.")


def _inputs(network: Any) -> list[Any]:
    return [network.get_input(index) for index in range(network.num_inputs)]


@cache
def _logger(base: Any) -> Any:
    """The process's one logger for TensorRT's class ``base``; its ``lines`` are pairs of severity and message.

    One, because TensorRT keeps the first logger it is given for as long as anything of it lives, and says that it
    ignores others. Verbose lines are left out: a model of two layers makes 700 of them.
    """

    class Recorder(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self.lines: list[tuple[str, str]] = []

        def log(self, severity: Any, message: str) -> None:
            if severity.name != "VERBOSE":
                self.lines.append((severity.name, message))

    return Recorder()


def _serious(log: list[tuple[str, str]]) -> list[str]:
    return [text for severity, text in log if severity in _ERRORS or (severity == "WARNING" and _UNUSED.search(text))]


def _parser_errors(parser: Any) -> list[str]:
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    return [f"{error.node_name()} ({error.node_operator()}): {error.desc()}" for error in errors]


def _refusal(what: str, texts: list[str]) -> CompileError:
    """One line, whatever the log's line breaks."""
    quoted = [" ".join(text.split()) for text in texts]
    return CompileError(f"TensorRT {what}: {'; '.join(quoted) or 'it gave no reason'}")
