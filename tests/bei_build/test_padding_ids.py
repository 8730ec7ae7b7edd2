"""Padding ids written in a text, or at the end of every text: read as transformers reads them.

Texts go through transformers' own tokenizer there and through an artifact's here, so nothing is shared. The cases of
``tests.support.zoo`` have padding among their ids too, which tests every family.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from bei import Model
from bei.core import Encoding, Float32Array, PackedBatch
from bei.engine.packing import graph_inputs, position_ids_but
from bei.errors import CheckpointError
from tests.bei_build.test_parity_matrix import BY_NAME, TOLERANCE
from tests.support.builds import build_artifact
from tests.support.checkpoints import bpe_tokenizer, write_json
from tests.support.reading import refused
from tests.support.zoo import CASES, FIRST_OF_FAMILY, Case, save_case, spec_of

COUNTS = "create_position_ids_from_input_ids"
TEXTS = [
    "the <pad> cat",
    "hello",
    "<pad><pad>hello world",
    "a<pad>b<pad>c",
    "the # cat # #",
    "the cat sat on the mat<pad><pad>",
    "<pad>",
    "hello the world " * 2,
]
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"}


def functions_that_count() -> list[Callable[[torch.Tensor, int], torch.Tensor]]:
    """transformers' own functions, one for each module that has one."""
    found: dict[str, Any] = {}
    for case in CASES:
        module = sys.modules[getattr(transformers, case.architecture).__module__]
        embeddings = [it for name, it in inspect.getmembers(module, inspect.isclass) if hasattr(it, COUNTS)]
        if function := getattr(module, COUNTS, None) or next((getattr(it, COUNTS) for it in embeddings), None):
            found[module.__name__] = function
    return list(found.values())


FUNCTIONS = functions_that_count()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sequences=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=30), min_size=1, max_size=6),
    padding=st.integers(0, 5),
    function=st.sampled_from(FUNCTIONS),
)
def test_positions_are_those_of_transformers(sequences: list[list[int]], padding: int, function: Any) -> None:
    batch = PackedBatch.from_encodings([Encoding(np.array(ids, np.int32)) for ids in sequences])
    name = position_ids_but(padding)
    expected = [function(torch.tensor([ids]), padding)[0].numpy() for ids in sequences]
    actual = graph_inputs(batch, [name])[name][: batch.num_tokens] + padding
    np.testing.assert_array_equal(actual, np.concatenate(expected))


@pytest.mark.parametrize("case", [*FIRST_OF_FAMILY, BY_NAME["EsmModel-learned_positions"]], ids=lambda case: case.name)
def test_a_family_counts_positions_where_its_hf_class_does(case: Case) -> None:
    """By the class's source, so that a new family cannot forget it."""
    source = inspect.getsource(sys.modules[getattr(transformers, case.architecture).__module__])
    spec = spec_of(case)
    counts = f"{COUNTS}(input_ids" in source and spec.embeddings.max_positions > 0
    assert (spec.embeddings.uncounted_id is not None) == counts


def test_the_functions_of_transformers_were_found() -> None:
    assert len(FUNCTIONS) >= 9


def saved(folder: Path, name: str, padding: object) -> Path:
    """The checkpoint of the case ``name``, with ``padding`` (None: null) as its pad_token_id."""
    path = save_case(folder, BY_NAME[name]) / "config.json"
    write_json(path, {**json.loads(path.read_text()), "pad_token_id": padding})
    return folder


def saved_with_tokenizer(folder: Path, name: str, padding: int | None) -> Path:
    """The same, with a tokenizer that transformers loads too."""
    saved(folder, name, padding)
    tokenizer = bpe_tokenizer()
    template = [("<s>", 0), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=template)
    token = tokenizer.id_to_token(1 if padding is None else padding)
    wrapped = transformers.PreTrainedTokenizerFast
    files = wrapped(tokenizer_object=tokenizer, pad_token=token, **SPECIAL_TOKENS)  # type: ignore[no-untyped-call]
    files.save_pretrained(folder)
    return folder


def answers_of_transformers(model_class: Any, folder: Path, texts: Sequence[str]) -> Float32Array:
    """One text at a time: the mean of the states, or the scores of a classifier."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    with torch.no_grad():
        for text in texts:
            outputs = model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False))
            rows.append(outputs.logits[0] if hasattr(outputs, "logits") else outputs.last_hidden_state[0].mean(0))
    array: Float32Array = torch.stack(rows).numpy()
    return array


@pytest.mark.parametrize(
    ("name", "padding"),
    [("RobertaModel", 1), ("RobertaModel", 0), ("RobertaModel", 7), ("MPNetModel", 1)],
    ids=["padding", "the_first_token_is_padding", "a_word_is_padding", "MPNet"],
)
def test_vectors_of_texts_with_padding_are_those_of_transformers(name: str, padding: int, tmp_path: Path) -> None:
    folder = saved_with_tokenizer(tmp_path / "checkpoint", name, padding)
    artifact = build_artifact(folder, tmp_path / "artifact", normalize=False, verify=False)
    expected = answers_of_transformers(transformers.AutoModel, folder, TEXTS)
    with Model(artifact.path, tune="off") as model:
        in_one_batch = model.embed(TEXTS)
        alone = np.concatenate([model.embed([text]) for text in TEXTS])
    assert np.abs(in_one_batch - expected).max() <= TOLERANCE
    assert np.abs(alone - expected).max() <= TOLERANCE


@pytest.mark.parametrize("padding", [None, 1, 2], ids=["no_padding", "padding", "every_text_ends_in_padding"])
def test_scores_of_decoders_read_the_last_token_that_is_not_padding(padding: int | None, tmp_path: Path) -> None:
    """transformers' class finds it by its id: if the end token is the padding token, it is the one before."""
    folder = saved_with_tokenizer(tmp_path / "checkpoint", "Qwen3ForSequenceClassification", padding)
    artifact = build_artifact(folder, tmp_path / "artifact", allow_below_threshold=True)  # few random logits
    expected = answers_of_transformers(transformers.AutoModelForSequenceClassification, folder, TEXTS)
    with Model(artifact.path, tune="off") as model:
        found = model.classify(TEXTS, raw_scores=True).scores
    assert np.abs(found - expected).max() <= TOLERANCE


@pytest.mark.parametrize("name", ["RobertaModel", "XLMRobertaModel", "LukeModel", "EsmModel-learned_positions"])
@pytest.mark.parametrize("padding", [None, -1, 300, 49, True], ids=str)
def test_a_padding_id_that_positions_cannot_be_counted_by_is_refused(
    name: str, padding: object, tmp_path: Path
) -> None:
    """With a vocabulary of 268 and a table of 50 rows, one row after the padding's must exist for a token."""
    refused(saved(tmp_path / "checkpoint", name, padding), CheckpointError, "pad_token_id")
