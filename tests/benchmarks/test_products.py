"""The share of the speed of products alone that an engine attains."""

from __future__ import annotations

from benchmarks.harness.products import operations_per_token, share_of_products


def test_a_token_has_the_operations_of_linear_layers_and_of_attention_to_its_text() -> None:
    config = {"hidden_size": 2, "intermediate_size": 3, "num_hidden_layers": 5}
    linear = 2 * (4 * 2 * 2 + 2 * 2 * 3)
    attention = 2 * (2 * 2) * (1 * 1 + 3 * 3) / 4  # two products of each pair, over the four tokens of both texts
    assert operations_per_token(config, [1, 3]) == 5 * (linear + attention)


def test_a_share_is_that_of_the_faster_product_of_each_repetition() -> None:
    results = {
        "engine": {"values": [1e9, 2e9, 1e9]},
        "product fp32, large": {"values": [4.0, 4.0, 2.0]},
        "product fp32, of a step": {"values": [2.0, 5.0, 1.0]},
    }
    assert share_of_products(results, "engine", "fp32", 1.0) == 0.4
