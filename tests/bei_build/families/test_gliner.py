"""GLiNER models: built, served by ``bei.Model``, and against the gliner library where it is installed."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bei import Model
from bei.artifact.store import load_manifest
from bei.engine.load import load_engine
from bei.errors import CheckpointError, ConfigError, InvalidRequestError, WeightsError
from bei_build.checkpoint import gliner
from bei_build.config import BuildConfig
from bei_build.pipeline import build
from bei_build.progress import Progress
from tests.support.builds import build_artifact
from tests.support.checkpoints import change_json, save_tokenizer, unigram_tokenizer, write_json
from tests.support.cpus import needs_bf16
from tests.support.gliner_models import ENCODERS, MAX_WIDTH, save_gliner

LABELS = ["person", "a place", "日本"]
TEXT = "the cat sat on a mat, 東京 e\u0301cole don't 👍🏽 hello-world"
PARTS = (
    *(
        "Ada Lovelace",
        "naïve café",
        "北京大学",
        "👩‍👩‍👧‍👦",
        "👍🏽",
        "e\u0301cole",
        "\u200b",
        "\u200f שלום",
        "مرحبا بالعالم",
    ),
    *("don't", "state-of-the_art", "<<ENT>>", "[SEP]", "<s>", "\u00ad", "ﬁnance", "Ⅷ", "½", "\x07", "\n", "हिन्दी"),
    *("x" * 30, "3.14", "U.S.A.", "\u3000", "the cat sat on the mat", "\ufeff", "İstanbul", "ß", "\u2028"),
)


WORDS = {"model_type": "gliner_uni_encoder_token", "span_mode": "token_level"}
# Of the first models, and of NuNER Zero, which scores single words.
LINEAR = {"span_mode": "marker"}
SINGLE = {"span_mode": "marker", "max_width": 1}


def built(folder: Path, kind: str, **settings: Any) -> Path:
    save_gliner(folder / "checkpoint", kind, **settings)
    config = BuildConfig(model=str(folder / "checkpoint"), target="cpu", precision="fp32", out=str(folder / "artifact"))
    build(config, load_engine, Progress())
    return folder / "artifact"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("gliner"), "deberta-v2")


@pytest.fixture(scope="module")
def model(artifact: Path) -> Any:
    with Model(artifact, tune="off") as found:
        yield found


def test_the_engine_agrees_with_the_module_that_computes_every_span_whole(artifact: Path) -> None:
    certificate = json.loads((artifact / "certificate.json").read_text())
    (output,) = certificate["outputs"]
    assert output["output"] == "span_logits"
    assert output["cosine_min"] > 0.9999
    assert output["max_abs_difference"] < 1e-3
    assert output["score_difference"] < 2e-4
    assert output["span_agreement"] == 1.0
    assert load_manifest(artifact).spec.architecture == "UniEncoderSpanGLiNER"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("deberta-v2", LINEAR),
        pytest.param("deberta-v2", SINGLE, marks=pytest.mark.slow),
        pytest.param("t5", LINEAR, marks=pytest.mark.slow),
        ("mt5", {}),
        pytest.param("mt5", WORDS, marks=pytest.mark.slow),
        pytest.param("eurobert", {}, marks=pytest.mark.slow),
        ("eurobert", WORDS),
    ],
)
def test_other_spans_and_encoders_agree_with_their_modules(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    artifact = built(tmp_path, kind, **settings)
    (output,) = json.loads((artifact / "certificate.json").read_text())["outputs"]
    assert output["max_abs_difference"] < 1e-3
    assert output["span_agreement"] == 1.0
    with Model(artifact, tune="off") as model:
        together = model.extract([TEXT, "\u200b", "cat"], LABELS, threshold=0.3)
        alone = model.extract([TEXT], LABELS, threshold=0.3)
    assert [span[:4] for span in together[0]] == [span[:4] for span in alone[0]]
    assert together[0]
    if settings == SINGLE:
        assert not any(" " in span.text for span in together[0])


@needs_bf16
def test_bf16_is_certified_by_scores_and_spans(tmp_path: Path) -> None:
    # With matrices as wide as in the other tests, attention is so sharp that rounding by itself changes what it reads.
    folder, artifact = save_gliner(tmp_path / "checkpoint", spread=0.1), tmp_path / "artifact"
    build(BuildConfig(model=str(folder), target="cpu", precision="bf16", out=str(artifact)), load_engine, Progress())
    certificate = json.loads((artifact / "certificate.json").read_text())
    assert certificate["passed"]
    (output,) = certificate["outputs"]
    assert output["score_difference"] < 0.001
    assert output["cosine_mean"] < 0.999  # all scores are nearly equal: their order is rounding


def test_spans_are_words_of_the_text_in_code_points(model: Any) -> None:
    (spans,) = model.extract([TEXT], LABELS, threshold=0.5, flat=False)
    assert spans
    for span in spans:
        assert span.text == TEXT[span.start : span.end]
        assert span.label in LABELS
        assert 0.5 < span.score <= 1


def test_other_texts_of_a_step_change_nothing(model: Any) -> None:
    texts = [TEXT, "cat", "hello world " * 12, "\u200b", "\u200b the \u200b cat"]
    together = model.extract(texts, LABELS, threshold=0.4)
    for text, spans in zip(texts, together, strict=True):
        (alone,) = model.extract([text], LABELS, threshold=0.4)
        assert [span[:4] for span in alone] == [span[:4] for span in spans]
        assert [span.score for span in alone] == pytest.approx([span.score for span in spans], abs=1e-4)


def test_labels_of_one_request_do_not_change_those_of_another(model: Any) -> None:
    few = model.extract([TEXT], LABELS[:1], threshold=0.4)
    assert model.extract([TEXT], [*LABELS, "four", "five"], threshold=0.4) != few
    assert model.extract([TEXT], LABELS[:1], threshold=0.4) == few


def test_a_long_text_is_read_in_windows_to_its_end(model: Any) -> None:
    text = " ".join(f"the cat sat {index}" for index in range(100))  # 400 words, of 40 a window
    (spans,) = model.extract([text], LABELS, threshold=0.0, flat=True)
    assert spans[0].start == 0
    assert spans[-1].end == len(text)
    covered = sorted((span.start, span.end) for span in spans)
    assert all(first[1] <= second[0] for first, second in pairwise(covered))


def test_a_window_of_a_text_has_the_words_that_the_text_has(model: Any) -> None:
    text = "x" * 5000 + " cat"  # one word that fills the model
    (spans,) = model.extract([text], LABELS, threshold=0.0)
    assert spans[-1].end == len(text)


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([], {}, "labels is empty"),
        (["a", " "], {}, "labels 1 is empty"),
        (["a", "b", "a"], {}, "labels 2 is the same as labels 0"),
        ([f"label {index}" for index in range(10_000)], {}, "10000 labels"),
        ([f"label number {index}" for index in range(200)], {}, "The labels take"),
        (["a <<ENT>> b"], {}, "labels 0 has '<<ENT>>'"),
        (["</s>"], {}, "labels 0 has '</s>'"),
        (["a"], {"threshold": {"b": 0.5}}, "threshold has 'b'"),
        (["a"], {"threshold": 2.0}, "from 0 to 1"),
        (["a"], {"top_k": 2}, "no option 'top_k'"),
    ],
)
def test_labels_and_options_that_do_not_fit_are_refused(
    model: Any, labels: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        model.extract([TEXT], labels, **options)


def test_a_threshold_may_be_a_labels_own(model: Any) -> None:
    (spans,) = model.extract([TEXT], LABELS, threshold={LABELS[0]: 1.0, LABELS[1]: 1.0}, flat=False)
    assert {span.label for span in spans} <= {LABELS[2]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"span_mode": "conv_normal"}, "span_mode = 'conv_normal'"),
        ({"span_mode": "token_level", "represent_spans": True}, "represent_spans"),
        ({"model_type": "gliner_uni_encoder_token_relex"}, "of another kind"),
        ({"subtoken_pooling": "mean"}, "subtoken_pooling"),
        ({"labels_decoder": "some/decoder"}, "labels_decoder"),
        ({"max_width": 0}, "max_width = 0"),
        ({"num_rnn_layers": True}, "num_rnn_layers = true"),
        ({"class_token_index": 3}, "class_token_index = 3"),
        ({"max_len": "many"}, "max_len = 'many'"),
        ({"fuse_layers": True}, "fuse_layers"),
    ],
)
def test_models_that_are_computed_otherwise_are_refused(tmp_path: Path, settings: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        built(tmp_path, "deberta-v2", **settings)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "has no encoder_config, and model_name is None.*save_pretrained"),
        ("./nowhere", r"names './nowhere' as the encoder, and the checkpoint lacks its config\..*save_pretrained"),
    ],
)
def test_a_folder_without_the_encoders_config_says_how_to_save_it(
    tmp_path: Path, name: str | None, message: str
) -> None:
    folder = save_gliner(tmp_path)
    change_json(folder / "gliner_config.json", encoder_config=None, model_name=name)
    with pytest.raises(CheckpointError, match=message):
        build(BuildConfig(model=str(folder), target="cpu", out=str(tmp_path / "out")), load_engine, Progress())


@pytest.mark.parametrize("kind", ["deberta-v2", "mt5"])
def test_tokenizer_and_config_are_those_of_the_encoder_that_is_named(tmp_path: Path, kind: str) -> None:
    """As most models are published: gliner_config.json and weights."""
    whole = save_gliner(tmp_path / "whole", kind)
    settings = json.loads((whole / "gliner_config.json").read_text())
    bare, encoder = tmp_path / "bare", tmp_path / "encoder"
    encoder.mkdir()
    save_tokenizer(encoder, ENCODERS[kind][1]())  # without the library's tokens
    write_json(encoder / "config.json", {**settings["encoder_config"], "vocab_size": 7})
    save_gliner(bare, kind, model_name=str(encoder), vocab_size=-1, class_token_index=-1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    change_json(bare / "gliner_config.json", encoder_config=None)
    answers = []
    for folder in (whole, bare):
        artifact = build_artifact(folder, Path(f"{folder}-artifact"), verify=False)
        assert artifact.manifest.source.model == folder.name
        with Model(artifact.path, tune="off") as model:
            answers.append(model.extract([TEXT], LABELS, threshold=0.3))
    assert answers[0] == answers[1]
    assert answers[0][0]
    (encoder / "tokenizer.json").rename(encoder / "elsewhere.json")
    (encoder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        build_artifact(bare, tmp_path / "out")


_KNOWN = "microsoft/deberta-v3-xsmall"


def published(folder: Path, **encoder: Any) -> Path:
    """A checkpoint as most are published: no encoder_config, and the tokenizer's files of a backbone ``_KNOWN``."""
    save_gliner(folder, encoder=encoder, model_name=_KNOWN, vocab_size=-1, class_token_index=-1)
    settings = json.loads((folder / "gliner_config.json").read_text())
    (folder / "gliner_config.json").write_text(json.dumps({**settings, "encoder_config": None}))
    save_tokenizer(folder, unigram_tokenizer())
    return folder


def test_a_known_backbone_needs_no_config_and_gets_the_librarys_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gliner._BACKBONES, _KNOWN, (2, 32, 4, 48))
    published(tmp_path / "checkpoint", position_buckets=256)
    whole = save_gliner(tmp_path / "whole", encoder={"position_buckets": 256})
    answers = []
    for folder in (tmp_path / "checkpoint", whole):
        artifact = build_artifact(folder, Path(f"{folder}-artifact"), verify=False)
        with Model(artifact.path, tune="off") as model:
            answers.append(model.extract([TEXT], LABELS, threshold=0.4))
    assert answers[0] == answers[1]
    assert answers[0][0]


def test_weights_that_are_not_those_of_the_named_backbone_are_refused(tmp_path: Path) -> None:
    folder = published(tmp_path / "checkpoint", position_buckets=256)
    with pytest.raises(WeightsError, match="embeddings"):
        build(BuildConfig(model=str(folder), target="cpu", out=str(tmp_path / "out")), load_engine, Progress())


def test_a_precision_that_needs_calibration_is_refused(tmp_path: Path) -> None:
    save_gliner(tmp_path / "checkpoint")
    config = BuildConfig(model=str(tmp_path / "checkpoint"), target="cpu", precision="int8", out=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="no calibration texts have labels"):
        build(config, load_engine, Progress())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("deberta-v2", {}),
        ("deberta-v2", {"num_rnn_layers": 2, "width": 32, "embed_ent_token": False}),
        ("deberta-v2", WORDS),
        ("modernbert", {**WORDS, "width": 32, "num_rnn_layers": 0}),
        ("deberta-v2", LINEAR),
        ("deberta-v2", SINGLE),
        ("t5", WORDS),
        ("mt5", {"spread": 0.2}),
        ("eurobert", {"spread": 0.2}),
    ],
)
def test_spans_labels_and_scores_are_the_gliner_librarys(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    gliner = pytest.importorskip("gliner")
    artifact = built(tmp_path, kind, **settings)
    theirs = gliner.GLiNER.from_pretrained(str(tmp_path / "checkpoint"), local_files_only=True)
    rng = random.Random(39)
    texts = [
        "".join(rng.choice(PARTS) + rng.choice([" ", " ", "", ", "]) for _ in range(rng.randint(1, 7)))
        for _ in range(500)
    ]
    with Model(artifact, tune="off") as model:
        for flat, multi, threshold in ((True, False, 0.5), (False, False, 0.45), (True, True, 0.5)):
            options: Any = {"threshold": threshold, "multi_label": multi}
            ours = model.extract(texts, LABELS, flat=flat, **options)
            expected = theirs.inference(texts, LABELS, flat_ner=flat, **options)
            assert sum(map(len, expected)) > 300
            for text, spans, wanted in zip(texts, ours, expected, strict=True):
                assert [(s.start, s.end, s.text, s.label) for s in spans] == [
                    (one["start"], one["end"], one["text"], one["label"]) for one in wanted
                ], text
                assert [s.score for s in spans] == pytest.approx([one["score"] for one in wanted], abs=2e-4)
    assert MAX_WIDTH == 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
def test_all_scores_of_modernbert_are_the_gliner_librarys(tmp_path: Path) -> None:
    """Not the spans chosen: with these weights two scores of a text are equal, and their order is rounding."""
    library = pytest.importorskip("gliner")
    artifact = built(tmp_path, "modernbert", spread=0.2)
    theirs = library.GLiNER.from_pretrained(str(tmp_path / "checkpoint"), local_files_only=True)
    rng = random.Random(39)
    texts = ["".join(rng.choice(PARTS) + rng.choice([" ", ", "]) for _ in range(rng.randint(1, 7))) for _ in range(500)]
    options: Any = {"threshold": 0.0, "multi_label": True}
    with Model(artifact, tune="off") as model:
        ours = model.extract(texts, LABELS, flat=False, **options)
    expected = theirs.inference(texts, LABELS, flat_ner=False, **options)
    found, wanted = (
        [{(s["start"], s["end"], s["label"]): s["score"] for s in spans} for spans in side]
        for side in ([[span._asdict() for span in spans] for spans in ours], expected)
    )
    assert sum(map(len, wanted)) > 5000
    for actual, scores in zip(found, wanted, strict=True):
        assert actual == pytest.approx(scores, abs=2e-4)
