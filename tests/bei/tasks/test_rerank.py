"""Reranking: prompts, templates, and the memory that a long query takes."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from bei.artifact.image_sequence import ImageSequence
from bei.artifact.manifest import Artifact, RerankTemplate
from bei.core import Float32Array, Int32Array
from bei.engine.postprocess import apply_function
from bei.errors import InvalidRequestError
from bei.image.source import ImageInput, ImagesInText
from bei.tasks.rerank import pairs_to_read
from bei.tokenizer.prompts import apply_default_prompt
from tests.bei.tasks.test_embed import HeadEngine, answer_of, classify, rerank, save_classifier
from tests.support.artifacts import LIMITS, tiny_tokenizer
from tests.support.engines import sequences_of


def save_reranker(path: Path, template: RerankTemplate | None = None) -> Artifact:
    return save_classifier(path, ["LABEL_0"], "none", task="rerank", rerank_template=template)


def length_head(ids: Int32Array) -> Float32Array:
    return np.array([len(ids) - 6], np.float32)


@pytest.mark.parametrize("raw", [True, False])
def test_documents_are_scored_against_the_query_by_sigmoid_or_raw(raw: bool, tmp_path: Path) -> None:
    documents = ["cat", "the cat", "hello hello hello"]
    engine = HeadEngine("logits", 1, length_head)
    answer = answer_of(save_reranker(tmp_path / "tiny"), engine, lambda s: rerank(s, "cat", documents, raw=raw))
    logits = np.array([[-1.0], [0.0], [1.0]], np.float32)
    np.testing.assert_allclose(answer.values, logits if raw else apply_function(logits, "sigmoid"), rtol=1e-6)
    ran = [ids for batch in engine.batches for ids in sequences_of(batch)]
    assert sorted(ran) == sorted(tiny_tokenizer().encode("cat", document).ids for document in documents)


@pytest.mark.parametrize("count", [5, 500])
def test_many_pairs_with_images_are_laid_out_off_the_event_loop(count: int) -> None:
    """Those of 8 MB took half a second, twice."""
    threads = set()
    images = ImageSequence(before=[], token_id=5, after=[], width=8, around=("<", ">"))

    class Model:
        """A reranker that reads images."""

        name = "reads"

        @property
        def manifest(self) -> Any:
            threads.add(threading.current_thread())
            template = RerankTemplate(prefix="", body="{query} {document}", suffix="", instruction="")
            return SimpleNamespace(image_tower=SimpleNamespace(sequence=images), rerank_template=template)

    pairs = [("query", ImageInput(str(place))) for place in range(count)]
    *read, last = asyncio.run(pairs_to_read(cast(Any, Model()), [*pairs, ("query", "text")]))
    assert [one.images for one in read if isinstance(one, ImagesInText)] == [(image,) for _, image in pairs]
    assert last == ("query", "text")
    assert (threads == {threading.main_thread()}) is (count == 5)


def test_the_default_prompt_stands_in_front_of_queries_and_of_single_texts(tmp_path: Path) -> None:
    prompts = {"query": "hello ", "round": "the {text}!"}
    for name, query in (("query", "hello cat"), ("round", "the cat!")):
        fields: dict[str, Any] = {"prompts": prompts, "default_prompt_name": name}
        artifact = save_classifier(tmp_path / query, ["LABEL_0"], "none", task="classify", **fields)
        engine = HeadEngine("logits", 1, length_head)
        answer_of(artifact, engine, lambda s: classify(s, [("cat", "world"), "cat"]))
        expected = [tiny_tokenizer().encode(query, "world").ids, tiny_tokenizer().encode(query).ids]
        assert sorted(ids for batch in engine.batches for ids in sequences_of(batch)) == sorted(expected)
        artifact = save_classifier(tmp_path / f"{query} 2", ["LABEL_0"], "none", task="rerank", **fields)
        engine = HeadEngine("logits", 1, length_head)
        answer_of(artifact, engine, lambda s: rerank(s, "cat", ["world"]))
        assert [ids for batch in engine.batches for ids in sequences_of(batch)] == expected[:1]


def test_a_long_query_with_a_prompt_is_in_memory_once(tmp_path: Path) -> None:
    manifest = msgspec.structs.replace(
        save_reranker(tmp_path / "tiny").manifest, prompts={"query": "hello "}, default_prompt_name="query"
    )
    query = "cat " * 1000
    led = apply_default_prompt(manifest, [(query, str(index)) for index in range(50)])
    assert len({id(pair[0]) for pair in led}) == 1


def test_an_instruction_for_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    artifact = save_reranker(tmp_path / "tiny")
    with pytest.raises(InvalidRequestError, match="takes no instruction: leave it out") as caught:
        answer_of(artifact, HeadEngine("logits", 1, length_head), lambda s: rerank(s, "a", ["b"], instruction="c"))
    assert caught.value.param == "instruction"


TEMPLATE = RerankTemplate(prefix="the ", body="{instruction} {query}: {document}", suffix="!", instruction="embedding")


def ids_of(text: str) -> list[int]:
    ids: list[int] = tiny_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize(("instruction", "filled"), [(None, "embedding"), ("hello", "hello"), ("", "")])
def test_a_template_is_filled_and_framed(instruction: str | None, filled: str, tmp_path: Path) -> None:
    engine = HeadEngine("logits", 1, length_head)
    artifact = save_reranker(tmp_path / "tiny", TEMPLATE)
    answer_of(artifact, engine, lambda s: rerank(s, "cat", ["world"], instruction=instruction))
    assert sequences_of(engine.batches[0]) == [[*ids_of("the"), *ids_of(f"{filled} cat: world"), *ids_of("!")]]


@pytest.mark.parametrize("part", ["{query}", "{document}", "{instruction}", r"\1", "{{", "{0}"])
def test_what_looks_like_a_slot_in_a_query_or_document_stays_as_it_is(part: str, tmp_path: Path) -> None:
    engine = HeadEngine("logits", 1, length_head)
    template = msgspec.structs.replace(TEMPLATE, body="{query}:{document}")
    answer_of(save_reranker(tmp_path / "tiny", template), engine, lambda s: rerank(s, part, [part]))
    framed = [*ids_of("the"), *ids_of(f"{part}:{part}")[: LIMITS.max_seq_len - 2], *ids_of("!")]
    assert sequences_of(engine.batches[0]) == [framed]


def test_a_long_query_does_not_stand_in_memory_once_for_each_document(tmp_path: Path) -> None:
    artifact = save_reranker(tmp_path / "tiny", TEMPLATE)
    tracemalloc.start()
    try:
        answer_of(
            artifact, HeadEngine("logits", 1, length_head), lambda s: rerank(s, "cat " * 75_000, ["world"] * 1000)
        )
        assert tracemalloc.get_traced_memory()[1] < 64e6
    finally:
        tracemalloc.stop()


def test_a_long_document_is_cut_and_the_template_s_end_is_not(tmp_path: Path) -> None:
    engine = HeadEngine("logits", 1, length_head)
    documents = ["world", "world " * 50]
    answer = answer_of(save_reranker(tmp_path / "tiny", TEMPLATE), engine, lambda s: rerank(s, "cat", documents))
    longest = max((ids for batch in engine.batches for ids in sequences_of(batch)), key=len)
    assert len(longest) == LIMITS.max_seq_len
    assert longest[-1:] == ids_of("!")
    assert answer.truncated == [1]
