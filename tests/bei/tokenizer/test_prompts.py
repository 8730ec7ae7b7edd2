"""The prompts of texts, and the side on which late interaction reads them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bei.artifact.manifest import Artifact
from bei.artifact.sides import Role
from bei.errors import InvalidRequestError
from bei.tokenizer.prompts import apply_prompt, prompt_of, role_of
from tests.support.artifacts import save_artifact

PROMPTS = {"query": "query: ", "passage": "the ", "clustering": "cat "}
_names = st.sampled_from(["query", "search_query", "document", "passage", "text", "corpus", "mine", "yours"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return save_artifact(tmp_path_factory.mktemp("prompts") / "tiny")


@pytest.mark.parametrize(
    ("prompts", "default", "prompt_name", "input_type", "expected"),
    [
        (PROMPTS, "query", None, None, "query: "),
        (PROMPTS, None, None, None, ""),
        (PROMPTS, "query", "passage", None, "the "),
        (PROMPTS, "query", "passage", "document", "the "),
        (PROMPTS, None, None, "query", "query: "),
        (PROMPTS, None, None, "search_query", "query: "),  # Cohere's word for it
        (PROMPTS, None, None, "document", "the "),
        (PROMPTS, None, None, "search_document", "the "),
        (PROMPTS, None, None, "clustering", "cat "),  # the model's own word
        ({"query": "query: "}, "query", None, "document", ""),  # documents have a prompt where there is one
        ({"query": "query: "}, "query", None, "passage", ""),
        ({"s2p_query": "query: "}, None, None, "query", "query: "),
        ({"search_document": "the ", "document": "cat "}, None, None, "search_document", "the "),
        ({}, None, None, "query", ""),  # a model without prompts treats all alike
        ({}, None, None, "classification", ""),
        ({}, None, None, "nl2code.passage", ""),
        ({"": "odd "}, None, None, None, "odd "),
    ],
)
def test_the_prompt_is_the_named_one_the_side_s_or_the_default(
    prompts: dict[str, str],
    default: str | None,
    prompt_name: str | None,
    input_type: str | None,
    expected: str,
    tmp_path: Path,
) -> None:
    artifact = save_artifact(tmp_path / "tiny", prompts=prompts, default_prompt_name=default)
    assert prompt_of(artifact.manifest, prompt_name, input_type) == expected


@pytest.mark.parametrize(
    ("prompts", "prompt_name", "input_type", "param"),
    [
        (PROMPTS, "nothing", None, "prompt_name"),
        ({}, "query", None, "prompt_name"),
        (PROMPTS, None, "classification", "input_type"),
        ({"passage": "the "}, None, "query", "input_type"),  # a query without its prompt would be found badly
    ],
)
def test_a_prompt_that_is_not_there_is_an_error_that_lists_those_that_are(
    prompts: dict[str, str], prompt_name: str | None, input_type: str | None, param: str, tmp_path: Path
) -> None:
    manifest = save_artifact(tmp_path / "tiny", prompts=prompts).manifest
    with pytest.raises(InvalidRequestError, match="Its prompts: ") as caught:
        prompt_of(manifest, prompt_name, input_type)
    assert (", ".join(prompts) or "none") in str(caught.value)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "name", ["anything", "", "Query", "search_documents", "retrieval", "retrieval.cats", "a" * 9999]
)
def test_a_kind_of_text_that_nobody_knows_is_refused_without_prompts_too(name: str, shared: Artifact) -> None:
    """A misspelt one was read as if none had been named."""
    with pytest.raises(InvalidRequestError, match=r"^input_type .* is no kind of text, .*: send query or") as caught:
        prompt_of(shared.manifest, None, name)
    assert caught.value.param == "input_type"
    assert len(str(caught.value)) < 300


def test_a_name_and_a_side_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    manifest = save_artifact(tmp_path / "tiny", prompts=PROMPTS).manifest
    with pytest.raises(InvalidRequestError, match="prompt_name passage and input_type query contradict each other"):
        prompt_of(manifest, "passage", "query")


@pytest.mark.parametrize(
    ("default", "prompt_name", "input_type", "side"),
    [
        (None, None, None, None),
        (None, "query", "document", "query"),
        (None, "mine", "passage", "document"),  # a prompt of its own, for a side that is named too
        ("query", None, None, "query"),
        ("query", None, "document", "document"),
        ("query", "mine", None, None),  # neither the default prompt nor its side
        ("query", None, "mine", None),
    ],
)
def test_the_side_is_the_named_one_or_that_of_the_default_prompt(
    default: str | None, prompt_name: str | None, input_type: str | None, side: str | None, tmp_path: Path
) -> None:
    roles = {name: Role(max_tokens=size, expansion=None, skip_ids=[]) for name, size in (("query", 8), ("document", 9))}
    manifest = save_artifact(tmp_path / "tiny", roles=roles, default_prompt_name=default).manifest
    assert role_of(manifest, prompt_name, input_type) == (roles[side] if side else None)


@given(prompts=st.dictionaries(_names, st.text(max_size=5)), default=st.none() | _names, data=st.data())
def test_a_prompt_is_one_of_the_model_s_or_empty(
    shared: Artifact, prompts: dict[str, str], default: str | None, data: st.DataObject
) -> None:
    manifest = msgspec.structs.replace(shared.manifest, prompts=prompts, default_prompt_name=default)
    name, input_type = data.draw(st.none() | _names), data.draw(st.none() | _names)
    try:
        prompt = prompt_of(manifest, name, input_type)
    except InvalidRequestError:  # of two names, they may contradict each other
        assert (name or input_type) not in prompts or (name is not None and input_type is not None)
    else:
        assert prompt in {*prompts.values(), ""}
        if name is not None:
            assert prompt == prompts[name]
        elif input_type in prompts:
            assert prompt == prompts[input_type]


@given(before=st.text(max_size=8), behind=st.text(max_size=8), texts=st.lists(st.text(max_size=8), max_size=4))
def test_a_prompt_stands_in_front_of_texts_or_around_them(before: str, behind: str, texts: list[str]) -> None:
    assume("{text}" not in before + behind)
    assert list(apply_prompt(before, texts)) == [before + text for text in texts]
    assert list(apply_prompt(before + "{text}" + behind, texts)) == [before + text + behind for text in texts]
