"""GLiNER2 models: built, served by ``bei.Model``, and against the gliner2 library where it is installed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei import Model
from bei.artifact.label_layouts import Extraction, Schema
from bei.artifact.manifest import Artifact
from bei.core import Encoding
from bei.engine.schema_columns import count_columns
from bei.engine.words import LABEL, OTHER, WORD, part_type, with_absent
from bei.errors import CheckpointError, InputTooLongError, InvalidRequestError
from bei.tasks.extract_labels import CheckedLabels
from bei.tasks.schema_forms import AskedSchema
from bei.tasks.schema_spans import Found, SchemaReader
from bei.tasks.span_choice import Candidates, choose
from bei.tokenizer.label_prompt import word_spans
from tests.bei_build.families.test_gliner import LABELS, PARTS, TEXT
from tests.support.builds import build_artifact
from tests.support.cpus import needs_bf16
from tests.support.gliner2_models import MAX_WIDTH, save_gliner2

SCHEMA = Schema(
    task="entities",
    opening=[1],
    closing=[3],
    part_id=7,
    field_id=4,
    relation_id=5,
    between_id=6,
    separator_id=9,
    num_counts=4,
)
LAYOUT = Extraction(label_id=8, separator_id=9, reads_marker=True, max_width=2, max_words=40, schema=SCHEMA)


def built(folder: Path, kind: str = "deberta-v2", **settings: Any) -> Artifact:
    return build_artifact(save_gliner2(folder / "checkpoint", kind, **settings), folder / "artifact", name="gliner2")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("gliner2"), counting_layer="count_lstm_v2")


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[Model]:
    with Model(artifact.path, tune="off") as found:
        yield found


def test_the_engine_agrees_with_the_module_that_computes_every_span_whole(artifact: Artifact) -> None:
    spans, labels = artifact.certificate.outputs
    assert (spans.output, spans.failures) == ("span_logits", [])
    assert (labels.output, labels.failures) == ("label_logits", [])
    assert max(spans.max_abs_difference, labels.max_abs_difference) < 1e-3
    assert spans.score_difference is not None
    assert spans.score_difference < 2e-4
    assert artifact.manifest.tasks == ["extract", "zero_shot"]
    assert artifact.manifest.spec.architecture == "GLiNER2"


def test_spans_are_words_of_the_text_and_never_the_full_stop_that_it_lacks(model: Model) -> None:
    for text in (TEXT, "cat", "hello world " * 40):  # the last one in windows
        (spans,) = model.extract([text], LABELS, threshold=0.0, multi_label=True)
        for span in spans:
            assert span.text == text[span.start : span.end] != ""
        assert max(span.end for span in spans) <= len(text.rstrip())


def test_other_texts_and_labels_of_a_step_change_nothing(model: Model) -> None:
    texts = [TEXT, "cat", "hello world " * 6, "the \u200b cat", "A longer text, with more words than those: it pads."]
    together = model.extract(texts, LABELS, threshold=0.0, multi_label=True)
    assert all(together)
    for text, spans in zip(texts, together, strict=True):
        (alone,) = model.extract([text], LABELS, threshold=0.0, multi_label=True)
        assert [span[:4] for span in alone] == [span[:4] for span in spans]
        assert [span.score for span in alone] == pytest.approx([span.score for span in spans], abs=1e-4)


def test_labels_share_a_probability_or_have_their_own(model: Model) -> None:
    shares = model.zero_shot([TEXT, "cat"], LABELS).scores
    np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-5)
    alone = model.zero_shot([TEXT, "cat"], LABELS, multi_label=True).scores
    odds = alone / (1 - alone)
    np.testing.assert_allclose(shares, odds / odds.sum(axis=1, keepdims=True), atol=1e-4)


def test_a_text_that_is_too_long_to_be_classified_is_refused_or_cut(model: Model) -> None:
    text = "hello world " * 400
    with pytest.raises(InputTooLongError):
        model.zero_shot([text], LABELS, truncate=False)
    assert model.zero_shot([text], LABELS, truncate=True).scores.shape == (1, len(LABELS))
    with pytest.raises(InvalidRequestError, match="their beginnings"):
        model.zero_shot([text], LABELS, truncate=True, truncation_direction="left")


def test_tokens_of_the_model_in_labels_are_refused(model: Model) -> None:
    for ask in (model.extract, model.zero_shot):
        with pytest.raises(InvalidRequestError, match=r"labels 0 has '\[E\]'"):
            ask([TEXT], ["a [E] b"])


def test_a_model_that_classifies_alone_has_the_same_scores(model: Model, tmp_path: Path) -> None:
    folder = save_gliner2(tmp_path / "checkpoint", counting_layer="count_lstm_v2")
    artifact = build_artifact(folder, tmp_path / "artifact", task="zero_shot", verify=False)
    assert artifact.manifest.tasks == ["zero_shot"]
    with Model(artifact.path, tune="off") as alone:
        np.testing.assert_allclose(
            alone.zero_shot([TEXT], LABELS).scores, model.zero_shot([TEXT], LABELS).scores, atol=1e-5
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("See https://a.b/c?d=1, or WWW.x.y!", ["See", "https://a.b/c?d=1,", "or", "WWW.x.y!"]),
        ("to A.b+c@d-e.org and @some_one.", ["to", "A.b+c@d-e.org", "and", "@some_one", "."]),
        ("e\u0301cole हिन्दी a\u200db", ["e\u0301cole", "हिन्दी", "a\u200db"]),
        ("state-of-the_art \u0130x", ["state-of-the_art", "\u0130x"]),
    ],
)
def test_words_are_those_of_its_own_splitter(text: str, words: list[str]) -> None:
    assert [text[start:stop] for start, stop in word_spans(text, LAYOUT)] == words


def spans_of(counted: int, score: float, kinds: list[int], absent: list[int], num_words: int) -> Candidates:
    types = with_absent(np.array(kinds), np.array(absent))
    types[1] = part_type(1)
    per_count = count_columns(SCHEMA.num_counts, LAYOUT.max_width)
    logits = np.full((len(kinds), (per_count + 1) * LAYOUT.max_width), score, np.float32)
    logits[:, : -LAYOUT.max_width] = np.eye(per_count * LAYOUT.max_width)[counted]
    found = Found()
    reader = SchemaReader(CheckedLabels(("cat",), (0.5,)), AskedSchema(), LAYOUT, flat=True)
    encoding = Encoding(np.zeros(len(kinds), np.int32), types)
    assert reader.read(found, logits, encoding, range(10, 10 + num_words), []) is None
    return found.labels


def test_nothing_is_found_where_the_count_is_zero_nor_behind_the_text_nor_at_words_without_tokens() -> None:
    kinds = [OTHER, OTHER, LABEL, OTHER, WORD, WORD, WORD]  # the last word is the full stop that the text lacks
    absent = [0, 0, 0, 0, 1, 0, 0]
    assert not spans_of(0, 2.0, kinds, absent, 3)
    assert not spans_of(1, -2.0, kinds, absent, 3)
    assert sorted(spans_of(1, 2.0, kinds, absent, 3)) == [(10, 10, 0), (12, 12, 0)]
    assert sorted(spans_of(3, 2.0, kinds, [0] * 7, 2)) == [(10, 10, 0), (10, 11, 0), (11, 11, 0)]


def test_with_several_labels_each_is_chosen_by_itself() -> None:
    found = {(0, 1, 0): 0.9, (1, 2, 1): 0.8, (1, 1, 0): 0.7, (0, 1, 1): 0.6}
    apart = [one[:3] for one in choose(found, flat=True, multi_label=True, by_word=False, apart=True)]
    assert sorted(apart) == [(0, 1, 0), (1, 2, 1)]
    together = [one[:3] for one in choose(found, flat=True, multi_label=False, by_word=False)]
    assert together == [(0, 1, 0)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "sparse"}, "architecture = 'sparse'"),
        ({"counting_layer": "count_lstm_moe"}, "counting_layer = 'count_lstm_moe'"),
        ({"token_pooling": "mean"}, "token_pooling = 'mean'"),
        ({"max_width": 0, "span_head": {"max_width": 0}}, "max_width = 0"),
        ({"max_len": "many"}, "max_len = 'many'"),
    ],
)
def test_models_that_are_computed_otherwise_are_refused(tmp_path: Path, settings: Any, message: str) -> None:
    folder = save_gliner2(tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    with pytest.raises(CheckpointError, match=message):
        build_artifact(folder, tmp_path / "artifact")


def test_a_folder_without_the_encoders_config_says_how_to_save_it(tmp_path: Path) -> None:
    folder = save_gliner2(tmp_path / "checkpoint")
    (folder / "encoder_config" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="save_pretrained"):
        build_artifact(folder, tmp_path / "artifact")


@pytest.mark.slow
@needs_bf16
def test_bf16_is_certified(tmp_path: Path) -> None:
    folder = save_gliner2(tmp_path / "checkpoint", spread=0.05)
    assert build_artifact(folder, tmp_path / "artifact", precision="bf16").certificate.passed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
@pytest.mark.parametrize(
    ("kind", "counting", "none"),  # about half of the texts have a count of 0
    [
        ("deberta-v2", "count_lstm", 0.75),
        ("deberta-v2", "count_lstm_v2", 3.7),
        ("modernbert", "count_lstm", 3.65),
        ("modernbert", "count_lstm_v2", 2.2),
    ],
)
def test_spans_labels_and_scores_are_the_gliner2_librarys(
    tmp_path: Path, kind: str, counting: str, none: float
) -> None:
    library = pytest.importorskip("gliner2")
    artifact = built(tmp_path, kind, counting_layer=counting, none=none)
    theirs = library.GLiNER2.from_pretrained(str(tmp_path / "checkpoint"))
    rng = random.Random(39)
    texts = [
        "".join(rng.choice(PARTS) + rng.choice([" ", " ", "", ", "]) for _ in range(rng.randint(1, 5)))
        + rng.choice([".", "?", "", " "])
        for _ in range(500)
    ]
    num_compared = num_empty = 0
    with Model(artifact.path, tune="off") as model:
        scores = [
            span.score for spans in model.extract(texts[:50], LABELS, threshold=0.0, flat=False) for span in spans
        ]
        threshold = float(np.quantile(scores, 0.6))
        for flat, policy in ((True, None), (False, "nested")):
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
                wanted = {
                    (one["start"], one["end"], one["text"], label): one["confidence"]
                    for label, found in dict(answer["entities"] or {}).items()
                    for one in found
                }
                if any(end > len(text) for _, end, _, _ in wanted):  # the full stop that the library adds
                    continue
                assert {span[:4]: span.score for span in spans} == pytest.approx(wanted, abs=2e-4), text
                num_compared += len(wanted)
                num_empty += not wanted
    assert num_compared > 400
    assert 100 < num_empty < 900
    assert MAX_WIDTH == 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
def test_scores_of_labels_are_the_gliner2_librarys(tmp_path: Path) -> None:
    library = pytest.importorskip("gliner2")
    artifact = built(tmp_path)
    theirs = library.GLiNER2.from_pretrained(str(tmp_path / "checkpoint"))
    rng = random.Random(39)
    texts = ["".join(rng.choice(PARTS) + rng.choice([" ", ", "]) for _ in range(rng.randint(1, 7))) for _ in range(500)]
    asked = {"category": {"labels": LABELS, "multi_label": True, "cls_threshold": 0.0}}
    expected = theirs.batch_classify_text(texts, asked, include_confidence=True)
    with Model(artifact.path, tune="off") as model:
        ours = model.zero_shot(texts, LABELS, multi_label=True).scores
    assert float(np.ptp(ours)) > 0.01
    for text, row, answer in zip(texts, ours, expected, strict=True):
        wanted = {one["label"]: one["confidence"] for one in answer["category"]}
        assert dict(zip(LABELS, row.tolist(), strict=True)) == pytest.approx(wanted, abs=2e-4), text
