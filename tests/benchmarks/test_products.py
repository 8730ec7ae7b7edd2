"""The share of the speed of products alone that an engine attains."""

from __future__ import annotations

from benchmarks.harness.products import operations_per_token, share_of_products


def test_a_token_of_bert_has_the_operations_of_linear_layers_and_of_attention_to_its_text() -> None:
    config = {"model_type": "bert", "hidden_size": 2, "intermediate_size": 3, "num_hidden_layers": 5}
    linear = 2 * (4 * 2 * 2 + 2 * 2 * 3)
    attention = 2 * (2 * 2) * (1 * 1 + 3 * 3) / 4  # two products of each pair, over the four tokens of both texts
    assert operations_per_token(config, [1, 3]) == 5 * (linear + attention)


def test_a_token_of_qwen2_attends_to_those_before_it_and_its_keys_are_shared_by_queries() -> None:
    config = {
        "model_type": "qwen2",
        "hidden_size": 8,
        "intermediate_size": 3,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    }
    linear = 2 * (2 * 8 * 8 + 2 * 8 * 2 + 3 * 8 * 3)  # queries and outputs, keys and values, the gated layer
    attention = 2 * (2 * 8) * (1 + (1 + 2 + 3)) / 4
    assert operations_per_token(config, [1, 3]) == 5 * (linear + attention)


def test_a_share_is_that_of_the_faster_product_of_each_repetition() -> None:
    results = {
        "engine": {"values": [1e9, 2e9, 1e9]},
        "product fp32, large": {"values": [4.0, 4.0, 2.0]},
        "product fp32, of a step": {"values": [2.0, 5.0, 1.0]},
    }
    assert share_of_products(results, "engine", "fp32", 1.0) == 0.4
