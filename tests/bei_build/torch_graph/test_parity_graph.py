"""The module for PyTorch against the ONNX graph, where transformers has no class: specs with random weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bei.core import Encoding, Float32Array, PackedBatch
from bei.engine.packing import Sizes
from bei.errors import CompileError, WeightsError
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import POOLINGS, DenseSpec, NormSpec
from bei_build.torch_graph.experts import Experts
from bei_build.torch_graph.model import PackedModel, packed_model, run
from bei_build.torch_graph.parameters import join_linear_layers
from tests.bei_build.targets.tiny import (
    BY_POSITION,
    MAX_SEQ_LEN,
    PARTIAL_KEYS,
    VOCABULARY,
    latent_spec,
    random_weights,
    static_spec,
    tiny_spec,
    with_entry,
    with_experts,
    with_heads_on_tokens,
    with_tail,
    with_window,
)
from tests.bei_build.torch_graph.rig import of_the_graph, of_the_module
from tests.model_matrix import difference
from tests.support.builds import random_encodings

LENGTHS = [1, MAX_SEQ_LEN, 2, 17, 16, 5, 33]
TOLERANCE = 1e-5  # weights are small, and so are the outputs

SPECS: dict[str, ModelSpec] = {
    **{f"positions: {name}": tiny_spec(**attention) for name, attention in BY_POSITION.items()},
    **{
        f"partial keys: {name}": replace(tiny_spec(**attention), partial_keys=True)
        for name, attention in PARTIAL_KEYS.items()
    },
    "a norm and rows by token types between layers": with_entry(tiny_spec()),
    "soft cap and grouped queries": tiny_spec(softcap=3.0, num_kv_heads=1),
    "no bias of keys": tiny_spec(key_bias=False),
    "windows in turns": with_window(tiny_spec()),
    "latent attention, prompts left out": latent_spec(),
    "static embeddings": static_spec(None),
    "static embeddings, an id left out": static_spec(7),
    "experts": with_experts(tiny_spec()),
    "experts, normalized shares": with_experts(tiny_spec(), normalized=True),
    "heads on tokens": with_heads_on_tokens(tiny_spec()),
    "layers behind the pooling": with_tail(tiny_spec(pooling=("mean", "cls"))),
    "all poolings": tiny_spec(pooling=POOLINGS),
    "all poolings, prompts and an id left out": replace(
        tiny_spec(pooling=POOLINGS), pools_prompt=False, unpooled_id=VOCABULARY - 1
    ),
    "the first marked token": replace(tiny_spec(pooling=("first_marked", "last_marked", "largest_id")), marked_id=3),
}


def model_of(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> PackedModel:
    return packed_model(spec, random_weights(spec), MAX_SEQ_LEN, dtype=dtype)


def encodings_of(spec: ModelSpec) -> list[Encoding]:
    """Pairs. If a model has partial keys, the last two thirds are not keys; else the first two tokens are prompts."""
    encodings = random_encodings(LENGTHS, VOCABULARY, pairs=True)
    if spec.partial_keys:
        return [one._replace(num_keys=max(1, one.num_tokens // 3)) for one in encodings]
    return [one._replace(num_unpooled=min(2, one.num_tokens - 1)) for one in encodings]


@pytest.mark.parametrize("name", SPECS)
def test_the_module_equals_the_graph(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    encodings = encodings_of(spec)
    expected = of_the_graph(spec, random_weights(spec), MAX_SEQ_LEN, encodings, tmp_path)
    model = model_of(spec)
    actual = of_the_module(model, encodings)
    assert actual.keys() == expected.keys() == spec.dimensions.keys()
    for output, rows in actual.items():
        scale = max(float(np.abs(row).max()) for row in expected[output])
        assert difference(rows, expected[output]) <= TOLERANCE * max(1.0, scale)


@pytest.mark.parametrize("name", ["heads on tokens", "all poolings", "partial keys: additive"])
def test_filler_changes_nothing(name: str) -> None:
    spec = SPECS[name]
    batch = PackedBatch.from_encodings(encodings_of(spec))
    model = model_of(spec)
    exact = run(model, batch)
    filled = run(model, batch, Sizes(batch.num_tokens + 100, batch.batch_size + 9, MAX_SEQ_LEN + 16))
    for output, rows in exact.items():
        np.testing.assert_allclose(filled[output], rows, atol=1e-6)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("attention", [{}, {"key_bias": False}, {"bias": False}, {"num_kv_heads": 1}], ids=str)
def test_joined_linear_layers_compute_the_same(gated: bool, attention: dict[str, Any]) -> None:
    spec = tiny_spec(**attention)
    layers = tuple(replace(layer, mlp=replace(layer.mlp, gated=gated)) for layer in spec.layers)
    model, encodings = model_of(replace(spec, layers=layers)), random_encodings(LENGTHS, VOCABULARY)
    separate, num_products = of_the_module(model, encodings)["embedding"], len(model.state_dict())
    join_linear_layers(model)
    assert "layers.0.attention.query_key_value.weight" in model.state_dict()
    assert len(model.state_dict()) < num_products
    assert difference(of_the_module(model, encodings)["embedding"], separate) <= TOLERANCE


@pytest.mark.parametrize("normalized", [False, True])
def test_grouped_experts_compute_what_all_on_all_tokens_do(normalized: bool) -> None:
    spec = with_experts(tiny_spec(), normalized=normalized)
    model, encodings = model_of(spec, torch.bfloat16), random_encodings(LENGTHS, VOCABULARY)
    on_all = of_the_module(model, encodings)["embedding"]
    (experts,) = (module for module in model.modules() if isinstance(module, Experts))
    experts._grouped = True
    grouped = of_the_module(model, encodings)["embedding"]
    assert 0 < difference(grouped, on_all) <= 0.02  # BF16 sums in another order


def test_a_norm_with_an_offset_keeps_the_digits_of_its_weight_in_bf16() -> None:
    """In BF16 1.003 is 1, and these rows would be equal."""
    norm = NormSpec(1e-6, kind="rms", bias=False, offset=1.0)
    spec = replace(static_spec(None), final_norm=norm, heads=(HeadSpec("token_embedding"),))
    weights = random_weights(spec)

    def rows(weight: float) -> Float32Array:
        def read(name: str) -> Float32Array:
            return np.full(spec.hidden_size, weight, np.float32) if name == "final_norm.weight" else weights(name)

        model = packed_model(spec, read, MAX_SEQ_LEN, dtype=torch.bfloat16)
        return of_the_module(model, random_encodings([20], VOCABULARY))["token_embedding"][0]

    assert np.mean(rows(0.003) != rows(0.0)) > 0.3  # rounded once, at the end: not every value moves


def test_what_the_module_does_not_compute_is_refused_by_name() -> None:
    spec = tiny_spec()
    first, second = spec.layers
    other = replace(spec, layers=(first, replace(second, residual_scale=0.5)), weights_of=(0, 0))
    with pytest.raises(CompileError, match="layers that share their weights"):
        model_of(other)
    cross = replace(first, placement="output", cross_attention=first.attention)
    with pytest.raises(CompileError, match="cross-attention with norms behind it"):
        model_of(replace(spec, layers=(cross, second)))
    head = HeadSpec("logits", ("cls",), layers=(DenseSpec("forward", spec.hidden_size, 2),))
    with pytest.raises(CompileError, match="layer forward of a head"):
        model_of(replace(spec, heads=(head,)))


def test_a_weight_of_another_shape_is_refused() -> None:
    spec = tiny_spec()
    weights = random_weights(spec)
    with pytest.raises(WeightsError, match=r"embeddings.norm.bias has shape \[1\], not \[64\]"):
        packed_model(
            spec, lambda name: weights(name)[:1] if name == "embeddings.norm.bias" else weights(name), MAX_SEQ_LEN
        )
