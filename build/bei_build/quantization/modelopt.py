"""Calibration by nvidia-modelopt: it measures the inputs of the linear layers of the Hugging Face model.

The only file that imports modelopt. It uses its quantizers and their calibrators for inputs of linear layers; scales of
matrices follow from the matrices. Texts run one by one, in FP32, without quantization.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from bei.core import Encoding
from bei.errors import ConfigError
from bei.utils.libraries import importing
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.families.base import Family
from bei_build.quantization.shared import shared_by_gate_and_up
from bei_build.reference.hf_model import HFReference
from bei_build.spec.linear_layers import linear_layers
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.quantization import rounded
from bei_build.weights.model_weights import ModelWeights
from bei_build.weights.stored_names import StoredNames

Method: TypeAlias = Literal["max", "percentile"]

# ModelOpt's default is 99.99, which is too low for floating-point formats (docs/decisions.md, "What ModelOpt gives").
PERCENTILE = 99.999


def calibrate_with_modelopt(
    checkpoint: Checkpoint,
    weights: ModelWeights,
    encodings: Sequence[Encoding],
    method: Method = "max",
    percentile: float = PERCENTILE,
) -> dict[str, float]:
    """The largest absolute input of each linear layer, by its name in the graph, over ``encodings``.

    ``method`` "percentile": the bound of ``percentile`` percent (above 0, at most 100) of the values, by a histogram,
    instead of the largest. Matrices of one product have one value, and so have an MLP's gate and up; layers that share
    their weights have one too, because transformers has one module for them. Raises ConfigError for a model or a layer
    without a linear module in transformers, MissingDependencyError.
    """
    if not 0.0 < percentile <= 100.0:
        raise ConfigError(f"A percentile of inputs is above 0 and at most 100, not {percentile}.")
    if checkpoint.family.reference_class is None:
        raise ConfigError(
            f"ModelOpt calibrates transformers' models, and there is none for {checkpoint.spec.architecture}: "
            "calibrate with bei's own engine."
        )
    modelopt = _imported()
    reference = HFReference(checkpoint, weights)
    modules = linear_modules(reference.model)
    names = hf_modules(checkpoint.spec, checkpoint.family, modules)
    used = list(dict.fromkeys(name for parts in names.values() for name in parts))
    measured = _measured(
        modelopt, [modules[name] for name in used], lambda: reference.run(encodings, ()), method, percentile
    )
    by_module = dict(zip(used, measured, strict=True))
    amax = {layer: max(by_module[name] for name in parts) for layer, parts in names.items()}
    for layer, value in amax.items():
        if not 0.0 < value < math.inf:
            raise ConfigError(
                f"ModelOpt measures {value} as the largest input of {layer}: calibrate with more texts, with a higher "
                "percentile, or with bei's own engine."
            )
    return {layer: rounded(value) for layer, value in shared_by_gate_and_up(amax).items()}


def linear_modules(model: Any) -> dict[str, Any]:
    """The linear layers of a torch.nn.Module by name; a layer with several names by the first."""
    import torch

    return {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def hf_modules(spec: ModelSpec, family: Family, modules: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The ``modules``, linear ones of the family's reference class, that hold each linear layer's matrices.

    By the layer's name in the graph; a module that holds several of them is named once. Raises ConfigError for a layer
    whose matrices are in none of them.
    """
    root = (family.reference_class or "").partition(".")[2]
    prefix = f"{root}." if root else ""
    stored: dict[str, tuple[int, ...]] = {f"{prefix}{module}.weight": () for module in modules}
    names, found = StoredNames(family), {}
    for layer in linear_layers(spec):
        tensors = [names.find(weight, stored) for weight in layer.weights]
        missing = next((tensor for tensor in tensors if tensor not in stored), None)
        if missing is not None:
            raise ConfigError(
                f"ModelOpt cannot calibrate {layer.name}: transformers' {family.reference_class} has no linear module "
                f"for {missing}. Calibrate with bei's own engine."
            )
        parts = (tensor.removeprefix(prefix).removesuffix(".weight") for tensor in tensors)
        found[layer.name] = tuple(dict.fromkeys(parts))
    return found


def _imported() -> Any:
    """modelopt.torch.quantization. Raises MissingDependencyError, BrokenDependencyError."""
    modules = ("modelopt.torch.quantization",)
    with importing("nvidia-modelopt", "fp8", "Calibrating with ModelOpt", modules=modules), _quiet():
        import modelopt.torch.quantization
    return modelopt.torch.quantization


def _measured(
    modelopt: Any, layers: Sequence[Any], run: Callable[[], object], method: Method, percentile: float
) -> list[float]:
    """The largest input by ``method`` of each of ``layers``, torch.nn.Linear, while ``run`` runs. Changes the layers.

    They get ModelOpt's FP8 quantizers one by one, without the model around them: ModelOpt's own classes for parts of
    some models depend on versions of transformers, and none of them is needed here.
    """
    import torch

    with _quiet():
        modelopt.quantize(torch.nn.ModuleList(layers), {**modelopt.FP8_DEFAULT_CFG, "algorithm": None})
    quantizers = [layer.input_quantizer for layer in layers]
    for layer in layers:
        layer.weight_quantizer.disable()
    for quantizer in quantizers:
        if method == "percentile":
            quantizer.set_from_attribute_config({"calibrator": "histogram"})
        quantizer.disable_quant()
        quantizer.enable_calib()
    run()
    arguments: Mapping[str, object] = (
        {"method": "percentile", "percentile": percentile} if method == "percentile" else {}
    )
    with _quiet():
        for quantizer in quantizers:
            quantizer.load_calib_amax(strict=False, **arguments)  # NaN where it has seen no values
    return [float(quantizer.amax) for quantizer in quantizers]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence ModelOpt's prints, and its warnings about versions of transformers that it was not tested with."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
