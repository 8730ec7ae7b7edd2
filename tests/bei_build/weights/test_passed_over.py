"""Tensors that the build ignores: all that a class of transformers loads is read, refused, or without effect."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from bei.errors import WeightsError
from bei_build.weights.tensor_store import SafetensorsStore
from tests.bei_build.targets.tiny import case_named
from tests.support.checkpoints import read_tensors, write_tensors
from tests.support.reading import read, refused, saved
from tests.support.zoo import Case, by_tier, encodings_of, hf_outputs, load_case, save_case

# One case for each family whose class loads more than is read; the second tier runs all cases.
FIRST = tuple(
    case_named(name)
    for name in (
        *("BertModel", "LukeModel", "RoFormerModel", "EsmModel", "DPRContextEncoder", "AlbertForMaskedLM"),
        *("CLIPTextModel", "T5EncoderModel", "BartModel", "MBartForSequenceClassification", "LlamaForCausalLM"),
    )
)


def read_names(folder: Path) -> set[str]:
    """The stored tensors that the model's weights come from."""
    names = set()

    def note(store: SafetensorsStore, name: str) -> object:
        names.add(name)
        return original(store, name)

    original = SafetensorsStore.read
    checkpoint = read(folder)
    with checkpoint.weights() as weights, mock.patch.object(SafetensorsStore, "read", note):
        for name, _ in checkpoint.spec.weights():
            weights.read(name)
    return names


def changed_values(tensor: torch.Tensor) -> torch.Tensor:
    """Other values, which no later norm removes."""
    return tensor + torch.randn(tensor.shape, generator=torch.Generator().manual_seed(22)).to(tensor.dtype)


def refusal(folder: Path) -> str | None:
    try:
        read(folder).weights().close()
    except WeightsError as error:
        return str(error)
    return None


@pytest.mark.parametrize("case", by_tier(*FIRST))
def test_what_a_class_loads_is_read_or_refused_or_changes_nothing(case: Case, tmp_path: Path) -> None:
    folder = save_case(tmp_path / "checkpoint", case)
    stored = {name: tensor.clone() for name, tensor in load_case(folder, case).state_dict().items()}
    write_tensors(folder, stored)
    encodings = encodings_of(case, [7, 20], case.tokenizer().get_vocab_size())
    expected = hf_outputs(folder, case, encodings)
    passed_over = stored.keys() - read_names(folder)
    changed = {name: changed_values(stored[name]) for name in passed_over}
    while message := refusal(write_tensors(folder, {**stored, **changed})):
        named = [name for name in changed if re.search(rf"\b{re.escape(name)} ", message)]
        assert named, message
        del changed[named[0]]
    for actual, row in zip(hf_outputs(folder, case, encodings), expected, strict=True):
        np.testing.assert_allclose(actual, row, atol=1e-6)


# One by one, what the law above has found.


@pytest.mark.parametrize(("case", "end"), [("RoFormerModel", "embed_positions.weight"), ("EsmModel", "inv_freq")])
def test_a_table_that_is_computed_here_is_compared(case: str, end: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, case)
    tensors = read_tensors(folder)
    (name,) = (name for name in tensors if name.endswith(end))
    read(folder).weights().close()
    write_tensors(folder, {**tensors, name: tensors[name] * 1.001})
    refused(folder, WeightsError, rf"Tensor {re.escape(name)} is off by \S+ from .*config\.json.* take the tensor out")
    write_tensors(folder, {**tensors, name: tensors[name][..., :-1]})
    refused(folder, WeightsError, rf"Tensor {re.escape(name)} has shape .*config\.json implies")
    del tensors[name]  # which transformers computes too
    read(write_tensors(folder, tensors)).weights().close()


def test_frequencies_that_older_versions_stored_in_each_layer_are_compared(tmp_path: Path) -> None:
    """transformers 5 loads them in place of its single one."""
    folder = saved(tmp_path, "EsmModel")
    tensors = read_tensors(folder)
    (frequencies,) = (tensors.pop(name) for name in list(tensors) if name.endswith("inv_freq"))
    name = "encoder.layer.0.attention.self.rotary_embeddings.inv_freq"
    read(write_tensors(folder, {**tensors, name: frequencies})).weights().close()
    write_tensors(folder, {**tensors, name: frequencies * 2})
    refused(folder, WeightsError, rf"Tensor {re.escape(name)} is off by")


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", ["RoFormerModel", "EsmModel"])
def test_tables_that_16_bits_have_rounded_are_taken(case: str, stored: torch.dtype, tmp_path: Path) -> None:
    folder = saved(tmp_path, case)
    tensors = {name: tensor.to(stored) for name, tensor in read_tensors(folder).items()}
    read(write_tensors(folder, tensors)).weights().close()


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("T5EncoderModel", "shared.weight", "encoder.embed_tokens.weight"),
        ("MT5EncoderModel", "shared.weight", "encoder.embed_tokens.weight"),
        ("BartModel", "shared.weight", "encoder.embed_tokens.weight"),
        ("MBartModel", "shared.weight", "decoder.embed_tokens.weight"),
        ("BertForSequenceClassification", "bert.pooler.dense.weight", "pooler.dense.weight"),
        ("BertModel", "embeddings.word_embeddings.weight", "bert.embeddings.word_embeddings.weight"),
        ("BertModel", "embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma"),
        ("DebertaV2ForMaskedLM", "cls.predictions.transform.dense.weight", "lm_predictions.lm_head.dense.weight"),
    ],
)
def test_two_names_of_one_tensor_must_agree(case: str, first: str, second: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, case)
    tensors = {**read_tensors(folder)}
    expected = tensors[first]
    read(write_tensors(folder, {**tensors, second: expected.clone()})).weights().close()
    write_tensors(folder, {**tensors, second: changed_values(expected)})
    refused(
        folder,
        WeightsError,
        "Tensors .* are the same weights in this architecture, and hold different values: take the one out",
    )


@pytest.mark.parametrize(
    ("case", "first", "others"),
    [
        ("LlamaForCausalLM", "lm_head.weight", ["model.embed_tokens.weight"]),
        ("BertForMaskedLM", "cls.predictions.decoder.weight", ["bert.embeddings.word_embeddings.weight"]),
        ("BertForMaskedLM", "cls.predictions.decoder.bias", ["cls.predictions.bias"]),
    ],
)
def test_of_a_tied_pair_with_different_values_the_heads_own_counts_as_in_transformers(
    case: str, first: str, others: list[str], tmp_path: Path
) -> None:
    """transformers 5 leaves two tensors of different values untied, whatever config.json says."""
    zoo = case_named(case)
    folder = save_case(tmp_path / "checkpoint", replace(zoo, settings={**zoo.settings, "tie_word_embeddings": True}))
    tensors = read_tensors(folder)
    tensors[first] = changed_values(tensors[others[0]])
    write_tensors(folder, tensors)
    model = load_case(folder, zoo)
    for name in (first, *others):
        torch.testing.assert_close(model.state_dict()[name], tensors[name])
    if zoo.output == "sparse":
        ours = "mlm.decoder." + first.rsplit(".", 1)[1]
        with read(folder).weights() as weights:
            np.testing.assert_array_equal(weights.read(ours), tensors[first].numpy())
