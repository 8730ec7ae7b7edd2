"""The quantization that a checkpoint brings: scales of inputs that ModelOpt has measured, by our linear layers."""

from __future__ import annotations

from bei_build.model_weights import ModelWeights
from bei_build.quantization.layers import linear_layers
from bei_build.quantization.scheme import LARGEST, LayerQuantization, Quantization
from bei_build.quantization.shared import shared_by_gate_and_up
from bei_build.spec import ModelSpec


def stored_quantization(weights: ModelWeights, spec: ModelSpec) -> Quantization | None:
    """What the checkpoint's scales say of each linear layer of ``spec``; None: it has no scales of inputs.

    Matrices that are one product share the largest scale of their inputs, and so do gate and up. A layer of which some
    matrix has no such scale is left out, and stays high. Values are the file's: they are not rounded. A checkpoint with
    matrices in FP8 whose inputs are to be quantized as they come has none; ``stored_layers`` says which those are.
    """
    amax = {}
    for layer in linear_layers(spec):
        scales = [weights.input_scale(weight) for weight in layer.weights]
        if None not in scales:
            amax[layer.name] = max(scale for scale in scales if scale is not None) * LARGEST["fp8"]
    if not amax:
        return None
    shared = shared_by_gate_and_up(amax)
    return Quantization("fp8", {name: LayerQuantization(value) for name, value in shared.items()})


def stored_layers(weights: ModelWeights, spec: ModelSpec) -> frozenset[str]:
    """The linear layers of ``spec`` whose matrices the checkpoint has in FP8, all of them; empty: it has none."""
    return frozenset(
        layer.name
        for layer in linear_layers(spec)
        if all(weights.row_scales(weight) is not None for weight in layer.weights)
    )
