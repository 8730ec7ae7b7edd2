"""The quantization that a checkpoint brings, by our linear layers: scales of inputs, and matrices in FP8."""

from __future__ import annotations

from collections.abc import Mapping

from bei_build.quantization.shared import shared_by_gate_and_up
from bei_build.spec.dtypes import FloatArray
from bei_build.spec.linear_layers import LinearLayer, linear_layers
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.quantization import LARGEST
from bei_build.weights.model_weights import ModelWeights


def stored_ranges(weights: ModelWeights, spec: ModelSpec) -> dict[str, float] | None:
    """The largest input of each linear layer of ``spec`` by the checkpoint's scales; None: it has no input scales.

    Matrices of one product share the largest scale of their inputs, and so do gate and up. A layer with a matrix that
    has no input scale is left out, and keeps its precision. Values are the file's, not rounded.
    """
    amax = {}
    for layer in linear_layers(spec):
        scales = [weights.input_scale(weight) for weight in layer.weights]
        if None not in scales:
            amax[layer.name] = max(scale for scale in scales if scale is not None) * LARGEST["fp8"]
    return shared_by_gate_and_up(amax) if amax else None


def stored_row_scales(weights: ModelWeights, spec: ModelSpec) -> dict[str, Mapping[str, FloatArray]]:
    """Row scales of the matrices of the linear layers that the checkpoint has in FP8 completely.

    By layers, and by the names of their parts. Experts, which are parts of a tensor, have none.
    """
    found = {layer.name: _row_scales(weights, layer) for layer in linear_layers(spec)}
    return {name: scales for name, scales in found.items() if scales is not None}


def _row_scales(weights: ModelWeights, layer: LinearLayer) -> Mapping[str, FloatArray] | None:
    found = {}
    for part, weight in zip(layer.parts, layer.weights, strict=True):
        scales = weights.row_scales(weight)
        if scales is None:
            return None
        found[part] = scales
    return {} if layer.expert is not None else found
