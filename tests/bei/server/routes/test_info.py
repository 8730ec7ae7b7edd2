"""``GET /info``."""

from __future__ import annotations

from pathlib import Path

import pytest

from bei import __version__
from bei.artifact.manifest import Artifact
from bei.artifact.signing_keys import fingerprint
from bei.artifact.store import sign
from bei.engine.fake import FakeEngine
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp
from tests.bei.server.kinds import MARK
from tests.support.artifacts import LIMITS, save_artifact
from tests.support.keys import make_keys


def test_one_model_is_described_in_tei_s_words_and_ours(app: App, artifact: Artifact) -> None:
    found = app.get("/info").json()
    certificate = found.pop("certificate")
    assert found == {
        "model_id": "tiny",
        "model_sha": None,
        "model_dtype": "float32",
        "served_model_name": "tiny",
        "model_type": {"embedding": {"pooling": "mean"}},
        "max_concurrent_requests": 250000,
        "max_input_length": LIMITS.max_seq_len,
        "max_batch_tokens": LIMITS.max_num_tokens,
        "max_batch_requests": LIMITS.max_batch_size,
        "max_client_batch_size": 32,
        "auto_truncate": True,
        "tokenization_workers": found["tokenization_workers"],
        "http_workers": 1,
        "devices": [],
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "tasks": ["embed"],
        "prompts": [],
        "roles": {},
        "target": "fake",
        "precision": "fp32",
        "signature": None,
        "digest": artifact.manifest.digest,
        "images": None,
    }
    (output,) = certificate["outputs"]
    assert (certificate["kind"], certificate["passed"], output["cosine_mean"]) == ("reference", True, 1.0)
    assert certificate["thresholds"] == {"mean": 0.99, "p1": 0.9, "min": 0.5, "ndcg_loss": None}
    assert (certificate["verdict"], certificate["failures"]) == ("passed on 1 texts", [])
    assert (certificate["reference_is_independent"], certificate["texts_sha256"]) == (True, "0" * 64)
    assert (certificate["retrieval"], certificate["quantization"], output["spearman"]) == (None, None, None)
    assert not {"worst_texts", "histogram", "canary_text", "canary_row"} & {*certificate, *output}


def test_who_has_signed_a_model_is_said(make_app: MakeApp, tmp_path: Path) -> None:
    keys = make_keys(tmp_path)
    signed = sign(save_artifact(tmp_path / "signed", name="signed"), keys.key)
    for settings in ({}, {"require_signature": (str(keys.public),)}):
        app = make_app(FakeEngine(LIMITS), (signed, FakeEngine(LIMITS)), **settings)
        assert app.get("/info?model=tiny").json()["signature"] is None
        assert app.get("/info?model=signed").json()["signature"] == {
            "algorithm": "ed25519",
            "key": fingerprint(keys.raw),
            "checked": True,
            "trusted": bool(settings),
        }


@pytest.mark.parametrize(
    ("model", "model_type"),
    [
        ("embedder", {"embedding": {"pooling": "mean"}}),
        ("splade", {"embedding": {"pooling": "splade"}}),
        ("colbert", {"embedding": {"pooling": "token_embedding"}}),
        ("classifier", {"classifier": {"id2label": {"0": "sad", "1": "calm", "2": "glad"}}}),
        ("reranker", {"reranker": {"id2label": {"0": "LABEL_0"}}}),
        ("ner", {"classifier": {"id2label": {"0": "O", "1": "B-PER", "2": "I-PER"}}}),
    ],
)
def test_of_several_models_the_query_names_one(
    kinds: App, model: str, model_type: dict[str, dict[str, object]]
) -> None:
    found = kinds.get(f"/info?model={model}").json()
    assert found["served_model_name"] == model
    ((kind, details),) = found["model_type"].items()
    assert {kind: {key: value for key, value in details.items() if key != "label2id"}} == model_type
    if "id2label" in details:
        assert details["label2id"] == {label: int(index) for index, label in details["id2label"].items()}


def test_without_a_name_the_models_are_listed(kinds: App) -> None:
    check_error(kinds.get("/info"), 400, "set model to one of embedder", param="model")
    check_error(kinds.get("/info?model=x"), 404, "Served: embedder", code="model_not_found")


def test_the_sides_of_late_interaction_are_described(kinds: App) -> None:
    assert kinds.get("/info?model=colbert").json()["roles"] == {
        "query": {
            "max_tokens": 10,
            "expansion": {"token_id": MARK, "num_tokens": 8, "attended": False, "padding_id": None},
            "skip_ids": [],
            "table": False,
        },
        "document": {"max_tokens": 5, "expansion": None, "skip_ids": [MARK], "table": False},
    }
