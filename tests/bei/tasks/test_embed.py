"""Every task over fake engines: what comes of the rows, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from bei.artifact.manifest import Artifact, Classification, Manifest, OutputInfo
from bei.core import EngineInfo, Float32Array, Int32Array, Outputs, PackedBatch, ScoreFunction
from bei.engine.fake import DIMENSION, FakeEngine
from bei.engine.postprocess import apply_function, unit_length
from bei.errors import (
    AnswerTooLargeError,
    EmptyInputError,
    InvalidImageError,
    InvalidRequestError,
    TaskNotSupportedError,
)
from bei.image.source import ImageInput
from bei.service.admission import Ticket
from bei.service.service import InferenceService
from bei.tasks import classify as classifying
from bei.tasks import embed as tasks
from bei.tasks import rerank as reranking
from bei.tasks import token_classification
from bei.tasks.embed import EmbedTask, TaskName, check_task
from bei.tasks.rerank import RerankTask
from bei.tokenizer.encoder import EncodingOptions, Input
from tests.support.artifacts import LIMITS, expected_vectors, save_artifact, tiny_tokenizer, token_ids
from tests.support.engines import sequences_of
from tests.support.services import make_service, run_async, running_service

CLS, SEP = 2, 3
HELLO, WORLD, CAT, S = (tiny_tokenizer().token_to_id(token) for token in ("hello", "world", "cat", "##s"))

Head = Callable[[Int32Array], Float32Array]


def admitted(function: Callable[..., Awaitable[Any]], task: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """``function`` of a ``task``, with a ticket of its own."""

    async def run(service: InferenceService, *args: Any, **options: Any) -> Any:
        with service.admit(["a"]) as ticket:
            return await function(service, task(*args, **options), ticket=ticket)

    return run


def checked(function: Callable[..., Awaitable[Any]], name: TaskName) -> Callable[..., Awaitable[Any]]:
    """``function`` of a checked EmbedTask, with a ticket of its own."""

    async def run(service: InferenceService, task: EmbedTask, ticket: Ticket) -> Any:
        return await function(service, check_task(service, task, name), ticket=ticket)

    return admitted(run, EmbedTask)


classify = admitted(classifying.classify, classifying.ClassifyTask)
classify_tokens = admitted(token_classification.classify_tokens, token_classification.TokenTask)
embed_inputs, embed_sparse = checked(tasks.embed_inputs, "embed"), checked(tasks.embed_sparse, "embed_sparse")
embed_tokens, rerank = checked(tasks.embed_tokens, "embed_tokens"), admitted(reranking.rerank, RerankTask.of)


class HeadEngine(FakeEngine):
    """Answers ``head(ids)`` for every sequence as output ``name``: [width], or [tokens, width] ``per_token``."""

    def __init__(self, name: str, width: int, head: Head, *, per_token: bool = False) -> None:
        super().__init__(LIMITS)
        self._name, self._head, self._per_token = name, head, per_token
        self.info = EngineInfo("fake", "fp32", "none", LIMITS, {name: width}, frozenset({name} if per_token else ()))

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        super().run(batch)
        rows = [self._head(np.array(sequence, np.int32)) for sequence in sequences_of(batch)]
        return {self._name: np.concatenate(rows) if self._per_token else np.stack(rows)}


def answer_of(
    artifact: Artifact, engine: FakeEngine, task: Callable[[InferenceService], Awaitable[Any]], **settings: Any
) -> Any:
    """What ``task`` answers over a service that lives as long as it, or raises."""
    answers = []

    async def test() -> None:
        service = make_service(artifact, engine, **settings)
        try:
            answers.append(await task(service))
        finally:
            await asyncio.get_running_loop().run_in_executor(None, service.close)

    run_async(test)
    return answers[0]


def save_classifier(
    path: Path, labels: Sequence[str], function: str, *, output: str = "logits", task: str = "classify", **fields: Any
) -> Artifact:
    return save_artifact(
        path,
        tasks=[task],
        embedding=None,
        classification=msgspec.convert({"labels": list(labels), "function": function}, Classification),
        outputs=[OutputInfo(name=output, dimension=len(labels), per_token=output.startswith("token"))],
        **fields,
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return save_artifact(tmp_path_factory.mktemp("tasks") / "tiny")


# Embeddings


def test_texts_have_the_prompt_and_token_ids_have_none(tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "tiny")
    engine = FakeEngine(LIMITS)

    async def both(service: InferenceService) -> tuple[Any, Any]:
        return await embed_inputs(service, ["cat"], prompt="query: "), await embed_inputs(service, [[2, 9, 3]])

    of_text, of_ids = answer_of(artifact, engine, both)
    assert [sequences_of(batch) for batch in engine.batches] == [[token_ids("query: cat")], [[2, 9, 3]]]
    assert of_text.num_tokens == len(token_ids("query: cat"))
    assert of_ids.num_tokens == 3


@pytest.mark.parametrize("dimensions", [None, 1, 3, 8])
@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("configured", [True, False])
def test_vectors_are_cut_first_and_normalized_as_asked_or_as_the_checkpoint_says(
    configured: bool, asked: bool | None, dimensions: int | None, tmp_path: Path
) -> None:
    artifact = save_artifact(tmp_path / "tiny", embedding={"normalize": configured})
    answer = answer_of(
        artifact,
        FakeEngine(LIMITS),
        lambda service: embed_inputs(service, ["cat", "the cat"], dimensions=dimensions, normalize=asked),
    )
    normalize = configured if asked is None else asked
    expected = expected_vectors([token_ids("cat"), token_ids("the cat")], dimensions, normalize=normalize)
    np.testing.assert_allclose(answer.vectors, expected, rtol=1e-6)
    assert answer.vectors.dtype == np.float32
    assert answer.vectors.flags.c_contiguous or dimensions  # rendered straight from memory


@pytest.mark.parametrize("dimensions", [None, 3])
def test_lengths_that_the_engine_does_not_give_are_refused(tmp_path: Path, dimensions: int | None) -> None:
    """TensorRT-LLM's class makes vectors unit length itself: what they were cannot be had, and is not made up."""
    artifact = save_artifact(tmp_path / "tiny")
    engine = msgspec.structs.replace(artifact.manifest.engine, unit_vectors=True)
    artifact = msgspec.structs.replace(artifact, manifest=msgspec.structs.replace(artifact.manifest, engine=engine))

    def embed(normalize: bool | None) -> Any:
        return answer_of(
            artifact,
            FakeEngine(LIMITS),
            lambda service: embed_inputs(service, ["cat"], dimensions=dimensions, normalize=normalize),
        )

    np.testing.assert_allclose(np.linalg.norm(embed(None).vectors, axis=1), 1, rtol=1e-6)
    with pytest.raises(InvalidRequestError, match=r"tiny gives vectors of unit length only, .* leave normalize out"):
        embed(False)


@pytest.mark.parametrize("dimensions", [0, -1, 9, 10**30])
def test_dimensions_must_be_within_the_width_and_nothing_is_run_if_not(shared: Artifact, dimensions: int) -> None:
    engine = FakeEngine(LIMITS)
    for task in (
        lambda service: embed_inputs(service, ["a"], dimensions=dimensions),
        lambda service: embed_inputs(service, [[1]], dimensions=dimensions),
    ):
        with pytest.raises(InvalidRequestError, match="from 1 to 8") as caught:
            answer_of(shared, engine, task)
        assert caught.value.param == "dimensions"
    assert engine.batches == []


@pytest.mark.parametrize("dimensions", [2, 4, 8])
def test_dimensions_of_the_matryoshka_list_and_the_full_width_are_given(dimensions: int, tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "tiny", embedding={"matryoshka_dimensions": [2, 4]})
    answer = answer_of(artifact, FakeEngine(LIMITS), lambda s: embed_inputs(s, ["a"], dimensions=dimensions))
    assert answer.vectors.shape == (1, dimensions)
    np.testing.assert_allclose(np.linalg.norm(answer.vectors, axis=1), 1.0, rtol=1e-6)


@pytest.mark.parametrize("dimensions", [1, 3, 7, 9])
def test_dimensions_outside_the_matryoshka_list_are_refused(dimensions: int, tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "tiny", embedding={"matryoshka_dimensions": [2, 4]})
    with pytest.raises(InvalidRequestError, match=f"dimensions 2, 4, 8, not {dimensions}"):
        answer_of(artifact, FakeEngine(LIMITS), lambda s: embed_inputs(s, ["a"], dimensions=dimensions))


def test_truncated_texts_are_reported(shared: Artifact) -> None:
    answer = answer_of(shared, FakeEngine(LIMITS), lambda s: embed_inputs(s, ["a", "a " * 99, "b"]))
    assert answer.truncated == [1]


# What a model cannot do

TASKS: Mapping[str, Callable[[InferenceService], Awaitable[Any]]] = {
    "embed": lambda s: embed_inputs(s, ["a"]),
    "embed_sparse": lambda s: embed_sparse(s, ["a"]),
    "embed_tokens": lambda s: embed_tokens(s, ["a"]),
    "classify": lambda s: classify(s, ["a"]),
    "rerank": lambda s: rerank(s, "a", ["b"]),
    "classify_tokens": lambda s: classify_tokens(s, ["a"]),
}


@pytest.mark.parametrize("task", list(TASKS))
def test_a_model_says_what_it_cannot_do_and_what_it_can(task: str, tmp_path: Path) -> None:
    others = [other for other in TASKS if other != task]
    artifact = save_artifact(tmp_path / "tiny", name="org/tiny", tasks=others)
    engine = FakeEngine(LIMITS)
    with pytest.raises(TaskNotSupportedError, match="org/tiny cannot ") as caught:
        answer_of(artifact, engine, TASKS[task])
    assert f"it can do: {', '.join(others)}." in str(caught.value)
    assert ("'bei build --token-embeddings' makes" in str(caught.value)) is (task == "embed_tokens")
    assert caught.value.param == "model"
    assert engine.batches == []


def test_token_ids_are_refused_by_a_model_that_does_not_embed(tmp_path: Path) -> None:
    artifact = save_classifier(tmp_path / "tiny", ["no", "yes"], "softmax")
    with pytest.raises(TaskNotSupportedError, match="cannot embed; it can do: classify"):
        answer_of(artifact, FakeEngine(LIMITS), lambda s: embed_inputs(s, [[1]]))


# Vectors of tokens, sparse vectors


def id_and_place(ids: Int32Array) -> Float32Array:
    return np.stack([ids, np.arange(1, len(ids) + 1)], axis=1).astype(np.float32)


def save_token_embedder(path: Path, *, is_unit: bool = False) -> Artifact:
    return save_artifact(
        path,
        tasks=["embed_tokens"],
        embedding=None,
        outputs=[OutputInfo(name="token_embedding", dimension=2, per_token=True, unit_length=is_unit)],
    )


@pytest.mark.parametrize("is_unit", [True, False])
def test_every_token_has_a_vector_special_ones_too(is_unit: bool, tmp_path: Path) -> None:
    artifact = save_token_embedder(tmp_path / "tiny", is_unit=is_unit)
    engine = HeadEngine("token_embedding", 2, id_and_place, per_token=True)
    answer = answer_of(artifact, engine, lambda s: embed_tokens(s, ["cats", "hello world cat"], prompt="the "))
    for text, vectors in zip(["the cats", "the hello world cat"], answer.vectors, strict=True):
        ids = np.array(token_ids(text), np.int32)
        expected = unit_length(id_and_place(ids)) if is_unit else id_and_place(ids)
        np.testing.assert_allclose(vectors, expected, rtol=1e-6)
    assert answer.num_tokens == len(token_ids("the cats")) + len(token_ids("the hello world cat"))


def test_counting_dropped_tokens_does_not_count_as_a_larger_answer(tmp_path: Path) -> None:
    """The limit of an answer holds for the tokens that have a vector, not for those that were cut off."""
    engine = HeadEngine("token_embedding", 2, id_and_place, per_token=True)
    texts = ["cat " * 99]

    def check(num_tokens: int) -> None:
        if num_tokens > LIMITS.max_seq_len:
            raise AnswerTooLargeError(f"{num_tokens} tokens")

    async def reported(service: InferenceService) -> Mapping[int, int | None]:
        with service.admit(texts) as ticket:
            ticket.check_tokens = check
            task = check_task(service, EmbedTask(texts, failed={}), "embed_tokens")
            answer = await tasks.embed_tokens(service, task, ticket=ticket)
            return await tasks.dropped_tokens(service, task, answer, ticket=ticket)

    dropped = answer_of(save_token_embedder(tmp_path / "tiny"), engine, reported)
    assert dropped == {0: 99 + 2 - LIMITS.max_seq_len}


def test_sparse_vectors_hold_the_weights_above_zero(tmp_path: Path) -> None:
    artifact = save_artifact(
        tmp_path / "tiny", tasks=["embed_sparse"], embedding=None, outputs=[OutputInfo(name="sparse", dimension=6)]
    )
    engine = HeadEngine("sparse", 6, lambda ids: np.array([0, 0.5, -1, 0, 1e-6, len(ids)], np.float32))
    (indices, weights), _ = answer_of(artifact, engine, lambda s: embed_sparse(s, ["a", "a b"])).vectors
    assert (indices.dtype, weights.dtype) == (np.int32, np.float32)
    assert indices.tolist() == [1, 4, 5]
    np.testing.assert_allclose(weights, [0.5, 1e-6, 3])


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, [2]), (2, [1, 2]), (3, [1, 2, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_top_k_keeps_the_largest_weights_by_ascending_index(tmp_path: Path, top_k: int, kept: list[int]) -> None:
    weights = np.array([0.5, 1, 2, 1, 0, -3], np.float32)
    artifact = save_artifact(
        tmp_path / "tiny", tasks=["embed_sparse"], embedding=None, outputs=[OutputInfo(name="sparse", dimension=6)]
    )
    engine = HeadEngine("sparse", 6, lambda _: weights)
    [(indices, largest)] = answer_of(artifact, engine, lambda s: embed_sparse(s, ["a"], top_k=top_k)).vectors
    assert indices.tolist() == kept
    assert largest.tolist() == weights[kept].tolist()


def lexical(path: Path, head: Head, texts: Sequence[str]) -> list[dict[int, float]]:
    """Lexical weights (BGE-M3) of ``texts`` over an engine that gives each token the weight of ``head``."""
    artifact = save_artifact(
        path,
        tasks=["embed_sparse"],
        embedding=None,
        outputs=[OutputInfo(name="token_weights", dimension=1, per_token=True)],
    )
    engine = HeadEngine("token_weights", 1, head, per_token=True)
    answer = answer_of(artifact, engine, lambda s: embed_sparse(s, texts))
    return [dict(zip(indices.tolist(), weights.tolist(), strict=True)) for indices, weights in answer.vectors]


def test_lexical_weights_leave_special_tokens_out_and_keep_the_largest_of_repeated_ones(tmp_path: Path) -> None:
    def head(ids: Int32Array) -> Float32Array:
        return np.arange(len(ids), 0, -1, dtype=np.float32)[:, None]

    weights = lexical(tmp_path / "tiny", head, ["cats hello cat", ""])
    assert weights == [{CAT: 5, S: 4, HELLO: 3}, {}]


def test_lexical_weights_of_zero_are_no_entries(tmp_path: Path) -> None:
    weights = lexical(tmp_path / "tiny", lambda ids: (ids == CAT).astype(np.float32)[:, None] - 0.5, ["cat hello"])
    assert weights == [{CAT: 0.5}]


# Classification


def logits_of(ids: Int32Array) -> Float32Array:
    return np.array([len(ids), ids[1] - 6, -3], np.float32)


@pytest.mark.parametrize("function", get_args(ScoreFunction))
@pytest.mark.parametrize("raw", [True, False])
def test_labels_are_scored_by_the_checkpoint_s_function_or_raw(function: Any, raw: bool, tmp_path: Path) -> None:
    artifact = save_classifier(tmp_path / "tiny", ["a", "b", "c"], function)
    inputs: list[Input] = ["cat", ("cat", "hello")]
    answer = answer_of(artifact, HeadEngine("logits", 3, logits_of), lambda s: classify(s, inputs, raw=raw))
    pair = tiny_tokenizer().encode("cat", "hello").ids
    logits = np.stack([logits_of(np.array(ids, np.int32)) for ids in (token_ids("cat"), pair)])
    np.testing.assert_allclose(answer.values, logits if raw else apply_function(logits, function), rtol=1e-6)
    assert answer.labels == ["a", "b", "c"]
    assert answer.num_tokens == 3 + 5


def test_pairs_reach_the_classifier_with_their_token_types(tmp_path: Path) -> None:
    artifact = save_classifier(tmp_path / "tiny", ["a"], "none")
    engine = HeadEngine("logits", 1, lambda ids: ids[:1].astype(np.float32))
    answer_of(artifact, engine, lambda s: classify(s, [("cat", "hello world")]))
    assert engine.batches[0].token_type_ids is not None
    assert engine.batches[0].token_type_ids.tolist() == [0, 0, 0, 1, 1, 1]


def save_ner(path: Path) -> Artifact:
    return save_classifier(path, ["O", "B-CAT", "I-CAT"], "softmax", output="token_logits", task="classify_tokens")


def tag_logits(ids: Int32Array) -> Float32Array:
    """Cats and what follows of the word are entities."""
    logits = np.zeros((len(ids), 3), np.float32)
    logits[:, 0] = 4
    logits[ids == CAT, 1] = 8
    logits[ids == S, 2] = 8
    return logits


def test_tokens_are_labelled_and_joined_to_entities(tmp_path: Path) -> None:
    engine = HeadEngine("token_logits", 3, tag_logits, per_token=True)
    texts = ["hello cats", "world", "Cat  cats"]
    answer = answer_of(save_ner(tmp_path / "tiny"), engine, lambda s: classify_tokens(s, texts, aggregation="simple"))
    found = [
        [(e.text, e.label, e.start, e.end) for e in entities] for entities in map(answer.entities_of, range(len(texts)))
    ]
    assert found == [[("cats", "CAT", 6, 10)], [], [("Cat", "CAT", 0, 3), ("cats", "CAT", 5, 9)]]
    scores = apply_function(tag_logits(np.array([CAT, S], np.int32)), "softmax")
    np.testing.assert_allclose(answer.entities_of(0)[0].score, scores.max(axis=1).mean(), rtol=1e-6)


def test_token_scores_may_be_raw_and_not_aggregated(tmp_path: Path) -> None:
    engine = HeadEngine("token_logits", 3, tag_logits, per_token=True)
    answer = answer_of(save_ner(tmp_path / "tiny"), engine, lambda s: classify_tokens(s, ["hello cats"], raw=True))
    tokens = answer.entities_of(0)
    assert [(token.text, token.label, token.score) for token in tokens] == [
        ("hello", "O", 4.0),
        ("cat", "B-CAT", 8.0),
        ("s", "I-CAT", 8.0),
    ]


def test_tokens_of_the_end_of_a_long_text_have_their_place_in_it(tmp_path: Path) -> None:
    engine = HeadEngine("token_logits", 3, tag_logits, per_token=True)
    text = "hello " * 20_000 + "cats"
    options = EncodingOptions(direction="left")
    answer = answer_of(
        save_ner(tmp_path / "tiny"), engine, lambda s: classify_tokens(s, [text], aggregation="first", options=options)
    )
    (entity,) = answer.entities_of(0)
    assert (entity.text, entity.start, entity.end) == ("cats", 120_000, 120_004)
    assert answer.truncated == [0]


# Reranking


@pytest.mark.parametrize("is_token", [None, False, True], ids=["no tower", "a vector an image", "a vector a token"])
@pytest.mark.parametrize("name", ["embed", "embed_tokens"])
def test_an_image_that_has_no_such_vector_costs_the_others_nothing_in_a_partial_answer(
    name: TaskName, is_token: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model has a tower it cost the request its answer, where it has none it did not."""
    image = ImageInput(b"", "input")
    artifact = save_artifact(
        tmp_path / "tiny",
        tasks=["embed", "embed_tokens"],
        outputs=[
            OutputInfo(name="embedding", dimension=DIMENSION),
            OutputInfo(name="token_embedding", dimension=2, per_token=True),
        ],
    )
    tower = None if is_token is None else SimpleNamespace(sequence=is_token)
    has_vector = is_token is (name == "embed_tokens")

    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            monkeypatch.setattr(Manifest, "image_tower", property(lambda _: tower))
            for failed in ({}, {2: EmptyInputError("inputs 2")}):
                found = check_task(service, EmbedTask(["cat", image, "", image], failed=failed), name).task.failed
                assert found is not None
                assert found.keys() - failed.keys() == (set() if has_vector else {1, 3})
                assert all(isinstance(error, InvalidImageError) for at, error in found.items() if at not in failed)
            whole = EmbedTask(["cat", image])
            if has_vector:
                check_task(service, whole, name)
            else:
                with pytest.raises(InvalidImageError, match=r"reads no images|Images have"):
                    check_task(service, whole, name)

    run_async(test)
