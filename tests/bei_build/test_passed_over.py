"""What the build passes over: whatever a class of transformers loads is read, or refused, or changes nothing.

And where it looks for a model's tensors: behind what wrappers put into their names, in several files, under two names.
"""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from bei.errors import WeightsError
from bei_build.weights import SafetensorsStore
from tests.bei_build.reading import read
from tests.checkpoints import write_tensors
from tests.zoo import CASES, Case, by_tier, encodings_of, hf_outputs, load_case, save_case

# Of the families whose classes load more than is read, one each; the second tier asks all cases.
_FIRST = (
    *("BertModel", "RobertaModel", "LukeModel", "RoFormerModel", "EsmModel", "BigBirdModel", "DPRContextEncoder"),
    *("AlbertForMaskedLM", "CLIPTextModel", "T5EncoderModel", "BartModel", "MBartForSequenceClassification"),
    *("DebertaV2ForMaskedLM-not_legacy", "BertForMaskedLM-untied_decoder", "LlamaForCausalLM"),
)
FIRST = tuple(case for case in CASES if case.name in _FIRST)


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
    """Other values, which no norm behind them takes out."""
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
