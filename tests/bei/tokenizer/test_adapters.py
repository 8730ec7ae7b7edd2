"""Which adapter, and which prompt, a request means by its names."""

from __future__ import annotations

from pathlib import Path

import pytest

from bei.artifact.manifest import Adapters, Manifest
from bei.errors import InvalidRequestError
from bei.tokenizer.adapters import adapter_of
from bei.tokenizer.prompts import prompt_of
from tests.support.artifacts import save_artifact

# As jina-embeddings-v3 and -v5 have them.
V3 = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
V3_PROMPTS = {"retrieval.query": "find: ", "retrieval.passage": "read: "}
V5 = ["retrieval", "text-matching", "clustering", "classification"]
V5_PROMPTS = {"query": "Query: ", "document": "Document: "}


def manifest_of(folder: Path, names: list[str], prompts: dict[str, str], *, required: bool, own: int = 0) -> Manifest:
    adapters = Adapters(names=[*names, "mine"][: len(names) + own], tasks=names, is_required=required)
    return save_artifact(folder / "artifact", adapters=adapters, prompts=prompts).manifest


@pytest.mark.parametrize(
    ("input_type", "number", "prompt"),
    [
        ("retrieval.query", 1, "find: "),
        ("query", 1, "find: "),
        ("retrieval.passage", 2, "read: "),
        ("document", 2, "read: "),
        ("text-matching", 5, ""),
        ("none", 0, ""),
        (None, 0, ""),
    ],
)
def test_tasks_with_prompts_of_their_names(input_type: str | None, number: int, prompt: str, tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, V3, V3_PROMPTS, required=False)
    assert adapter_of(manifest, None, input_type) == number
    assert prompt_of(manifest, None, input_type) == prompt


@pytest.mark.parametrize(
    ("prompt_name", "input_type", "number", "prompt"),
    [
        (None, "retrieval.query", 1, "Query: "),
        (None, "retrieval.passage", 1, "Document: "),
        (None, "query", 1, "Query: "),
        ("query", "retrieval", 1, "Query: "),
        ("document", "text-matching", 2, "Document: "),
        (None, "text-matching", 2, ""),
        (None, "classification", 4, ""),
        (None, "clustering.query", 3, "Query: "),
    ],
)
def test_tasks_with_prompts_for_both_sides(
    prompt_name: str | None, input_type: str, number: int, prompt: str, tmp_path: Path
) -> None:
    manifest = manifest_of(tmp_path, V5, V5_PROMPTS, required=True)
    assert prompt_of(manifest, prompt_name, input_type) == prompt
    assert adapter_of(manifest, prompt_name, input_type) == number


def test_a_side_is_of_the_model_that_is_named_beside_it(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, V5, V5_PROMPTS, required=True)
    assert adapter_of(manifest, "query", None, asked=3) == 3


def test_where_a_task_is_needed_the_refusal_names_them(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, V5, V5_PROMPTS, required=True)
    with pytest.raises(InvalidRequestError, match="Tasks: retrieval, text-matching, clustering, classification"):
        adapter_of(manifest)
    assert adapter_of(manifest, None, "none") == 0  # said


def test_two_tasks_contradict_each_other(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, V3, V3_PROMPTS, required=False)
    with pytest.raises(InvalidRequestError, match=r"several adapters \(retrieval\.query, text-matching\)"):
        adapter_of(manifest, "retrieval.query", "text-matching")
    with pytest.raises(InvalidRequestError, match="several adapters"):
        adapter_of(manifest, None, "separation", asked=1)


def test_an_adapter_of_the_user_is_no_task(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, V3, {**V3_PROMPTS, "mine": "my: "}, required=False, own=1)
    assert adapter_of(manifest, "mine") == 0
    assert adapter_of(manifest, "mine", asked=6) == 6
