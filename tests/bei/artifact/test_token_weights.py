"""Sparse vectors that are looked up: the table, the answers, and that the engine is not used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.artifact.manifest import TOKEN_WEIGHTS, Artifact, OutputInfo
from bei.artifact.sides import Role, Routes, Side
from bei.artifact.store import load, save
from bei.artifact.token_weights import read_token_weights, write_token_weights
from bei.core import Float32Array
from bei.engine.fake import FakeEngine
from bei.engine.sparse import looked_up
from bei.errors import ArtifactManifestError, BeiError, InputTooLongError, InvalidRequestError
from bei.tasks.embed import EmbedTask, SparseEmbeddings, check_task, embed_sparse
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions
from bei.tokenizer.prompts import choose_prompt, role_of, with_role
from tests.bei.server.kinds import KindEngine
from tests.support.artifacts import VOCAB_SIZE, save_artifact, tiny_tokenizer
from tests.support.services import make_service, run_async

WEIGHTS = np.arange(VOCAB_SIZE, dtype=np.float32) % 5 - 1
MAX_TOKENS = 6
QUERY = Role(max_tokens=MAX_TOKENS, expansion=None, skip_ids=[], table=True)
ROLES: dict[Side, Role] = {"query": QUERY, "document": Role(max_tokens=None, expansion=None, skip_ids=[])}


def save_table(path: Path, weights: Float32Array = WEIGHTS, **fields: Any) -> Artifact:
    """A sparse model whose queries are looked up in ``weights``."""
    made = save_artifact(
        path,
        tasks=["embed_sparse"],
        outputs=[OutputInfo(name="sparse", dimension=VOCAB_SIZE)],
        embedding=None,
        output="sparse",
        canary=[0.0] * VOCAB_SIZE,
        prompts={"query": "", "document": ""},
    )
    write_token_weights(path / TOKEN_WEIGHTS, weights)
    roles = {"roles": ROLES, "routes": Routes(default="document", absent=[])}
    save(path, msgspec.structs.replace(made.manifest, **{**roles, **fields}), made.certificate)
    return load(path)


def ids_of(text: str) -> list[int]:
    ids: list[int] = tiny_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def expected(ids: list[int]) -> dict[int, float]:
    """As SparseStaticEmbedding: the weight of whatever is there."""
    present = np.zeros(VOCAB_SIZE)
    present[ids] = 1
    row = present * WEIGHTS
    return {int(index): float(row[index]) for index in np.flatnonzero(row)}


def answered(artifact: Artifact, inputs: list[Any], side: str = "query", **options: Any) -> tuple[Any, FakeEngine]:
    engine = KindEngine({"sparse": VOCAB_SIZE})
    answer: SparseEmbeddings

    async def ask() -> None:
        nonlocal answer
        service = make_service(artifact, engine)
        try:
            with service.admit(inputs) as ticket:
                task = check_task(service, EmbedTask(inputs, input_type=side, **options), "embed_sparse")
                answer = await embed_sparse(service, task, ticket=ticket)
            assert service.num_open == 0
        finally:
            service.close()

    run_async(ask)
    return answer, engine


def as_dicts(answer: SparseEmbeddings) -> list[dict[int, float]]:
    return [dict(zip(map(int, indices), map(float, weights), strict=True)) for indices, weights in answer.vectors]


# The table.


@given(ids=st.lists(st.integers(0, 19), min_size=1), weights=st.lists(st.integers(-3, 3), min_size=20, max_size=20))
def test_each_token_counts_once_and_only_where_it_weighs_something(ids: list[int], weights: list[int]) -> None:
    table = np.array(weights, np.float32)
    indices, values = looked_up(np.array(ids, np.int32), table)
    row = np.zeros(20, np.float32)
    row[indices] = values
    np.testing.assert_array_equal(row, [weights[token] * (token in ids) for token in range(20)])
    assert indices.tolist() == sorted({token for token in ids if weights[token]})
    assert indices.dtype == np.int32
    assert values.dtype == np.float32


@pytest.mark.parametrize(
    "weights",
    [WEIGHTS[:-1], WEIGHTS[None], WEIGHTS.astype(np.float64), np.full(VOCAB_SIZE, np.nan, np.float32), None],
)
def test_a_file_that_is_no_table_of_the_vocabulary_is_refused(weights: Float32Array | None, tmp_path: Path) -> None:
    path = tmp_path / TOKEN_WEIGHTS
    if weights is None:
        path.write_bytes(b"no table")
    else:
        write_token_weights(path, weights)
    with pytest.raises(ArtifactManifestError, match=r"Build the artifact again"):
        read_token_weights(path, VOCAB_SIZE)


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / TOKEN_WEIGHTS, np.array([{}] * VOCAB_SIZE, object), allow_pickle=True)
    with pytest.raises(ArtifactManifestError, match="finite float32 weights"):
        read_token_weights(tmp_path / TOKEN_WEIGHTS, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"({VOCAB_SIZE},)", "(((("),  # numpy's tokenizer of Python has errors of its own
        (f"({VOCAB_SIZE},)", "(" * 50),
        (f"({VOCAB_SIZE},)", f"({10**15},)"),  # a petabyte is not allocated
        ("'<f4'", "'|O8'"),
        ("'descr'", "b'descr'"),
    ],
)
def test_a_damaged_header_is_refused(old: str, new: str, tmp_path: Path) -> None:
    path = tmp_path / TOKEN_WEIGHTS
    write_token_weights(path, WEIGHTS)
    header, data = path.read_bytes().split(b"\n", 1)
    assert old.encode() in header
    changed = header.replace(old.encode(), new.encode()).rstrip()
    path.write_bytes(changed.ljust(len(header)) + b"\n" + data)
    with pytest.raises(ArtifactManifestError, match="weights"):
        read_token_weights(path, VOCAB_SIZE)


def test_an_archive_of_arrays_is_no_table(tmp_path: Path) -> None:
    with (tmp_path / TOKEN_WEIGHTS).open("wb") as file:
        np.savez(file, WEIGHTS)
    with pytest.raises(ArtifactManifestError, match="is not a table of weights"):
        read_token_weights(tmp_path / TOKEN_WEIGHTS, VOCAB_SIZE)


# Answers of a model.


def test_queries_are_looked_up_and_the_engine_is_not_asked(tmp_path: Path) -> None:
    texts = ["the cats, the cat!", "hello world", "[CLS] hello"]
    answer, engine = answered(save_table(tmp_path / "table"), texts)
    assert as_dicts(answer) == [expected(ids_of(text)[:MAX_TOKENS]) for text in texts]
    assert answer.truncated == [0]  # seven tokens
    assert answer.num_tokens == sum(min(MAX_TOKENS, len(ids_of(text))) for text in texts)
    assert engine.batches == []


def test_documents_are_the_engines(tmp_path: Path) -> None:
    answer, engine = answered(save_table(tmp_path / "table"), ["hello"], "document")
    assert [len(batch.cu_seqlens) - 1 for batch in engine.batches] == [1]
    assert as_dicts(answer) != [expected(ids_of("hello"))]


def test_prompts_count_as_text_and_token_ids_are_looked_up_as_they_are(tmp_path: Path) -> None:
    answer, engine = answered(save_table(tmp_path / "table"), ["cat", [5, 5, 7]], prompt="query: ")
    assert as_dicts(answer) == [expected(ids_of("query: cat")), expected([5, 7])]
    assert engine.batches == []


def test_the_weights_farthest_from_zero_are_kept(tmp_path: Path) -> None:
    ids = [9, 10, 13]  # 3, -1, 2
    (answer, _), (one, _) = (answered(save_table(tmp_path / str(k)), [ids], top_k=k) for k in (2, 1))
    assert as_dicts(answer) == [{9: 3.0, 13: 2.0}]
    assert as_dicts(one) == [{9: 3.0}]


def test_one_bad_input_costs_the_others_nothing(tmp_path: Path) -> None:
    wrong: Mapping[int, BeiError] = {}
    answer, _ = answered(save_table(tmp_path / "table"), ["hello", " ", [VOCAB_SIZE], "cat"], failed=wrong)
    assert as_dicts(answer) == [expected(ids_of("hello")), {}, {}, expected(ids_of("cat"))]
    assert {index: type(error) for index, error in answer.errors.items()} == dict.fromkeys((1, 2), InvalidRequestError)


def test_a_text_that_may_not_be_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputTooLongError, match="more than the 6 tokens it may have"):
        answered(save_table(tmp_path / "table"), ["a " * 7], options=EncodingOptions(truncate=False))


# Which side a text is on.


@pytest.mark.parametrize(
    ("default", "prompt_name", "input_type", "is_looked_up"),
    [
        ("document", None, None, False),
        ("query", None, None, True),
        ("document", "query", None, True),
        ("document", None, "search_query", True),
        ("query", None, "passage", False),
        ("query", "document", "query", False),  # a name is more than a side
        ("query", "mine", None, True),  # no side: the library's default
    ],
)
def test_the_side_is_the_named_one_or_the_routers_default(
    default: str, prompt_name: str | None, input_type: str | None, is_looked_up: bool, tmp_path: Path
) -> None:
    routes = Routes(default=default, absent=[])
    manifest = save_artifact(tmp_path / "tiny", roles=ROLES, routes=routes, prompts={"query": "", "mine": ""}).manifest
    role = role_of(manifest, prompt_name, input_type)
    assert role is ROLES["query" if is_looked_up else "document"]
    assert with_role(AS_CONFIGURED, role).add_special_tokens is not is_looked_up


def test_a_side_that_nobody_names_is_said_in_a_warning(tmp_path: Path) -> None:
    manifest = save_table(tmp_path / "table").manifest
    assert (
        choose_prompt(manifest).warning == "tiny took the texts for the side document: say by input_type what they are"
    )
    assert choose_prompt(manifest, input_type="query").warning is None


def test_a_side_has_to_be_named_where_the_router_has_no_default(tmp_path: Path) -> None:
    manifest = save_artifact(tmp_path / "tiny", routes=Routes(default=None, absent=[])).manifest
    with pytest.raises(InvalidRequestError, match="has no default: say by input_type which of the two") as caught:
        choose_prompt(manifest)
    assert caught.value.param == "input_type"
    assert choose_prompt(manifest, input_type="query").text == ""
    for names in ({"input_type": "classification"}, {"prompt_name": "clustering"}):  # of neither side
        with pytest.raises(InvalidRequestError, match="which of the two"):
            choose_prompt(manifest, **names)


@pytest.mark.parametrize(
    "asked",
    [
        {"input_type": "query"},
        {"input_type": "search_query"},
        {"prompt_name": "query"},
        {"input_type": "image"},
        {"input_type": "query", "prompt": "mine: "},
    ],
)
def test_texts_of_a_route_that_is_not_there_are_refused(asked: dict[str, str], tmp_path: Path) -> None:
    routes = Routes(default="document", absent=["query", "image"])
    prompts = {"query": "", "document": ""}
    manifest = save_artifact(tmp_path / "tiny", routes=routes, prompts=prompts).manifest
    with pytest.raises(
        InvalidRequestError, match=r"does not read '.*': it was built with one route of its Router"
    ) as info:
        choose_prompt(manifest, **asked)
    assert info.value.param in asked
    assert [choose_prompt(manifest, input_type=kind).text for kind in ("document", "passage")] == ["", ""]
    assert choose_prompt(manifest).text == ""
