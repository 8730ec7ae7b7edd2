"""Classifiers and rerankers of sentence-transformers: the activation of their scores, and the prompts of their
queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TextClassificationPipeline

from bei.core import Encoding
from bei.engine.postprocess import apply_function
from bei.errors import CheckpointError, ConfigError, UnsupportedArchitectureError
from bei.offline.model import Model
from bei_build.config import BuildConfig
from bei_build.spec.model_spec import HeadSpec
from bei_build.targets.trtllm import class_of
from bei_build.torch_graph.model import packed_model
from tests.bei_build.checkpoint.test_sentence_transformers_outputs import (
    assert_rows,
    encodings,
    linear,
    modules,
    run,
    states,
    vocab_size,
)
from tests.bei_build.torch_graph.rig import of_the_module
from tests.support.builds import build_artifact
from tests.support.checkpoints import (
    HIDDEN,
    MAX_TOKENS,
    WEIGHTS,
    change_config,
    read_tensors,
    save_checkpoint,
    write_json,
)
from tests.support.reading import read, refused
from tests.support.zoo import CASES, save_case

IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
TANH = "torch.nn.modules.activation.Tanh"


def cross_encoder(folder: Path, **settings: Any) -> Path:
    """Files of sentence-transformers' CrossEncoder beside a classifier, as versions from 5.4 on write them."""
    modules(folder, "sentence_transformers.base.modules.transformer.Transformer")
    write_json(folder / "sentence_bert_config.json", {"transformer_task": "sequence-classification"})
    write_json(folder / "config_sentence_transformers.json", {"model_type": "CrossEncoder", **settings})
    return folder


@pytest.mark.parametrize(
    ("labels", "config", "file", "function"),
    [
        (1, {}, None, "sigmoid"),
        (1, {"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.0.0"}}, None, "none"),
        (1, {"sentence_transformers": {"activation_fn": SIGMOID}}, None, "sigmoid"),
        (1, {"sbert_ce_default_activation_function": IDENTITY}, None, "none"),
        (1, {"sentence_transformers": {"activation_fn": SIGMOID}, "sbert_ce_default_activation_function": IDENTITY},
         None, "sigmoid"),
        (1, {}, IDENTITY, "none"),
        (1, {}, TANH, "tanh"),
        (1, {"sentence_transformers": {"activation_fn": TANH}}, None, "tanh"),
        (1, {"sbert_ce_default_activation_function": "torch.nn.modules.activation.ReLU"}, None, "relu"),
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.Softplus"}}, None, "softplus"),
        (1, {"function_to_apply": "sigmoid", "sbert_ce_default_activation_function": IDENTITY}, None, "sigmoid"),
        (1, {"problem_type": "regression"}, None, "none"),
        (1, {"problem_type": "regression"}, SIGMOID, "sigmoid"),
        (1, {"function_to_apply": "softmax"}, None, "sigmoid"),
        (3, {"sentence_transformers": {"activation_fn": IDENTITY}}, None, "softmax"),
        (3, {"sentence_transformers": {"activation_fn": SIGMOID}}, None, "sigmoid"),
        (3, {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Softmax"}}, None, "softmax"),
        (3, {"problem_type": "multi_label_classification"}, None, "sigmoid"),
        (3, {"problem_type": "multi_label_classification"}, IDENTITY, "sigmoid"),
    ],
)  # fmt: skip
def test_a_cross_encoders_activation_is_the_function_of_its_label(
    labels: int, config: dict[str, object], file: str | None, function: str, tmp_path: Path
) -> None:
    change_config(save_checkpoint(tmp_path, task="ForSequenceClassification", num_labels=labels), **config)
    if file:
        cross_encoder(tmp_path, activation_fn=file)
    found = read(tmp_path).labels
    assert found is not None
    assert (len(found.names), found.function) == (labels, function)


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        *((count, problem) for count in (1, 3) for problem in (None, "regression", "multi_label_classification")),
        (3, "single_label_classification"),  # of one label transformers refuses it
    ],
)
def test_the_function_of_a_problem_is_the_one_of_transformers_pipeline(
    labels: int, problem: str | None, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, task="ForSequenceClassification", num_labels=labels)
    checkpoint = read(change_config(folder, problem_type=problem))
    assert checkpoint.labels is not None
    logits = np.array([[0.5, -1.0, 2.0]], np.float32)[:, :labels]
    pipeline: Any = SimpleNamespace(model=SimpleNamespace(config=checkpoint.config))
    postprocess: Any = TextClassificationPipeline.postprocess
    rows = postprocess(pipeline, {"logits": torch.from_numpy(logits)}, top_k=None)
    expected = {row["label"]: row["score"] for row in rows}
    found = apply_function(logits, checkpoint.labels.function)[0]
    assert dict(zip(checkpoint.labels.names, found.tolist(), strict=True)) == pytest.approx(expected, abs=1e-6)


def test_an_activation_that_bei_does_not_have_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, task="ForSequenceClassification", num_labels=1)
    for activation in ("torch.nn.GELU", "torch.nn.Softmax", "mine.Tanh"):
        change_config(folder, sentence_transformers={"activation_fn": activation})
        message = f"activation_fn is '{activation}'; supported are torch's Identity, Sigmoid, Tanh, .*function_to_apply"
        with pytest.raises(CheckpointError, match=message):
            read(folder)


def test_files_that_the_library_does_not_read_for_a_cross_encoder_say_nothing(tmp_path: Path) -> None:
    """It reads them if there is a modules.json, and its model type is CrossEncoder."""
    folder = save_checkpoint(tmp_path, task="ForSequenceClassification", num_labels=1)
    settings = {"activation_fn": TANH, "prompts": {"query": "query: "}, "default_prompt_name": "query"}
    for changes in ({"model_type": "SentenceTransformer"}, {"model_type": None}, {}):
        cross_encoder(folder, **settings, **changes)
        if not changes:
            (folder / "modules.json").unlink()
        checkpoint = read(folder)
        assert checkpoint.labels is not None
        assert (checkpoint.labels.function, checkpoint.files.prompts) == ("sigmoid", {})
    checkpoint = read(cross_encoder(folder, **settings))
    assert checkpoint.labels is not None
    assert (checkpoint.labels.function, checkpoint.files.default_prompt_name) == ("tanh", "query")


def test_a_cross_encoder_saved_with_modules_is_its_class(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, task="ForSequenceClassification", num_labels=1)
    modules(folder, "sentence_transformers.base.modules.transformer.Transformer")
    settings = {"transformer_task": "sequence-classification", "max_seq_length": 24}
    write_json(folder / "sentence_bert_config.json", settings)
    checkpoint = read(folder)
    assert [head.output for head in checkpoint.spec.heads] == ["logits"]
    assert checkpoint.max_seq_len == 24


def reranker(folder: Path, activation: str | None = IDENTITY, labels: int = 1, **last: Any) -> Path:
    """Like the Ettin rerankers: Transformer, Pooling, Dense, LayerNorm and a Dense that gives scores."""
    save_case(folder, next(case for case in CASES if case.name == "ModernBertModel"))
    base = "sentence_transformers.base.modules"
    kinds = ("transformer.Transformer", "pooling.Pooling", "dense.Dense", "layer_norm.LayerNorm", "dense.Dense")
    _, pooling, dense, norm, score = modules(folder, *(f"{base}.{kind}" for kind in kinds))
    write_json(folder / "sentence_bert_config.json", {"transformer_task": "feature-extraction"})
    write_json(pooling / "config.json", {"pooling_mode": "cls", "include_prompt": True})
    names = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
    linear(dense, HIDDEN, HIDDEN, bias=False, activation_function="torch.nn.modules.activation.GELU", **names)
    write_json(norm / "config.json", {"dimension": HIDDEN})
    save_file({"norm.weight": torch.linspace(0.5, 1.5, HIDDEN), "norm.bias": torch.ones(HIDDEN)}, norm / WEIGHTS)
    linear(score, HIDDEN, labels, activation_function=IDENTITY, **{**names, "module_output_name": "scores", **last})
    settings: dict[str, Any] = {"model_type": "CrossEncoder", "prompts": {}, "default_prompt_name": None}
    if activation:
        settings["activation_fn"] = activation
    write_json(folder / "config_sentence_transformers.json", settings)
    return folder


def scores_of(folder: Path, texts: Sequence[Encoding]) -> list[torch.Tensor]:
    dense, norm, score = (load_file(path / WEIGHTS) for path in sorted(folder.glob("[2-4]_*")))
    functional = torch.nn.functional
    rows = []
    for state in states(folder, texts):
        inner = functional.gelu(state[0] @ dense["linear.weight"].T)
        inner = functional.layer_norm(inner, inner.shape, norm["norm.weight"], norm["norm.bias"])
        rows.append(inner @ score["linear.weight"].T + score["linear.bias"])
    return rows


def test_a_dense_module_that_gives_scores_makes_a_reranker(tmp_path: Path) -> None:
    folder = reranker(tmp_path / "reranker")
    texts = encodings(vocab_size(folder))
    artifact = build_artifact(folder, tmp_path / "artifact")
    assert artifact.manifest.tasks == ["rerank", "classify"]
    assert artifact.manifest.embedding is None
    assert artifact.manifest.classification is not None
    assert artifact.manifest.classification.function == "none"
    assert artifact.certificate.reference.startswith("transformers")
    assert_rows(run(artifact, texts)["logits"], scores_of(folder, texts))


def test_such_a_reranker_may_have_labels_and_its_backbone_may_embed(tmp_path: Path) -> None:
    folder = reranker(tmp_path / "labels", labels=3)
    texts = encodings(vocab_size(folder))
    artifact = build_artifact(folder, tmp_path / "artifact")
    assert artifact.manifest.tasks == ["classify"]
    assert_rows(run(artifact, texts)["logits"], scores_of(folder, texts))
    checkpoint = read(folder, task="embed")
    assert checkpoint.spec.heads == (HeadSpec("embedding", ("cls",)),)


@pytest.mark.parametrize(
    ("activation", "config", "function"),
    [
        (IDENTITY, {}, "none"),
        (SIGMOID, {}, "sigmoid"),
        (None, {}, "sigmoid"),  # one score: the library counts the Dense's, not the labels of the config
        (None, {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}, "sigmoid"),
        (None, {"sentence_transformers": {"activation_fn": SIGMOID}}, "sigmoid"),
        (IDENTITY, {"sentence_transformers": {"activation_fn": SIGMOID}}, "none"),
        (IDENTITY, {"function_to_apply": "sigmoid"}, "sigmoid"),
    ],
)
def test_the_function_of_its_scores_is_that_of_the_library(
    activation: str | None, config: dict[str, object], function: str, tmp_path: Path
) -> None:
    labels = read(change_config(reranker(tmp_path, activation), **config)).labels
    assert labels is not None
    assert (len(labels.names), labels.function) == (1, function)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"module_input_name": "scores"}, r"4_Dense \(Dense\) works on scores; supported here: sentence_embedding"),
        ({"module_output_name": "logits"}, r"4_Dense \(Dense\) works on logits"),
    ],
)
def test_scores_of_something_else_are_refused(last: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(reranker(tmp_path, **last))


def test_logit_score_compares_two_tokens_of_a_language_model(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "Qwen3ForCausalLM")
    folder = save_case(tmp_path / "reranker", case)
    _, score = modules(
        folder, "sentence_transformers.x.Transformer", "sentence_transformers.cross_encoder.modules.LogitScore"
    )
    write_json(score / "config.json", {"true_token_id": 40, "false_token_id": 9})
    write_json(folder / "sentence_bert_config.json", {"transformer_task": "text-generation"})
    texts = encodings(vocab_size(folder))
    table = read_tensors(folder)["model.embed_tokens.weight"]
    expected = [(rows[-1] @ (table[40] - table[9]))[None] for rows in states(folder, texts)]
    artifact = build_artifact(folder, tmp_path / "artifact", verify=False)
    assert artifact.manifest.tasks == ["rerank", "classify"]
    assert_rows(run(artifact, texts)["logits"], expected)
    write_json(score / "config.json", {"true_token_id": 40, "false_token_id": None})
    expected = [(rows[-1] @ table[40])[None] for rows in states(folder, texts)]
    assert_rows(run(build_artifact(folder, tmp_path / "one", verify=False), texts)["logits"], expected)


def test_a_task_that_the_checkpoint_lacks_names_those_it_has(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, task="ForSequenceClassification", num_labels=1)
    with pytest.raises(
        ConfigError, match="no head for the task embed_sparse: choose one that it has, rerank or classify"
    ):
        read(tmp_path, task="embed_sparse")


@pytest.mark.parametrize("task", ["ForSequenceClassification", "ForTokenClassification", "ForMaskedLM"])
def test_any_checkpoint_can_be_built_as_an_embedder(task: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, task=task)
    checkpoint = read(folder, task="embed")
    with checkpoint.weights() as weights:
        assert [weights.read(name).shape for name, _ in checkpoint.spec.weights()]
    assert checkpoint.spec.dimensions == {"embedding": HIDDEN}


# Scores as the library gives them, with its own tokenizer.

QUERY, DOCUMENTS = "the cat", ["hello world", "a cat sat on the mat", "a", "the cat " * 30]


def classifier(folder: Path, labels: int, **config: Any) -> Path:
    """A BERT whose tokenizer gives token types, and whose scores are not all near 0."""
    save_checkpoint(folder, task="ForSequenceClassification", num_labels=labels)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "model_max_length": MAX_TOKENS})
    return change_config(folder, **config)


def library_logits(folder: Path, prompt: str = "") -> torch.Tensor:
    """Like CrossEncoder.predict: the prompt precedes the query, and the longer text is cut. [documents, labels]"""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    with torch.no_grad():
        for document in DOCUMENTS:
            inputs = tokenizer(prompt + QUERY, document, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
            rows.append(model(**inputs).logits[0])
    return torch.stack(rows)


def ranked(model: Model, **options: Any) -> list[float]:
    """The scores in the order of the documents."""
    return [rank.score for rank in sorted(model.rerank(QUERY, DOCUMENTS, **options), key=lambda rank: rank.index)]


@pytest.mark.parametrize(
    ("prompt", "activation", "function"), [("hello: ", TANH, torch.tanh), ("", IDENTITY, torch.sigmoid)]
)
def test_a_cross_encoder_is_served_with_its_prompt_and_its_function(
    prompt: str, activation: str, function: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    prompts = {"prompts": {"query": prompt, "other": "a"}, "default_prompt_name": "query"}
    folder = cross_encoder(classifier(tmp_path / "model", 1), activation_fn=activation, **prompts)
    logits = library_logits(folder, prompt)[:, 0]
    build_artifact(folder, tmp_path / "artifact", verify=False)
    with Model(str(tmp_path / "artifact")) as model:
        np.testing.assert_allclose(ranked(model), function(logits).numpy(), atol=2e-4)
        np.testing.assert_allclose(ranked(model, raw_scores=True), logits.numpy(), atol=2e-4)
        found = model.classify([(QUERY, document) for document in DOCUMENTS])
        own = logits if activation == IDENTITY else function(logits)
        np.testing.assert_allclose(found.scores[:, 0], own.numpy(), atol=2e-4)


# Classifiers of two labels as rerankers.


@pytest.mark.parametrize(
    ("names", "relevant", "place"),
    [
        (None, None, 1),
        (None, "LABEL_0", 0),
        (["relevant", "not_relevant"], "relevant", 0),
        (["not_relevant", "relevant"], "relevant", 1),
    ],
)
def test_the_score_of_two_labels_is_the_share_of_the_relevant_one(
    names: list[str] | None, relevant: str | None, place: int, tmp_path: Path
) -> None:
    folder = classifier(tmp_path / "model", 2, problem_type="single_label_classification")
    if names:
        change_config(folder, id2label={str(index): name for index, name in enumerate(names)}, label2id=None)
    logits = library_logits(folder)
    shares = logits.softmax(1)[:, place]
    artifact = build_artifact(folder, tmp_path / "artifact", task="rerank", relevant_label=relevant)
    assert artifact.manifest.tasks == ["rerank", "classify"]
    assert artifact.certificate.reference.startswith("transformers")
    with Model(str(tmp_path / "artifact")) as model:
        np.testing.assert_allclose(ranked(model), shares.numpy(), atol=2e-4)
        difference = (logits[:, place] - logits[:, 1 - place]).numpy()
        np.testing.assert_allclose(ranked(model, raw_scores=True), difference, atol=2e-4)
        found = model.classify([(QUERY, document) for document in DOCUMENTS])
        assert found.labels == [names[place] if names else f"LABEL_{place}"]
        np.testing.assert_allclose(found.scores[:, 0], shares.numpy(), atol=2e-4)


def test_the_module_compares_them_too_and_a_dense_module_may_give_them(tmp_path: Path) -> None:
    folder = reranker(tmp_path / "model", labels=2)
    texts = encodings(vocab_size(folder))
    expected = np.array([(row[0] - row[1]).item() for row in scores_of(folder, texts)])
    checkpoint = read(folder, task="rerank", relevant_label="LABEL_0")
    with checkpoint.weights() as weights:
        module = of_the_module(packed_model(checkpoint.spec, weights.read, checkpoint.max_seq_len), texts)
    np.testing.assert_allclose(np.concatenate(module["logits"]), expected, atol=2e-4)
    artifact = build_artifact(folder, tmp_path / "artifact", task="rerank", relevant_label="LABEL_0", verify=False)
    np.testing.assert_allclose(run(artifact, texts)["logits"][:, 0], expected, atol=2e-4)


def test_unless_a_reranker_is_asked_for_it_stays_a_classifier(tmp_path: Path) -> None:
    artifact = build_artifact(classifier(tmp_path / "model", 2), tmp_path / "artifact")
    assert artifact.manifest.tasks == ["classify"]
    assert artifact.manifest.classification is not None
    assert artifact.manifest.classification.labels == ["LABEL_0", "LABEL_1"]
    assert artifact.manifest.classification.function == "softmax"


@pytest.mark.parametrize(
    ("labels", "config", "relevant", "message"),
    [
        (2, {"id2label": {"0": "yes", "1": "no"}}, None, "labels are yes and no: say which .* with --relevant-label"),
        (2, {}, "LABEL_2", "'LABEL_2' is none of the checkpoint's labels, LABEL_0 and LABEL_1"),
        (2, {"problem_type": "multi_label_classification"}, None, "scored by sigmoid, each by itself"),
        (2, {"problem_type": "regression"}, None, "scored by none, each by itself"),
        (2, {"sentence_transformers": {"activation_fn": SIGMOID}}, None, "scored by sigmoid, each by itself"),
        (1, {}, "LABEL_0", "relevant_label is for classifiers of two labels"),
        (3, {}, "LABEL_0", "relevant_label is for classifiers of two labels"),
        (3, {}, None, "has no head for the task rerank: choose one that it has, classify"),
    ],
)
def test_what_cannot_be_such_a_reranker_is_refused(
    labels: int, config: dict[str, Any], relevant: str | None, message: str, tmp_path: Path
) -> None:
    refused(classifier(tmp_path, labels, **config), ConfigError, message, task="rerank", relevant_label=relevant)


def test_a_score_that_config_json_calls_two_labels_is_named(tmp_path: Path) -> None:
    folder = change_config(classifier(tmp_path, 1), id2label=None, label2id=None)  # transformers takes two then
    for task in ("auto", "rerank"):
        refused(folder, CheckpointError, 'gives 1 scores, and config.json says 2 .*"num_labels": 1', task=task)


def test_a_relevant_label_without_a_reranker_is_refused() -> None:
    for task in ("auto", "classify"):
        with pytest.raises(ConfigError, match="relevant_label needs a classifier that is built as a reranker: add"):
            BuildConfig(model="x", task=task, relevant_label="LABEL_1")


def test_tensorrt_llm_refuses_two_labels_as_one(tmp_path: Path) -> None:
    checkpoint = read(classifier(tmp_path, 2), task="rerank")
    with pytest.raises(UnsupportedArchitectureError, match=r"classifier\.compared"):
        class_of(checkpoint.spec)
