"""GLiNER2.5 models: built, served by ``bei.Model``, and against the gliner2 library where it is installed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bei import Model
from bei.artifact.manifest import Artifact
from bei.artifact.validation import manifest_fault
from bei.errors import CheckpointError, InvalidRequestError
from bei_build.families import gliner2_boundary
from tests.bei_build.families.test_gliner import LABELS, PARTS, TEXT
from tests.support.builds import build_artifact
from tests.support.cpus import needs_bf16
from tests.support.gliner2_models import BOUNDARY_HEAD, RECORD_HEAD, RELATION_HEAD, save_gliner25


def built(folder: Path, kind: str = "deberta-v2", **head: Any) -> Artifact:
    return build_artifact(save_gliner25(folder / "checkpoint", kind, **head), folder / "artifact", name="gliner25")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("gliner25"))


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[Model]:
    with Model(artifact.path, tune="off") as found:
        yield found


def test_the_engine_agrees_with_the_module_that_computes_every_pair_whole(artifact: Artifact) -> None:
    spans, labels = artifact.certificate.outputs
    assert (spans.output, spans.failures) == ("span_logits", [])
    assert (labels.output, labels.failures) == ("label_logits", [])
    assert spans.score_difference is not None
    assert spans.score_difference < 2e-4
    assert spans.span_agreement == 1.0
    assert artifact.manifest.tasks == ["extract", "zero_shot"]
    assert artifact.manifest.spec.architecture == "GLiNER2.5"
    assert artifact.manifest.extraction
    pool = artifact.manifest.extraction.candidates
    assert pool
    assert (pool.most_boundaries, pool.pool_size, pool.least_per_label, pool.absent_above) == (6, 12, 2, 0.5)


def test_spans_are_words_of_the_text_and_never_the_full_stop_that_it_lacks(model: Model) -> None:
    for text in (TEXT, "cat", "hello world " * 40):  # the last one in windows
        (spans,) = model.extract([text], LABELS, threshold=0.0, multi_label=True)
        for span in spans:
            assert span.text == text[span.start : span.end] != ""
        assert max((span.end for span in spans), default=0) <= len(text.rstrip())


def test_other_texts_and_labels_of_a_step_change_nothing(model: Model) -> None:
    texts = [TEXT, "cat", "hello world " * 6, "the \u200b cat", "A longer text, with more words than those: it pads."]
    together = model.extract(texts, LABELS, threshold=0.0, multi_label=True, flat=False)
    assert any(together)
    for text, spans in zip(texts, together, strict=True):
        (alone,) = model.extract([text], LABELS, threshold=0.0, multi_label=True, flat=False)
        assert {span[:4] for span in alone} == {span[:4] for span in spans}
        scores = {span[:4]: span.score for span in spans}
        assert {span[:4]: span.score for span in alone} == pytest.approx(scores, abs=1e-4)


def test_labels_share_a_probability_or_have_their_own(model: Model) -> None:
    shares = model.zero_shot([TEXT, "cat"], LABELS).scores
    np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-5)
    alone = model.zero_shot([TEXT, "cat"], LABELS, multi_label=True).scores
    odds = alone / (1 - alone)
    np.testing.assert_allclose(shares, odds / odds.sum(axis=1, keepdims=True), atol=1e-4)


def test_relations_are_refused_by_name_where_nothing_scores_them(model: Model) -> None:
    with pytest.raises(InvalidRequestError, match="leave relations out"):
        model.extract_schema([TEXT], relations=["owns"])


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"candidate_pool": "per_query"}, "candidate_pool = 'per_query' in boundary_head"),
        ({"candidate_attention_layers": 1}, "candidate_attention_layers = 1"),
        ({"query_attention_layers": 1}, "query_attention_layers = 1"),
        ({"content_soft_max_pool": True}, "content_soft_max_pool = True"),
        ({"overlap_policy": "longest"}, "overlap_policy = 'longest'"),
        ({"adaptive_threshold": True}, "adaptive_threshold = True"),
        ({"pair_temperature": 2.0}, "pair_temperature = 2.0"),
        ({"relation_temperature": 0.5}, "relation_temperature = 0.5"),
        ({"enable_relations": True, "relation_pair_cap": 0}, "relation_pair_cap = 0"),
        ({"record_temperature": 0.5}, "record_temperature = 0.5"),
        ({"enable_records": True, "record_dim": 0}, "record_dim = 0"),
        ({"enable_abstention": False}, "enable_abstention = False"),
        ({"pool_size": 0}, "pool_size = 0"),
        ({"boundary_attention_heads": 3}, "boundary_attention_heads do not divide"),
        ({"abstention_threshold": "high"}, "abstention_threshold = 'high'"),
    ],
)
def test_models_that_are_computed_otherwise_are_refused(tmp_path: Path, head: Any, message: str) -> None:
    folder = save_gliner25(tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "boundary_head": {**config["boundary_head"], **head}}))
    with pytest.raises(CheckpointError, match=message):
        build_artifact(folder, tmp_path / "artifact")


@pytest.mark.slow
@needs_bf16
def test_bf16_is_certified_where_few_spans_are_found(tmp_path: Path) -> None:
    """Where most pairs are found, a start or an end at the edge of the chosen ones is another in BF16."""
    head: Any = {**RELATION_HEAD, **RECORD_HEAD, "pool_boundary_top_k": 32, "pool_size": 192, "min_pool_per_query": 8}
    folder = save_gliner25(tmp_path / "checkpoint", spread=0.1, offset=-1.0, **head)
    certificate = build_artifact(folder, tmp_path / "artifact", precision="bf16").certificate
    assert certificate.passed
    assert [one.output for one in certificate.outputs[2:]] == ["relation_logits", "record_states"]
    assert certificate.outputs[0].score_difference is not None
    assert 1e-4 < certificate.outputs[0].score_difference < 0.01


def test_settings_that_a_config_lacks_are_the_gliner2_librarys() -> None:
    configuration = pytest.importorskip("gliner2.configuration")
    defaults = gliner2_boundary.DEFAULTS
    assert {name: getattr(configuration.BoundaryHeadSettings(), name) for name in defaults} == defaults


def test_tensors_of_records_that_are_not_enabled_change_nothing(tmp_path: Path, model: Model) -> None:
    folder = save_gliner25(tmp_path / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    others = ("record_decoder.inst_proj.weight", "boundary_head.candidate_encoder.weight")
    save_file({**tensors, **{name: torch.ones(4, 4) for name in others}}, folder / "model.safetensors")
    with Model(build_artifact(folder, tmp_path / "artifact").path, tune="off") as other:
        found, expected = (each.extract([TEXT], LABELS, threshold=0.0, multi_label=True) for each in (other, model))
    assert found == expected


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({"most_boundaries": 129}, "the candidates of extraction have an invalid number"),
        ({"pool_size": 1 << 15}, "the candidates of extraction have an invalid number"),
        ({"least_per_label": 13}, "the candidates of extraction have an invalid number"),
        ({"absent_above": 1.5}, "the candidates of extraction have an invalid number"),
    ],
)
def test_artifacts_with_invalid_candidates_are_refused(artifact: Artifact, pool: Any, message: str) -> None:
    extraction = artifact.manifest.extraction
    assert extraction
    assert extraction.candidates
    candidates = msgspec.structs.replace(extraction.candidates, **pool)
    extraction = msgspec.structs.replace(extraction, candidates=candidates)
    assert message in (manifest_fault(msgspec.structs.replace(artifact.manifest, extraction=extraction)) or "")


def random_texts(count: int, most: int) -> list[str]:
    rng = random.Random(39)
    return [
        "".join(rng.choice(PARTS) + rng.choice([" ", " ", "", ", "]) for _ in range(rng.randint(1, most)))
        + rng.choice([".", "?", "", " "])
        for _ in range(count)
    ]


def compared(folder: Path, texts: list[str]) -> tuple[int, int]:
    """Spans of ``texts`` that were compared with the library's, and labels without any."""
    library = pytest.importorskip("gliner2")
    theirs = library.AutoExtractor.from_pretrained(str(folder / "checkpoint"))
    num_compared = num_empty = 0
    with Model(folder / "artifact", tune="off") as model:
        every = model.extract(texts[:50], LABELS, threshold=0.0, flat=False, multi_label=True)
        threshold = float(np.quantile([span.score for spans in every for span in spans], 0.4))
        for flat, policy in ((True, "flat"), (False, "nested")):
            ours = model.extract(texts, LABELS, threshold=threshold, flat=flat, multi_label=True)
            expected = theirs.batch_extract_entities(
                texts,
                LABELS,
                threshold=threshold,
                overlap_policy=policy,
                include_confidence=True,
                include_spans=True,
            )
            for text, spans, answer in zip(texts, ours, expected, strict=True):
                for label in LABELS:
                    found = dict(answer["entities"] or {}).get(label) or []
                    wanted = {(one["start"], one["end"], one["text"]): one["confidence"] for one in found}
                    if any(end > len(text) for _, end, _ in wanted):  # the full stop that the library adds
                        continue
                    own = {span[:3]: span.score for span in spans if span.label == label}
                    assert own == pytest.approx(wanted, abs=2e-4), (text, label, flat)
                    num_compared += len(wanted)
                    num_empty += not wanted
    return num_compared, num_empty


@pytest.mark.filterwarnings("ignore")  # the library's
def test_spans_and_scores_of_a_few_texts_are_the_gliner2_librarys(artifact: Artifact) -> None:
    num_compared, _ = compared(artifact.path.parent, random_texts(24, 6))
    assert num_compared > 24


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("deberta-v2", {}),
        ("deberta-v2", {"pool_boundary_top_k": 32, "pool_size": 192, "min_pool_per_query": 8}),
        ("modernbert", {"boundary_attention_layers": 1, "boundary_attention_window": 0}),
        ("modernbert", {"boundary_attention_layers": 0, "boundary_refinement_layers": 2, "enable_span_content": False}),
    ],
)
def test_spans_labels_and_scores_are_the_gliner2_librarys(tmp_path: Path, kind: str, head: Any) -> None:
    built(tmp_path, kind, **head)
    num_compared, num_empty = compared(tmp_path, random_texts(500, 10))
    assert num_compared > 500
    assert num_empty > 100
    assert BOUNDARY_HEAD["pool_size"] < 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
def test_scores_of_labels_are_the_gliner2_librarys(artifact: Artifact) -> None:
    library = pytest.importorskip("gliner2")
    theirs = library.AutoExtractor.from_pretrained(str(artifact.path.parent / "checkpoint"))
    texts = random_texts(500, 7)
    asked = {"category": {"labels": LABELS, "multi_label": True, "cls_threshold": 0.0}}
    expected = theirs.batch_classify_text(texts, asked, include_confidence=True)
    with Model(artifact.path, tune="off") as model:
        ours = model.zero_shot(texts, LABELS, multi_label=True).scores
    assert float(np.ptp(ours)) > 0.01
    for text, row, answer in zip(texts, ours, expected, strict=True):
        wanted = {one["label"]: one["confidence"] for one in answer["category"]}
        assert dict(zip(LABELS, row.tolist(), strict=True)) == pytest.approx(wanted, abs=2e-4), text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
def test_spans_of_a_long_text_are_the_gliner2_librarys(artifact: Artifact, model: Model) -> None:
    library = pytest.importorskip("gliner2")
    theirs = library.AutoExtractor.from_pretrained(str(artifact.path.parent / "checkpoint"))
    rng = np.random.default_rng(39)
    texts = [" ".join(rng.choice(["cat", "the", "a", "b", "is"], count)) + "." for count in (39, 41, 80, 111, 150)]
    every = model.extract(texts, LABELS, threshold=0.0, flat=False, multi_label=True)
    threshold = float(np.quantile([span.score for spans in every for span in spans], 0.4))
    schema = library.Schema.from_dict({"entities": LABELS})
    asked: dict[str, Any] = {"threshold": threshold, "include_confidence": True, "include_spans": True}
    num_compared = 0
    for flat, policy in ((True, "flat"), (False, "nested")):
        answers = theirs.batch_extract_long(
            texts, schema, chunk_size=40, chunk_overlap=10, overlap_policy=policy, **asked
        )
        found = model.extract(texts, LABELS, threshold=threshold, flat=flat, multi_label=True)
        for spans, answer in zip(found, answers, strict=True):
            wanted = {
                (one["start"], one["end"], label): one["confidence"]
                for label, every_one in dict(answer["entities"] or {}).items()
                for one in every_one
            }
            assert {(one.start, one.end, one.label): one.score for one in spans} == pytest.approx(wanted, abs=2e-4)
            num_compared += len(wanted)
    assert num_compared > 50
