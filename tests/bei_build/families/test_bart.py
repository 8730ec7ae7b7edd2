"""BART and mBART: the token that a classifier reads, and refused configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from bei.core import Encoding
from bei.errors import CheckpointError
from tests.bei_build.targets.tiny import case_named
from tests.model_matrix import run
from tests.support.builds import build_artifact
from tests.support.checkpoints import change_config
from tests.support.reading import refused, saved
from tests.support.zoo import hf_outputs

END = 2


@pytest.mark.parametrize("name", ["BartForSequenceClassification", "MBartForSequenceClassification"])
def test_a_classifier_reads_the_last_end_of_a_sentence(name: str, tmp_path: Path) -> None:
    """Not the first, not one of another text in the batch, and not the language token after it."""
    folder = saved(tmp_path / "checkpoint", name)
    texts = ([0, 5, END, END, 6, 7, END, 4], [0, 9, END], [END, 8, 9, 10, 11, 12], [END])
    encodings = [Encoding(np.array(ids, np.int32)) for ids in texts]
    rows, alone = run(build_artifact(folder, tmp_path / "artifact", verify=False), "logits", encodings)
    expected = hf_outputs(folder, case_named(name), encodings)
    np.testing.assert_allclose(rows, expected, atol=1e-5)
    np.testing.assert_allclose(alone, expected, atol=1e-5)


def test_the_manifest_counts_the_layers_of_both(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint", "BartForSequenceClassification")
    spec = build_artifact(folder, tmp_path / "artifact").manifest.spec
    assert (spec.num_layers, spec.attention) == (5, None)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "BartForSequenceClassification",
            {"eos_token_id": [2, 3]},
            r"eos_token_id = \[2, 3\]: it must be the id",
        ),
        ("MBartModel", {"activation_function": "laplace"}, "Activation 'laplace' is not supported"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_configs_that_say_something_else_are_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(change_config(saved(tmp_path, name), **changes), CheckpointError, message)


def test_a_tokenizer_that_puts_no_end_behind_a_text_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "BartForSequenceClassification")
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = None
    tokenizer.save(str(file))
    refused(folder, CheckpointError, r"last token 2 \(eos_token_id\), which the tokenizer does not put behind a text")
