"""Replacement of a module's linear layers by FP8 layers, and the checks of a quantization."""

from __future__ import annotations

import torch
from torch import nn

from bei.errors import CompileError
from bei_build.spec.linear_layers import LinearLayer, linear_layers
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.quantization import LayerQuantization, Quantization
from bei_build.torch_graph.fp8 import FP8Linear, Rounding
from bei_build.torch_graph.fp8_experts import FP8Experts
from bei_build.torch_graph.parameters import TensorOptions

_LEAST_CAPABILITY = (8, 9)


def check(spec: ModelSpec, quantization: Quantization, device: torch.device) -> None:
    """Raise CompileError for a ``quantization`` that is not supported here, or not on ``device``."""
    if quantization.format != "fp8":
        raise CompileError(
            f"The module for PyTorch has no products in {quantization.format.upper()}: build with --precision fp8 or "
            "bf16, or for another target."
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        raise CompileError(
            f"{torch.cuda.get_device_name(device)} does not compute in FP8, which needs compute capability 8.9: build "
            "with --precision bf16."
        )
    names = {layer.name for layer in linear_layers(spec)}
    for name, layer in quantization.layers.items():
        if name not in names:
            raise CompileError(f"The quantization belongs to another model: this one has no linear layer {name}.")
        refused = {
            "a range for each token": layer.per_token,
            "products that are rounded too": layer.output_amax is not None,
        }
        for what, is_so in refused.items():
            if is_so:
                raise CompileError(
                    f"Linear layer {name} is quantized with {what}, which the module for PyTorch does not compute: "
                    "build with --precision bf16, or for another target."
                )


def quantize(model: nn.Module, spec: ModelSpec, quantization: Quantization, options: TensorOptions) -> None:
    """Put FP8 layers in place of the linear layers of ``model``, which has no values yet, that are in ``quantization``.

    ``check`` must have passed. Layers with one input and equal scales share its rounding.
    """
    roundings = _Roundings(options)
    experts: dict[str, list[LinearLayer]] = {}
    for layer in linear_layers(spec):
        found = quantization.layers.get(layer.name)
        if layer.expert is not None:
            (weight,) = layer.parts
            experts.setdefault(weight, []).append(layer)
        elif found is not None:
            for part in layer.parts:
                parent, name = _place(model, part)
                keeps_weight = name in getattr(parent, "read_exactly", ())
                arguments = getattr(parent, name), roundings.shared(layer, found), found, found.row_scales.get(part)
                setattr(parent, name, FP8Linear(*arguments, keeps_weight=keeps_weight))
    for weight, of_each in experts.items():
        layers = [quantization.layers.get(layer.name) for layer in of_each]
        if any(layers):
            parent, name = _place(model, weight)
            of_inputs = [
                None if found is None else roundings.shared(layer, found)
                for layer, found in zip(of_each, layers, strict=True)
            ]
            setattr(parent, name, FP8Experts(getattr(parent, name), layers, of_inputs))


def _place(model: nn.Module, weight: str) -> tuple[nn.Module, str]:
    """The module that has the layer of ``weight``, and the layer's name in it."""
    path, _, name = weight.removesuffix(".weight").rpartition(".")
    return model.get_submodule(path), name


class _Roundings:
    """One rounding for all layers of a group with equal scales."""

    def __init__(self, options: TensorOptions) -> None:
        self._storage = options
        self._made: dict[object, Rounding] = {}

    def shared(self, layer: LinearLayer, found: LayerQuantization) -> Rounding:
        key = layer.group, found.input_amax, found.smoothing
        if key not in self._made:
            self._made[key] = Rounding(found, self._storage)
        return self._made[key]
