"""Which weights of a spec a checkpoint's adapters change, and their factors as the spec has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from bei.errors import WeightsError
from bei_build.spec.adapters import AdaptersSpec, is_table
from bei_build.spec.dtypes import FloatArray
from bei_build.spec.model_spec import ModelSpec
from bei_build.weights.lora import AdapterSet, FactorSource

# The products and tables in which the graphs compute adapters.
_ADAPTED = re.compile(
    r"(decoder\.)?layers\.\d+\.((cross_)?attention\.(query|key|value|output)|mlp\.(up|gate|down))|embeddings\.(word|type)"
)


def adapters_spec(
    spec: ModelSpec,
    adapters: AdapterSet,
    sources: Sequence[FactorSource],
    tensor_of: Callable[[str], str],
    is_read: Callable[[str], bool],
) -> AdaptersSpec:
    """The layers of ``spec`` that the adapters change, and the ranks. ``tensor_of``: the checkpoint's name of a weight;
    ``is_read``: whether anything that is built depends on a tensor.

    Raises WeightsError for changes of anything but a linear layer or a table that the graphs compute adapters in.
    """
    backbone = [name for name, shape in spec.backbone_weights() if name.endswith(".weight") and len(shape) == 2]
    layers = {name.removesuffix(".weight"): tensor_of(name) for name in backbone}
    able = {layer: tensor for layer, tensor in layers.items() if _ADAPTED.fullmatch(layer) and _is_product(spec, layer)}
    of_heads = {tensor_of(name) for name, shape in spec.head_weights() if len(shape) == 2}
    for name, source in zip(adapters.names, sources, strict=True):
        for tensor in source.tensors:
            found = [layer for layer, known in able.items() if known == tensor]
            if (found and tensor not in of_heads) or (not found and not is_read(tensor)):
                if any(is_table(layer) != source.is_table(tensor) for layer in found):
                    raise WeightsError(f"Adapter {name} changes {tensor} as what it is not: a matrix, or a table.")
                continue
            raise WeightsError(
                f"Adapter {name} changes {tensor}, which is no linear layer or word table in which bei computes "
                "adapters beside the weights: merge it with PEFT (merge_and_unload, then save_pretrained), and build "
                "the result."
            )
    ranks = {layer: tuple(one.tensors.get(tensor, 0) for one in sources) for layer, tensor in able.items()}
    return AdaptersSpec(adapters.names, tuple((layer, of_each) for layer, of_each in ranks.items() if any(of_each)))


def _is_product(spec: ModelSpec, layer: str) -> bool:
    """False for what is a constant in the graphs too: DeBERTa's projections of positions, matrices of experts."""
    found = re.match(r"(decoder\.)?layers\.(\d+)\.", layer)
    if found is None:
        return True
    of = (spec.decoder.layers if spec.decoder else ()) if found[1] else spec.layers
    one = of[int(found[2])]
    positions = one.attention.disentangled if one.attention else None
    shares = positions is not None and positions.share_keys
    return not (shares and layer.endswith((".query", ".key"))) and not (one.mlp.experts and ".mlp." in layer)


def stacked_factor(
    kind: str, tensor: str, sources: Sequence[FactorSource], layer: str, rows_of: Callable[[FloatArray], FloatArray]
) -> FloatArray:
    """Factor ``kind`` (``lora_a`` or ``lora_b``) of all adapters for the weight of ``layer``, which is ``rows_of`` the
    ``tensor`` (``bei_build.spec.adapters``)."""
    found = [source.read(tensor) for source in sources if tensor in source.tensors]
    if kind == "lora_b":
        return np.concatenate([b if is_table(layer) else rows_of(b) for _, b in found], axis=1)
    return np.concatenate([a for a, _ in found], axis=1 if is_table(layer) else 0)
