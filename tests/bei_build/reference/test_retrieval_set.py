"""The bundled retrieval set: models get it as the server encodes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from bei.artifact.manifest import TOKENIZER, Artifact, Embedding, Manifest, OutputInfo, RerankTemplate
from bei.artifact.sides import Role
from bei.core import Encoding, Expansion
from bei.errors import ConfigError
from bei.tokenizer.encoder import EncodingOptions, TextEncoder
from bei.tokenizer.prompts import apply_prompt, with_role
from bei.tokenizer.special_tokens import TextFrame
from bei.tokenizer.templates import PairTemplate
from bei.verification.retrieval import RetrievalQuestions
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.reference.held_out import held_out_texts
from bei_build.reference.retrieval_set import (
    NUM_CANDIDATES,
    RetrievalSet,
    bundled_set,
    check_ranks,
    ranking_output,
    retrieval_questions,
)
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import DenseSpec
from tests.support.builds import build_artifact
from tests.support.checkpoints import HIDDEN, save_checkpoint

# The set.


def test_the_set_is_small_and_its_texts_are_its_own() -> None:
    found = bundled_set()
    assert (len(found.queries), len(found.documents), len(found.grades)) == (150, 150, 150)
    texts = [*found.queries, *found.documents]
    assert len(set(texts)) == len(texts)
    assert not set(texts) & set(held_out_texts())
    assert max(map(len, texts)) < 250
    assert sum(not text.isascii() for text in texts) >= 8
    assert len((resources.files("bei_build") / "data" / "retrieval.json").read_bytes()) < 80_000


def test_each_query_has_an_answer_and_hard_negatives_beside_it() -> None:
    found = bundled_set()
    for grades in found.grades:
        assert set(grades.values()) <= {1, 2}
        assert 2 in grades.values()
        groups = {document // 5 for document in grades}
        assert len(groups) == 1
        assert len(grades) < 5  # a subject has five documents
    answered = [document for grades in found.grades for document, grade in grades.items() if grade == 2]
    # Each document is an answer once, so the order of ties has no effect.
    assert sorted(answered) == list(range(len(found.documents)))


# Encoding of the questions.

SMALL = RetrievalSet(
    queries=("the cat", "who sat?", "hello"),
    documents=("A cat sat on the mat.", "The mat.", "Hello world!", "worlds", "sitting", "cats", "a, b", "mats"),
    grades=({0: 2, 5: 1}, {0: 1, 4: 2}, {2: 2}),
)


@pytest.fixture(scope="module")
def spec(bert: Path) -> ModelSpec:
    return read_checkpoint(locate(str(bert))).spec


@pytest.fixture(scope="module")
def tokenizer(bert_artifact: Artifact) -> Tokenizer:
    return Tokenizer.from_file(str(bert_artifact.path / TOKENIZER))


Ask = Callable[..., RetrievalQuestions]


@pytest.fixture
def ask(bert_artifact: Artifact, spec: ModelSpec, tokenizer: Tokenizer) -> Ask:
    """The questions for the artifact with other fields in its manifest."""

    def questions(asked: RetrievalSet = SMALL, spec: ModelSpec = spec, **fields: Any) -> RetrievalQuestions:
        manifest = msgspec.structs.replace(bert_artifact.manifest, **fields)
        found = retrieval_questions(manifest, spec, tokenizer, asked)
        assert found is not None
        return found

    return questions


@pytest.fixture(scope="module")
def encoder(bert_artifact: Artifact) -> TextEncoder:
    return TextEncoder(bert_artifact.path / TOKENIZER, bert_artifact.manifest.max_seq_len)


def ids_of(encodings: list[Encoding]) -> list[list[int]]:
    return [encoding.input_ids.tolist() for encoding in encodings]


def logits(manifest: Manifest) -> dict[str, Any]:
    return {
        "tasks": ["rerank", "classify"],
        "outputs": [OutputInfo(name="logits", dimension=1)],
        "embedding": None,
        "max_seq_len": manifest.max_seq_len,
    }


@pytest.mark.parametrize(
    ("prompts", "default", "query", "document"),
    [
        ({}, None, "", ""),
        ({"query": "q: ", "passage": "p: "}, None, "q: ", "p: "),
        ({"search_query": "q: "}, None, "q: ", ""),
        ({"query": "<{text}>"}, "query", "<{text}>", ""),
        ({"sts": "s: "}, "sts", "s: ", "s: "),
        ({"sts": "s: "}, None, "", ""),
    ],
    ids=["none", "both sides", "queries only", "around", "one for all", "none asked"],
)
def test_embedders_read_texts_with_the_prompts_of_their_side(
    prompts: dict[str, str], default: str | None, query: str, document: str, ask: Ask, encoder: TextEncoder
) -> None:
    found = ask(prompts=prompts, default_prompt_name=default)
    texts = [*apply_prompt(query, SMALL.queries), *apply_prompt(document, SMALL.documents)]
    assert ids_of(found.encodings) == ids_of(encoder.encode(texts))
    ranking = found.ranking
    assert (ranking.output, ranking.num_documents, ranking.candidates) == ("embedding", 8, None)
    assert ranking.grades == list(SMALL.grades)


@pytest.mark.parametrize(
    ("named", "normalize", "similarity", "unit_length"),
    [
        (None, True, "cosine", True),
        (None, False, "cosine", False),
        ("dot", False, "dot", False),
        ("euclidean", True, "euclidean", True),
    ],
)
def test_vectors_are_compared_as_the_manifest_says(
    named: str | None, normalize: bool, similarity: str, unit_length: bool, ask: Ask
) -> None:
    embedding = Embedding(
        pooling="mean", normalize=normalize, similarity=named, matryoshka_dimensions=None, int8_largest=None
    )
    ranking = ask(embedding=embedding).ranking
    assert (ranking.similarity, ranking.unit_length) == (similarity, unit_length)


def test_a_prompt_that_is_not_pooled_is_left_out_as_the_server_does(
    ask: Ask, spec: ModelSpec, encoder: TextEncoder
) -> None:
    found = ask(spec=replace(spec, pools_prompt=False), prompts={"query": "the cat: "})
    expected = encoder.encode(apply_prompt("the cat: ", SMALL.queries), EncodingOptions(unpooled_prompt="the cat: "))
    assert [one.num_unpooled for one in found.encodings] == [*(one.num_unpooled for one in expected), *[0] * 8]
    assert expected[0].num_unpooled > 1


def test_late_interaction_reads_each_side_in_its_role(ask: Ask, encoder: TextEncoder) -> None:
    roles = {
        "query": Role(max_tokens=9, expansion=Expansion(4, 8, attended=False), skip_ids=[]),
        "document": Role(max_tokens=7, expansion=None, skip_ids=[5, 9]),
    }
    outputs = [OutputInfo(name="token_embedding", dimension=8, per_token=True, unit_length=True)]
    found = ask(
        tasks=["embed_tokens"], outputs=outputs, embedding=None, roles=roles, prompts={"query": "q", "document": "a"}
    )
    expected = [
        one
        for role, prompt, texts in (("query", "q", SMALL.queries), ("document", "a", SMALL.documents))
        for one in encoder.encode(apply_prompt(prompt, texts), with_role(EncodingOptions(), roles[role]))
    ]
    assert ids_of(found.encodings) == ids_of(expected)
    assert [one.num_keys for one in found.encodings] == [one.num_keys for one in expected]
    ranking = found.ranking
    assert (ranking.output, ranking.unit_length) == ("token_embedding", True)
    assert (ranking.query_skip_ids, ranking.document_skip_ids) == ([], [5, 9])


def test_lexical_weights_leave_special_tokens_out(ask: Ask, encoder: TextEncoder) -> None:
    outputs = [OutputInfo(name="token_weights", dimension=1, per_token=True)]
    ranking = ask(tasks=["embed_sparse"], outputs=outputs, embedding=None).ranking
    assert set(ranking.query_skip_ids) == set(ranking.document_skip_ids) == set(encoder.special_ids)


def test_rerankers_read_pairs_of_each_query_and_its_candidates(
    ask: Ask, bert_artifact: Artifact, encoder: TextEncoder
) -> None:
    found = ask(bundled_set(), **logits(bert_artifact.manifest))
    candidates = found.ranking.candidates
    assert candidates is not None
    everything = bundled_set()
    assert found.ranking.grades == list(everything.grades[::3])
    for grades, documents in zip(found.ranking.grades, candidates, strict=True):
        assert len(set(documents)) == len(documents) == NUM_CANDIDATES
        assert set(grades) <= set(documents)
        assert {5 * (min(grades) // 5) + place for place in range(5)} <= set(documents)  # its whole subject
    pairs = [(everything.queries[0], everything.documents[document]) for document in candidates[0]]
    expected = encoder.encode(pairs)
    assert ids_of(found.encodings[:NUM_CANDIDATES]) == ids_of(expected)
    for ours, theirs in zip(found.encodings, expected, strict=False):
        assert theirs.token_type_ids is not None
        np.testing.assert_array_equal(ours.token_type_ids, theirs.token_type_ids)


def test_rerankers_read_queries_behind_the_default_prompt(
    ask: Ask, bert_artifact: Artifact, encoder: TextEncoder
) -> None:
    prompts = {"prompts": {"a": "the mat: ", "b": "a"}, "default_prompt_name": "a"}
    found = ask(**prompts, **logits(bert_artifact.manifest))
    pairs = [(f"the mat: {SMALL.queries[0]}", document) for document in SMALL.documents]
    assert ids_of(found.encodings[: len(pairs)]) == ids_of(encoder.encode(pairs))


def test_language_models_read_pairs_in_their_template(ask: Ask, bert_artifact: Artifact) -> None:
    template = RerankTemplate(
        prefix="[CLS] the", body="{instruction}: {query} {document}", suffix="[SEP]", instruction="{query} on a mat"
    )
    found = ask(rerank_template=template, **logits(bert_artifact.manifest))
    frame = TextFrame(template.prefix, template.suffix)
    encoder = TextEncoder(bert_artifact.path / TOKENIZER, bert_artifact.manifest.max_seq_len, frame=frame)
    pairs = [(SMALL.queries[0], document) for document in SMALL.documents]
    options = EncodingOptions(framed=True, template=PairTemplate(template.body, template.instruction))
    assert ids_of(found.encodings[: len(pairs)]) == ids_of(encoder.encode(pairs, options))
    long = replace(SMALL, documents=("cat " * 100, *SMALL.documents[1:]))
    cut = ask(long, rerank_template=template, **logits(bert_artifact.manifest))
    assert ids_of(cut.encodings[:1]) == ids_of(encoder.encode([(long.queries[0], long.documents[0])], options))


def test_texts_without_tokens_are_left_out_with_what_they_answer(
    bert_artifact: Artifact, spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    """As with static embeddings, which put no special tokens around a text."""
    bare = Tokenizer.from_str(tokenizer.to_str())
    bare.post_processor = None
    asked = RetrievalSet(("cat", "  ", "mat"), ("", "cat", "mat"), ({1: 2, 0: 1}, {2: 2}, {0: 2}))
    found = retrieval_questions(bert_artifact.manifest, spec, bare, asked)
    assert found is not None
    assert found.ranking.grades == [{0: 2}]
    assert found.ranking.num_documents == 2
    assert len(found.encodings) == 3
    assert retrieval_questions(bert_artifact.manifest, spec, bare, RetrievalSet(("  ",), ("cat",), ({0: 1},))) is None


# Models that get the questions.


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        ({}, "embedding"),
        ({"max_seq_len": 31}, None),
        ({"tasks": ["classify"], "outputs": [OutputInfo(name="logits", dimension=3)]}, None),
        ({"tasks": ["rerank"], "outputs": [OutputInfo(name="logits", dimension=1)]}, "logits"),
        ({"tasks": ["classify_tokens"], "outputs": [OutputInfo(name="token_logits", dimension=3)]}, None),
        (
            {
                "outputs": [
                    OutputInfo(name="token_weights", dimension=1),
                    OutputInfo(name="embedding", dimension=8),
                ]
            },
            "embedding",
        ),
    ],
)
def test_what_ranks_is_asked(fields: dict[str, Any], output: str | None, bert_artifact: Artifact) -> None:
    assert ranking_output(msgspec.structs.replace(bert_artifact.manifest, **fields)) == output


def test_asking_what_does_not_rank_is_refused_by_name(spec: ModelSpec) -> None:
    check_ranks(spec, 32)
    classifier = replace(spec, heads=(HeadSpec("logits", ("cls",), layers=(DenseSpec("head", HIDDEN, 3),)),))
    with pytest.raises(ConfigError, match="--verify-retrieval: the model does not rank texts, it can classify"):
        check_ranks(classifier, 512)
    with pytest.raises(ConfigError, match="max_seq_len 16 cuts the texts"):
        check_ranks(spec, 16)


def test_quantized_builds_measure_it_and_others_where_they_are_asked(bert: Path, tmp_path: Path) -> None:
    quantized = build_artifact(bert, tmp_path / "int8", precision="int8", verify_retrieval=None).certificate
    assert quantized.retrieval is not None
    assert quantized.thresholds is not None
    assert quantized.thresholds.ndcg_loss == 0.005
    assert (quantized.retrieval.num_queries, quantized.retrieval.output) == (150, "embedding")
    assert 0 < quantized.retrieval.ndcg_engine < 1
    assert not quantized.retrieval.is_judged  # random weights rank by chance
    exact = build_artifact(bert, tmp_path / "fp32", verify_retrieval=True).certificate
    assert exact.retrieval is not None
    assert exact.retrieval.ndcg_engine == exact.retrieval.ndcg_reference == quantized.retrieval.ndcg_reference
    plain = build_artifact(bert, tmp_path / "plain", verify_retrieval=None).certificate
    assert (plain.retrieval, plain.retrieval_is_missing) == (None, False)
    left_out = build_artifact(bert, tmp_path / "without", precision="int8", verify_retrieval=False).certificate
    assert (left_out.retrieval, left_out.retrieval_is_missing) == (None, False)


def test_a_budget_that_ends_leaves_it_out_and_the_certificate_says_so(bert: Path, tmp_path: Path) -> None:
    certificate = build_artifact(
        bert, tmp_path / "a", precision="int8", verify_retrieval=None, verify_budget=1e-6
    ).certificate
    assert certificate.retrieval is None
    assert certificate.retrieval_is_missing
    assert certificate.verdict.endswith("texts, retrieval not measured")


def test_a_build_of_a_classifier_refuses_it_before_it_compiles(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "checkpoint", task="ForSequenceClassification", num_labels=3)
    with pytest.raises(ConfigError, match="does not rank texts"):
        build_artifact(folder, tmp_path / "artifact", verify_retrieval=True)
    assert not (tmp_path / "artifact").exists()
    settings: dict[str, Any] = {"precision": "int8", "min_cosine": 0.9, "verify_retrieval": None}
    quantized = build_artifact(folder, tmp_path / "artifact", **settings).certificate
    assert (quantized.retrieval, quantized.retrieval_is_missing) == (None, False)
    assert quantized.outputs[0].label_agreement is not None
    assert quantized.outputs[0].kl_divergence is not None


def test_a_reranker_is_measured_by_its_scores(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "checkpoint", task="ForSequenceClassification", num_labels=1)
    certificate = build_artifact(folder, tmp_path / "artifact", verify_retrieval=True).certificate
    assert certificate.retrieval is not None
    assert (certificate.retrieval.output, certificate.retrieval.num_queries) == ("logits", 50)
    assert certificate.retrieval.loss == 0.0
    assert certificate.retrieval.ndcg_chance > 0.3  # with ten candidates
    assert certificate.outputs[0].kendall_tau == pytest.approx(1.0, abs=1e-3)
