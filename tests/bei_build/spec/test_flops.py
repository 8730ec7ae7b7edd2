"""Operations counted from a spec, against PyTorch's own counter on the module and numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from bei_build.spec.flops import flops
from bei_build.spec.model_spec import ModelSpec
from tests.bei_build.targets.tiny import (
    MAX_SEQ_LEN,
    VOCABULARY,
    latent_spec,
    random_weights,
    static_spec,
    tiny_spec,
    with_heads_on_tokens,
    with_tail,
)
from tests.bei_build.torch_graph.rig import of_the_module
from tests.support.builds import random_encodings


def gated(spec: ModelSpec) -> ModelSpec:
    return replace(spec, layers=tuple(replace(one, mlp=replace(one.mlp, gated=True)) for one in spec.layers))


@pytest.mark.parametrize(
    "spec",
    [
        tiny_spec(),
        gated(tiny_spec()),
        tiny_spec(num_kv_heads=1),
        with_heads_on_tokens(tiny_spec()),
        with_tail(tiny_spec()),
    ],
    ids=["bert", "gated", "grouped queries", "heads on tokens", "layers behind the pooling"],
)
def test_a_batch_without_filler_costs_what_pytorch_counts(spec: ModelSpec) -> None:
    from bei_build.torch_graph.model import packed_model

    model = packed_model(spec, random_weights(spec), MAX_SEQ_LEN)
    lengths = [16, 16]  # buckets of their own: the plain kernel pads nothing
    with FlopCounterMode(display=False) as counter:
        of_the_module(model, random_encodings(lengths, VOCABULARY))
    assert flops(spec, lengths) == counter.get_total_flops()


def test_masked_pairs_are_not_counted() -> None:
    def pairs(**attention: Any) -> int:
        spec = tiny_spec(**attention)
        free = flops(tiny_spec(window=0), [10])
        return (flops(spec, [10]) - free) // (len(spec.layers) * 4 * spec.attentions[0].width) + 10

    assert pairs() == 100
    assert pairs(causal=True) == 55
    assert pairs(window=1) == 28
    assert pairs(window=1, causal=True) == 19
    assert pairs(window=50) == 100


def test_embeddings_alone_cost_nothing_and_latent_rows_something() -> None:
    assert flops(static_spec(None), [5, 6]) == 0
    plain, latent = (flops(spec, [8]) for spec in (tiny_spec(), latent_spec()))
    # query and output, scores and contexts, MLP: two operations a weight or pair
    assert latent - plain == 8 * 2 * (2 * 64 * 32 + 2 * 32 * 8 + 3 * 64 * 128)
