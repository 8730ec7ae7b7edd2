"""sentence-transformers' WeightedLayerPooling: token states as a weighted mean of the states of several layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bei.errors import CheckpointError
from bei_build.files.json_settings import read_object, setting
from bei_build.spec.model_spec import ModelSpec
from bei_build.weights.tensor_store import open_weights

# The library's defaults for keys that the module's config.json lacks.
_FIRST = 4


def with_layer_shares(spec: ModelSpec, folder: Path, config: Any) -> ModelSpec:
    """``spec`` with the weighted mean of layer states that the module in ``folder`` computes.

    ``config`` is the Transformer's. Raises CheckpointError for a mean that the library or bei does not support.
    """
    if not getattr(config, "output_hidden_states", False):
        raise CheckpointError(
            f"modules.json asks for {folder.name}, but config.json does not ask for the states of all layers, without "
            'which sentence-transformers passes over the module: add "output_hidden_states": true to config.json to '
            "have it computed, or take the module out of modules.json."
        )
    if spec.decoder or not spec.layers or any(head.token_layers for head in spec.heads):
        raise CheckpointError(
            f"modules.json asks for {folder.name}, which bei builds for models that have nothing but a pooling "
            f"behind their layers, not for {spec.architecture} with the outputs {', '.join(spec.dimensions)}."
        )
    path = folder / "config.json"
    start = setting(path, read_object(path), "layer_start", int)
    start, count = _FIRST if start is None else start, len(spec.layers) + 1
    weights = _stored_weights(folder)
    if start < 0 or weights.shape != (count - start,):
        raise CheckpointError(
            f"{folder.name} has {weights.size} layer_weights and layer_start {start}, for a model whose "
            f"{count - 1} layers give {count} states: it must have one for each state from layer_start on."
        )
    total = float(weights.sum(dtype=np.float64))
    if not np.isfinite(total) or total == 0:
        raise CheckpointError(f"{folder.name} has layer_weights that add up to {total}: they have no mean.")
    shares = (weights.astype(np.float64) / total).tolist()
    return replace(spec, layer_shares=(0.0,) * start + tuple(shares))


def _stored_weights(folder: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    store = open_weights(folder)
    try:
        if list(store.shapes) != ["layer_weights"]:
            raise CheckpointError(
                f"{folder.name} holds {', '.join(store.shapes) or 'nothing'}, not layer_weights alone. Download the "
                "checkpoint again."
            )
        return store.read("layer_weights")
    finally:
        store.close()
