"""ONNX file to TensorRT's network, with checks for what the parser drops silently."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bei.errors import CompileError
from bei_build.onnx_graph.attention import Lowering
from bei_build.targets.tensorrt.log_messages import compile_error, serious_messages

if TYPE_CHECKING:
    from tensorrt_module import TensorRTModule

# Inputs of an attention layer: Q, K, V, mask, quantization scale, query lengths, key/value lengths.
_MASK, _QUERY_LENGTHS, _KEY_LENGTHS = 3, 5, 6


def parse(
    trt: TensorRTModule, builder: TensorRTModule.Builder, logger: Any, path: Path, lowerings: Sequence[Lowering]
) -> tuple[TensorRTModule.INetworkDefinition, TensorRTModule.OnnxParser]:
    """The network of the graph at ``path``, whose attentions are written as ``lowerings``, and the parser.

    The network uses the parser's memory, so both must be kept. Raises CompileError that quotes TensorRT's log, and also
    without an error in it: for an unused input, and for an attention that differs from the written one, because the
    parser drops what it does not know.
    """
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        raise compile_error("refused the graph", _parser_errors(parser) or serious_messages(logger.lines))
    _check_attentions(trt, network, [lowering for lowering in lowerings if lowering != "primitive"])
    _check_inputs(network)
    return network, parser


def inputs_of(network: TensorRTModule.INetworkDefinition) -> list[TensorRTModule.ITensor]:
    """The network's inputs."""
    return [network.get_input(index) for index in range(network.num_inputs)]


def layers_of(network: TensorRTModule.INetworkDefinition) -> list[TensorRTModule.ILayer]:
    """The network's layers, in the order of the graph's nodes."""
    return [network.get_layer(index) for index in range(network.num_layers)]


def attentions_of(trt: TensorRTModule, network: TensorRTModule.INetworkDefinition) -> list[TensorRTModule.ILayer]:
    """The layers that read the inputs of an attention."""
    return [layer for layer in layers_of(network) if layer.type == trt.LayerType.ATTENTION_INPUT]


def _check_attentions(
    trt: TensorRTModule, network: TensorRTModule.INetworkDefinition, lowerings: list[Lowering]
) -> None:
    attentions = attentions_of(trt, network)
    if len(attentions) != len(lowerings):
        raise CompileError(f"TensorRT made {len(attentions)} attention layers of {len(lowerings)}. This is a bug.")
    for layer, lowering in zip(attentions, lowerings, strict=True):
        inputs = [layer.get_input(index) for index in range(layer.num_inputs)]
        wired = {index for index, tensor in enumerate(inputs) if tensor is not None}
        if _KEY_LENGTHS not in wired:
            raise CompileError(
                f"TensorRT did not give {layer.name} its key/value lengths: it would attend to padding. This is a bug."
            )
        if (lowering == "packed") != (_QUERY_LENGTHS in wired):
            raise CompileError(f"{layer.name} is to be {lowering}, and TensorRT reads it otherwise. This is a bug.")
        if (lowering == "masked") != (_MASK in wired):
            raise CompileError(
                f"{layer.name} is to be {lowering}, and TensorRT gave it {'a' if _MASK in wired else 'no'} mask. "
                "This is a bug."
            )


def _check_inputs(network: TensorRTModule.INetworkDefinition) -> None:
    layers = layers_of(network)
    tensors = [layer.get_input(index) for layer in layers for index in range(layer.num_inputs)]
    read = {tensor.name for tensor in tensors if tensor is not None}
    unused = [tensor.name for tensor in inputs_of(network) if tensor.name not in read]
    if unused:
        raise CompileError(f"Nothing in TensorRT's network reads the input {', '.join(unused)}. This is a bug.")


def _parser_errors(parser: TensorRTModule.OnnxParser) -> list[str]:
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    return [f"{error.node_name()} ({error.node_operator()}): {error.desc()}" for error in errors]
