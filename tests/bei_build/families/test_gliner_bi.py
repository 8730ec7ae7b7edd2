"""GLiNER models with an encoder of labels: built, served in process, over HTTP, in several processes and in bulk, and
against the gliner library where it is installed."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bei import Model, Span
from bei.artifact.manifest import LABEL_ENGINE_DIR, LABEL_TOKENIZER, Artifact
from bei.cli.certificate import as_tables
from bei.cli.inspect_artifact import as_table as inspected
from bei.config.settings import ServeConfig
from bei.core import Encoding, LabelTable, LabelVectors, Outputs, PackedBatch
from bei.engine.openvino import OpenVINOEngine
from bei.errors import ArtifactManifestError, CheckpointError, CheckpointNotFoundError, ConfigError, InvalidRequestError
from bei.server.make_app import make_app
from bei.service.admission import Ticket, estimated_length
from bei.tasks import extract
from tests.bei_build.families.test_gliner import LABELS, PARTS, TEXT
from tests.e2e.process import Server, environment
from tests.support.builds import build_artifact
from tests.support.checkpoints import change_json
from tests.support.gliner_models import save_gliner

WORDS = {"model_type": "gliner_bi_encoder_token", "span_mode": "token_level"}


def built(folder: Path, kind: str = "deberta-v2", labels: str = "bert", **settings: Any) -> Artifact:
    checkpoint = save_gliner(folder / "checkpoint", kind, labels=labels, **settings)
    return build_artifact(checkpoint, folder / "artifact", name="spans")


def places(spans: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(span[name] for name in ("start", "end", "text", "label")) for span in spans]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("gliner"))


def test_both_towers_are_certified_and_described(artifact: Artifact) -> None:
    certificate, tower = artifact.certificate, artifact.manifest.label_tower
    assert certificate.passed
    assert certificate.labels
    assert [one.output for one in (*certificate.outputs, *certificate.labels.outputs)] == ["span_logits", "embedding"]
    assert certificate.outputs[0].span_agreement == 1.0
    assert certificate.labels.outputs[0].cosine_min > 0.9999
    assert certificate.labels.tokens
    assert tower
    assert (tower.spec.architecture, tower.embedding.normalize) == ("BertModel", False)
    assert artifact.manifest.spec.architecture == "BiEncoderSpanGLiNER"
    assert {LABEL_TOKENIZER, f"{LABEL_ENGINE_DIR}/model.bin"} <= {info.path for info in artifact.manifest.files}
    assert "The tower of labels" in (artifact.path / "certificate.html").read_text()
    of_labels = f"mean {certificate.labels.outputs[0].cosine_mean:.6f}"
    assert of_labels in inspected(artifact)
    assert of_labels in as_tables(artifact)


def test_a_label_is_computed_for_the_first_request_alone(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[frozenset[str]] = []
    run = OpenVINOEngine.run

    def counted(engine: OpenVINOEngine, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        steps.append(frozenset(outputs or ()))
        return run(engine, batch, outputs)

    with Model(artifact.path, tune="off") as model:
        first = model.extract([TEXT], LABELS, threshold=0.4)
        monkeypatch.setattr(OpenVINOEngine, "run", counted)
        assert model.extract([TEXT], LABELS, threshold=0.4) == first
        assert steps == [{"span_logits"}]
        model.extract([TEXT], [*LABELS, "new"], threshold=0.4)
        assert steps[1:] == [{"embedding"}, {"span_logits"}]


def test_other_texts_and_labels_of_a_step_change_nothing(artifact: Artifact) -> None:
    texts = [TEXT, "cat", "hello world " * 12, "\u200b", "\u200b the \u200b cat"]
    with Model(artifact.path, tune="off") as model:
        together = model.extract(texts, LABELS, threshold=0.4)
        for text, spans in zip(texts, together, strict=True):
            (alone,) = model.extract([text], LABELS, threshold=0.4)
            assert [span[:4] for span in alone] == [span[:4] for span in spans]
        few, many = (
            {span[:4]: span.score for span in model.extract([TEXT], labels, threshold=0.4, flat=False)[0]}
            for labels in (LABELS[:1], [*LABELS, "more"])
        )
    common = few.keys() & many.keys()
    assert common  # a label's scores do not depend on others
    assert [few[span] for span in common] == pytest.approx([many[span] for span in common], abs=1e-4)


def test_sequences_with_the_same_labels_share_their_rows_and_one_without_has_zeros() -> None:
    one, other = (LabelVectors(np.full((count, 3), count, np.float32), bytes([count])) for count in (2, 1))
    given = [one, None, other, one]
    table = LabelTable.of([Encoding(np.zeros(1, np.int32), label_vectors=labels) for labels in given])
    assert table
    assert table.rows[:, 0].tolist() == [2, 2, 0, 1]
    assert (table.starts.tolist(), table.counts.tolist()) == ([0, 2, 3, 0], [2, 1, 1, 2])


def test_the_route_answers_as_the_model_does(artifact: Artifact) -> None:
    async def asked() -> list[Any]:
        async with await make_app([artifact], ServeConfig(tune="off")) as served:
            transport = httpx.ASGITransport(served.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://bei.test") as client:
                body = {"input": [TEXT], "labels": LABELS, "threshold": 0.4}
                ready = await client.get("/health")
                return [ready, *[await client.post("/v1/extract", json=body) for _ in range(2)]]

    ready, *answers = asyncio.run(asked())
    assert ready.status_code == 200, ready.text
    with Model(artifact.path, tune="off") as model:
        (expected,) = model.extract([TEXT], LABELS, threshold=0.4)
    for answer in answers:
        assert answer.status_code == 200, answer.text
        (found,) = answer.json()["data"]
        assert [(one["start"], one["end"], one["label"]) for one in found["spans"]] == [
            (one.start, one.end, one.label) for one in expected
        ]


def test_labels_count_in_what_a_server_accepts(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten texts read the same labels, which are computed once, and count until they are."""
    held: list[int] = []
    compute = extract._vectors

    async def noted(service: Any, labels: Any, ticket: Ticket) -> LabelVectors:
        found = await compute(service, labels, ticket)
        held.append(ticket.held_tokens)
        return found

    monkeypatch.setattr(extract, "_vectors", noted)

    async def asked() -> list[httpx.Response]:
        async with await make_app([artifact], ServeConfig(tune="off", max_queue_tokens=1200)) as served:
            transport = httpx.ASGITransport(served.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://bei.test") as client:
                labels = ["cat " * (1 + place) for place in range(50)]
                texts, sie = [{"text": TEXT}] * 10, "/v1/extract/spans"
                return [
                    await client.post("/v1/extract", json={"input": [TEXT] * 10, "labels": labels}),
                    await client.post(sie, json={"items": texts, "params": {"labels": labels}}),
                    await client.post("/v1/extract", json={"input": [TEXT] * 10, "labels": labels[:20]}),
                    await client.post(sie, json={"items": texts, "params": {"labels": labels[:20]}}),
                ]

    *refused, first, second = asyncio.run(asked())
    for answer in refused:
        assert answer.status_code == 400, answer.text
        assert "tokens, the limit is 1200: split it" in answer.text
    assert (first.status_code, second.status_code) == (200, 200), first.text + second.text
    assert held == [10 * estimated_length(len(TEXT), artifact.manifest.max_seq_len)] * 2


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([f"label {index}" for index in range(300)], "300 labels, and a text is scored for 256 at once"),
        (["cat " * 600], "A label has more than the 512 tokens"),
        (["a", " "], "labels 1 is empty"),
        (["a", "a"], "labels 1 is the same as labels 0"),
    ],
)
def test_labels_that_do_not_fit_are_refused(artifact: Artifact, labels: list[str], message: str) -> None:
    with Model(artifact.path, tune="off") as model, pytest.raises(InvalidRequestError, match=message):
        model.extract([TEXT], labels)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"post_fusion_schema": "l2l-l2t-t2t"}, "post_fusion_schema"),
        ({"fuse_layers": True}, "fuse_layers"),
        ({"labels_decoder": "gpt2"}, "of another kind"),
        ({"model_type": "gliner_uni_encoder_span"}, "with 2 encoders bei builds BiEncoderSpanGLiNER and"),
        ({"labels_encoder_config": {"model_type": "gpt2"}}, "model_type 'gpt2'"),
    ],
)
def test_models_that_are_computed_otherwise_are_refused(tmp_path: Path, settings: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        built(tmp_path, **settings)


def test_without_its_tokenizer_the_encoder_of_labels_is_looked_for_by_name(tmp_path: Path) -> None:
    checkpoint = save_gliner(tmp_path / "checkpoint", labels="bert")
    (checkpoint / "labels_tokenizer").rename(tmp_path / "elsewhere")
    change_json(checkpoint / "gliner_config.json", labels_encoder=str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointNotFoundError, match=r"nowhere.*as the encoder of labels.*save_pretrained"):
        build_artifact(checkpoint, tmp_path / "out")
    change_json(checkpoint / "gliner_config.json", labels_encoder=str(tmp_path / "elsewhere"))
    assert build_artifact(checkpoint, tmp_path / "out").manifest.label_tower


def test_settings_of_the_tokenizer_and_of_steps_are_of_both_engines(tmp_path: Path) -> None:
    checkpoint = save_gliner(tmp_path / "checkpoint", labels="bert")
    limits: dict[str, Any] = {"max_seq_len": 40, "max_num_tokens": 300, "max_batch_size": 5}
    artifact = build_artifact(checkpoint, tmp_path / "out", verify=False, tokenizer="file", **limits)
    tower = artifact.manifest.label_tower
    assert tower
    assert tower.tokenization.tokenizer_class == "tokenizer.json"
    for side in (artifact.manifest, tower):
        assert {name: getattr(side, name) for name in limits} == limits
    with pytest.raises(ConfigError, match="max_num_tokens 100 cannot hold one sequence of max_seq_len"):
        build_artifact(checkpoint, tmp_path / "none", max_num_tokens=100)


def test_reference_answers_are_not_kept_without_the_labels(tmp_path: Path) -> None:
    checkpoint = save_gliner(tmp_path / "checkpoint", labels="bert")
    with pytest.raises(ConfigError, match="keep_reference"):
        build_artifact(checkpoint, tmp_path / "out", keep_reference=True)


def test_an_artifact_whose_tower_of_labels_is_missing_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    shutil.copytree(artifact.path, tmp_path / "copy")
    change_json(tmp_path / "copy" / "manifest.json", labels=None)
    with pytest.raises(ArtifactManifestError):
        Model(tmp_path / "copy", tune="off")


@pytest.mark.slow
def test_several_processes_and_a_bulk_job_find_the_same_spans(artifact: Artifact, tmp_path: Path) -> None:
    env = environment(tmp_path)
    with Model(artifact.path, tune="off") as model:
        expected = [[span[:4] for span in spans] for spans in model.extract([TEXT, "hello world"], LABELS)]
    flags = ["--http-workers", "2", "--tune", "off", "--port", "0"]
    with Server([sys.executable, "-m", "bei", "serve", str(artifact.path), *flags], env, tmp_path) as server:
        for _ in range(8):
            answer = httpx.post(f"{server.url}/v1/extract", json={"input": [TEXT, "hello world"], "labels": LABELS})
            assert [places(one["spans"]) for one in answer.json()["data"]] == expected
    pq.write_table(pa.table({"text": [TEXT, "hello world"]}), tmp_path / "rows.parquet")
    command = [sys.executable, "-m", "bei", "embed", str(artifact.path), "--input", str(tmp_path / "rows.parquet")]
    command += ["--output", str(tmp_path / "out"), "--task", "extract", "--labels", ",".join(LABELS)]
    subprocess.run(command, check=True, env=env, capture_output=True)
    rows = pq.read_table(sorted((tmp_path / "out").glob("*.parquet"))).sort_by("row")["spans"].to_pylist()
    assert [places(spans) for spans in rows] == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
@pytest.mark.parametrize(
    ("kind", "labels", "settings"),
    [
        ("deberta-v2", "bert", {}),
        ("deberta-v2", "bert", {"width": 40, "num_rnn_layers": 0}),
        ("deberta-v2", "deberta-v2", WORDS),
        ("modernbert", "bert", {"spread": 0.2, **WORDS}),
    ],
)
def test_spans_labels_and_scores_are_the_gliner_librarys(
    tmp_path: Path, kind: str, labels: str, settings: dict[str, Any]
) -> None:
    library = pytest.importorskip("gliner")
    artifact = built(tmp_path, kind, labels, **settings)
    theirs = library.GLiNER.from_pretrained(str(tmp_path / "checkpoint"), local_files_only=True)
    assert type(theirs).__name__ == artifact.manifest.spec.architecture
    rng = random.Random(39)
    texts = [
        "".join(rng.choice(PARTS) + rng.choice([" ", " ", "", ", "]) for _ in range(rng.randint(1, 7)))
        for _ in range(500)
    ]
    asked = [*LABELS, "[SEP] label", "Hello: 42 cats"]
    with Model(artifact.path, tune="off") as model:
        for flat, multi, threshold in ((True, False, 0.3), (False, False, 0.35), (True, True, 0.3)):
            options: Any = {"threshold": threshold, "multi_label": multi}
            ours = model.extract(texts, asked, flat=flat, **options)
            expected = theirs.inference(texts, asked, flat_ner=flat, **options)
            assert sum(map(len, expected)) > 200
            num_ties = sum(differing_at_ties(*both, threshold) for both in zip(ours, expected, strict=True))
            assert num_ties < 0.05 * sum(map(len, expected))


def differing_at_ties(ours: list[Span], expected: list[dict[str, Any]], threshold: float) -> int:
    """How many spans of a text one side has alone: at the threshold, or beside an overlapping one that scores at least
    as much. Of scores that are nearly the same, rounding chooses. Scores of the other spans are equal."""
    found = {(one.start, one.end, one.label): one.score for one in ours}
    wanted = {(one["start"], one["end"], one["label"]): one["score"] for one in expected}
    common = found.keys() & wanted.keys()
    assert [found[span] for span in common] == pytest.approx([wanted[span] for span in common], abs=2e-4)
    for mine, others in ((found, wanted), (wanted, found)):
        for span in mine.keys() - common:
            over = [others[one] for one in others.keys() - common if one[0] < span[1] and span[0] < one[1]]
            assert max([*over, threshold]) >= mine[span] - 1e-5
    return len(found.keys() ^ wanted.keys())
