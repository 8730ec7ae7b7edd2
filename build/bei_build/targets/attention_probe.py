"""Probe for TensorRT's fused attention kernels: builds one attention layer that must not be decomposed.

``decomposable`` is off, so the build fails where the library has no fused kernel for the layer, and its log says so.
The module (``tensorrt``, ``tensorrt_rtx``) is an argument. A layer has four heads and takes one or two sequences of up
to 8,192 tokens; its inputs are those in the graph of a model. The result shows that a kernel exists, not its speed.

``probe_layers`` builds in a separate process (``python -m bei_build.targets.attention_probe TARGET``): the library
writes to stdout by itself, and a crash of it must not end the caller.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from bei.engine.nvidia import load_library
from bei.engine.tensorrt_logger import ERRORS, process_logger
from bei.errors import BeiError
from bei.utils.module_command import module_command
from bei_build.onnx_graph.attention import HEAD_DIM_STEP

FORMS = ("padded", "causal", "masked", "packed")
PRECISIONS = ("bf16", "fp16", "fp8")

_NUM_HEADS = 4
_SEQUENCES = (1, 1, 2)  # minimum, usual, maximum
_TOKENS = (1, 128, 8192)  # per sequence
_SECONDS_OF_A_LAYER = 120.0
_REASON_LENGTH = 300

# Messages in the library's log for the answer no; any other error leaves the question open.
_NO = {
    re.compile(r"no fused|not supported by a dedicated kernel"): "the library has no fused kernel for it",
    re.compile(r"HW-specific datatypes"): "the GPU does not compute in this type",
}


@dataclass(frozen=True)
class ProbedLayer:
    """One attention layer. ``capability``: 89 for a GPU of compute capability 8.9; None is this machine's GPU."""

    capability: int | None
    precision: str
    form: str
    head_size: int


@dataclass(frozen=True)
class ProbeResult:
    """The result for a layer. ``fused`` is no where the library reports that it has no kernel, unknown where the build
    failed otherwise.

    ``reason`` is empty for yes.
    """

    layer: ProbedLayer
    fused: Literal["yes", "no", "unknown"]
    reason: str = ""
    seconds: float = 0.0


_layers_decoder = msgspec.json.Decoder(list[ProbedLayer])
_result_decoder = msgspec.json.Decoder(ProbeResult)


def probe(trt: Any, layer: ProbedLayer) -> ProbeResult:
    """Build ``layer`` with the library ``trt``. Any exception of the library becomes an answer."""
    started = time.perf_counter()
    try:
        fused, reason = _build(trt, layer)
    except Exception as error:  # TypeError for no builder, RuntimeError, AttributeError of an older version, ...
        fused, reason = "unknown", f"{type(error).__name__}: {error}"
    return ProbeResult(layer, fused, _one_line(reason), round(time.perf_counter() - started, 3))


def _build(trt: Any, layer: ProbedLayer) -> tuple[Literal["yes", "no", "unknown"], str]:
    logger = process_logger(trt.ILogger)
    with logger.recording() as lines:
        try:
            plan = _plan(trt, logger, layer)
        except _CannotError as error:
            return "unknown" if error.is_open else "no", str(error)
    errors = [text for severity, text in lines if severity in ERRORS]
    if plan is not None and not errors:
        return "yes", ""
    reasons = [reason for words, reason in _NO.items() if any(words.search(line) for line in errors)]
    if plan is None and reasons:
        return "no", reasons[0]
    return "unknown", "; ".join(errors) or "the library gave no plan and no reason"


class _CannotError(Exception):
    """The build cannot begin; ``is_open``: the question stays open."""

    def __init__(self, reason: str, *, is_open: bool) -> None:
        super().__init__(reason)
        self.is_open = is_open


def _plan(trt: Any, logger: Any, layer: ProbedLayer) -> Any:
    """The plan that the library builds for ``layer``; None where it builds none."""
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    config = builder.create_builder_config()
    if layer.capability is not None:
        capability = getattr(trt.ComputeCapability, f"SM{layer.capability}", None)
        if capability is None:
            raise _CannotError(f"the library builds nothing for SM{layer.capability}", is_open=False)
        config.num_compute_capabilities = 1
        config.set_compute_capability(capability, 0)
    profile = builder.create_optimization_profile()
    constants = _add_layer(trt, network, profile, layer)
    if config.add_optimization_profile(profile) < 0:
        raise _CannotError("the library refused the profile", is_open=True)
    plan = builder.build_serialized_network(network, config)
    del constants  # they had to live until here
    return plan


def _add_layer(trt: Any, network: Any, profile: Any, layer: ProbedLayer) -> list[Any]:
    """Add the layer's inputs and attention. Returns arrays that TensorRT reads during the build without copying
    them."""
    is_packed, inputs = layer.form == "packed", _Inputs(trt, network, profile)
    dtype = trt.bfloat16 if layer.precision == "bf16" else trt.float16
    width = math.ceil(layer.head_size / HEAD_DIM_STEP) * HEAD_DIM_STEP
    shape: tuple[str | int, ...] = ("T", _NUM_HEADS, width) if is_packed else ("B", _NUM_HEADS, "S", width)
    tensors, constants = [inputs.add(name, dtype, *shape) for name in "qkv"], []
    if layer.precision == "fp8":
        constants = [np.array(0.1, np.float16)]
        scale = network.add_constant((), trt.Weights(constants[0])).get_output(0)
        quantized = [network.add_quantize(tensor, scale, trt.fp8).get_output(0) for tensor in tensors]
        tensors = [network.add_dequantize(tensor, scale, dtype).get_output(0) for tensor in quantized]
    causal = trt.CausalMaskKind.UPPER_LEFT if layer.form == "causal" else trt.CausalMaskKind.NONE
    attention = network.add_attention_v2(*tensors, trt.AttentionNormalizationOp.SOFTMAX, causal)
    attention.decomposable, attention.name = False, "attention"
    if layer.precision == "fp8":
        attention.normalization_quantize_to_type = trt.fp8
        attention.normalization_quantize_scale = scale
    if is_packed:
        attention.query_form = attention.key_value_form = trt.AttentionIOForm.PACKED_NHD
        attention.query_lengths = inputs.add("cu_q", trt.int32, "B+1")  # TensorRT crashed on one tensor for both
        attention.key_value_lengths = inputs.add("cu_kv", trt.int32, "B+1")
    else:
        attention.key_value_lengths = inputs.add("lens", trt.int32, "B")
    if layer.form == "masked":
        attention.mask = inputs.add("mask", trt.bool, "B", 1, "S", "S")
    if attention.decomposable:
        raise RuntimeError("the layer stays decomposable: what is built says nothing about a fused kernel")
    network.mark_output(attention.get_output(0))
    return constants


class _Inputs:
    """Adds inputs whose dimensions have names and ranges."""

    def __init__(self, trt: Any, network: Any, profile: Any) -> None:
        self._network, self._profile = network, profile
        tokens = tuple(most * sequences for most, sequences in zip(_TOKENS, _SEQUENCES, strict=True))
        self._ranges = {"B": _SEQUENCES, "S": _TOKENS, "T": tokens, "B+1": tuple(size + 1 for size in _SEQUENCES)}

    def add(self, name: str, dtype: Any, *sizes: str | int) -> Any:
        tensor = self._network.add_input(name, dtype, tuple(-1 if isinstance(size, str) else size for size in sizes))
        for axis, size in enumerate(sizes):
            if isinstance(size, str):
                tensor.set_dimension_name(axis, size)
        ranges = [self._ranges[size] if isinstance(size, str) else (size,) * 3 for size in sizes]
        self._profile.set_shape(name, *zip(*ranges, strict=True))
        return tensor


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _REASON_LENGTH else line[: _REASON_LENGTH - 3] + "..."


def probe_layers(
    target: str, layers: Sequence[ProbedLayer], seconds: float = _SECONDS_OF_A_LAYER
) -> Iterator[ProbeResult]:
    """An answer for each of ``layers``, in order, from the library of ``target`` in another process.

    A layer at which that process dies, or that takes longer than ``seconds``, is unknown, and a new process continues
    after it. If two processes in a row answer nothing at all, the rest is unknown too.
    """
    left, failures = list(layers), 0
    while left and failures < 2:
        worker, num_before = _Worker(target, left), len(left)
        try:
            while left and (answer := worker.next_answer(seconds)) is not None:
                left.pop(0)
                yield answer
            if left:
                failures += len(left) == num_before
                yield ProbeResult(left.pop(0), "unknown", worker.end())
        finally:
            worker.end()
    for layer in left:
        yield ProbeResult(layer, "unknown", "not tried: the library's process ended twice without any answer")


class _Worker:
    """A process that answers ``layers`` in order, one line of JSON each."""

    def __init__(self, target: str, layers: Sequence[ProbedLayer]) -> None:
        self._process = subprocess.Popen(
            module_command(__name__, target),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._stderr = b""
        self._overdue = ""
        content = msgspec.json.encode(list(layers))
        self._threads = [
            threading.Thread(target=self._write, args=(content,), daemon=True),
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._listen, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def next_answer(self, seconds: float) -> ProbeResult | None:
        """The next answer; None where the process ended, or did not answer in time."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self._overdue = f"the library gave no answer in {seconds:g} s"
            return None
        if not line:
            self._process.wait()
            return None
        return _result_decoder.decode(line)

    def end(self) -> str:
        """End the process if it still runs; returns the cause of its end."""
        if self._process.poll() is None:
            self._process.kill()
        code = self._process.wait()
        for thread in self._threads:
            thread.join()
        words = _one_line(self._stderr.decode(errors="replace").strip().rpartition("\n")[2])
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return self._overdue or f"the library's process ended with {how}{': ' + words if words else ''}"

    def _write(self, content: bytes) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:  # it died before it read them
            pipe.write(content)

    def _read(self) -> None:
        assert self._process.stdout
        with self._process.stdout as pipe:
            for line in pipe:
                self._lines.put(line)
        self._lines.put(b"")

    def _listen(self) -> None:
        assert self._process.stderr
        with self._process.stderr as pipe:
            self._stderr = pipe.read()


def main() -> None:
    """Read layers as JSON on stdin; write one answer per line on stdout, which is redirected for the library."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    layers = _layers_decoder.decode(sys.stdin.buffer.read())
    try:
        trt = load_library(sys.argv[1], "Building an attention layer")
    except BeiError as error:
        sys.exit(str(error))
    for layer in layers:
        answers.write(msgspec.json.encode(probe(trt, layer)) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
