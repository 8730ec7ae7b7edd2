"""What a request has read with every input, a prompt, an instruction, labels, is admitted with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bei.artifact.manifest import Classification, RerankTemplate
from tests.bei.server.app import App
from tests.bei.server.kinds import post, save_kind

LONG = "the cat " * 4  # 32 characters, estimated as eight tokens
RANKING = {"query": {"text": "a"}, "passages": [{"text": "b"}, {"text": "c"}]}
NLI = ["contradiction", "neutral", "entailment"]
ASKED, ASKED_AT_LENGTH = (
    {"which": {"type": "choice", "instructions": instructions, "criteria": {"cat": None, "hello": None}}}
    for instructions in ("a", "a" + LONG)
)
PARTS = {"content": [{"type": "text", "text": "a"}]}
LABELS, AT_LENGTH = {"candidate_labels": ["cat"]}, {"hypothesis_template": "This example is {}." + LONG}
TEMPLATE = RerankTemplate(prefix="", body="{instruction} {query} {document}", suffix="", instruction="")

SIE_ITEMS = {"items": [{"text": "a"}, {"text": "b"}], "params": {"labels": ["a"]}}

PROMPTED: list[tuple[str, str, dict[str, Any], dict[str, Any], int]] = [
    ("embedder", "/v1/embeddings", {"input": ["a", "b"]}, {"prompt": LONG}, 2),
    ("embedder", "/embed", {"inputs": ["a", "b"]}, {"prompt": LONG + "{text}"}, 2),
    ("embedder", "/embed", {"inputs": ["a", [5, 6]]}, {"prompt": LONG}, 1),  # not in front of ids
    ("embedder", "/", {"inputs": ["a", "b"]}, {"prompt": LONG}, 2),
    ("embedder", "/v1/embeddings", {"input": ["a", "b"]}, {"prompt_name": "long"}, 2),
    ("embedder", "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, {"prompt": LONG}, 2),
    ("splade", "/embed_sparse", {"inputs": ["a", "b"]}, {"prompt": LONG}, 2),
    ("colbert", "/embed_all", {"inputs": ["a", "b"]}, {"prompt": LONG}, 2),
    ("reranker", "/rerank", {"query": "a", "texts": ["b", "c"]}, {"instruction": LONG}, 2),
    ("reranker", "/v1/rerank", {"query": "a", "documents": ["b", "c"]}, {"instruct": LONG}, 2),
    ("reranker", "/score", {"text_1": "a", "text_2": ["b", "c"]}, {"instruction": LONG}, 2),
    ("spans", "/v1/extract", {"input": ["a", "b"], "labels": ["a"]}, {"labels": ["a", LONG]}, 2),
    ("spans", "/v1/extract/spans", SIE_ITEMS, {"params": {"labels": ["a", LONG]}}, 2),
    ("classifier", "/v1/extract/classifier", SIE_ITEMS, {"params": {"labels": ["a" + LONG]}}, 2),
    ("embedder", "/jina/v1/embeddings", {"input": ["a", "b"]}, {"task": "long"}, 2),
    ("embedder", "/jina/v1/embeddings", {"input": ["a", "b"], "late_chunking": False}, {"input_type": "query"}, 2),
    ("embedder", "/cohere/v2/embed", {"texts": ["a", "b"]}, {"input_type": "search_query"}, 2),
    ("embedder", "/cohere/v1/embed", {"texts": ["a", "b"]}, {"input_type": "search_query"}, 2),
    ("embedder", "/voyage/v1/embeddings", {"input": ["a", "b"]}, {"input_type": "query"}, 2),
    ("embedder", "/voyage/v1/multimodalembeddings", {"inputs": [PARTS]}, {"input_type": "query"}, 1),
    ("embedder", "/nim/v1/embeddings", {"input": ["a", "b"]}, {"input_type": "query"}, 2),
    ("embedder", "/embeddings", {"input": ["a", "b"]}, {"input_type": "query"}, 2),
    ("embedder", "/v1/embeddings", {"input": ["a", "b"]}, {"task": "query"}, 2),
    ("embedder", "/tei/embed", {"inputs": ["a", "b"]}, {"prompt_name": "long"}, 2),
    ("colbert", "/jina/v1/multi-vector", {"input": ["a", "b"], "truncate": True}, {"input_type": "query"}, 2),
    ("reranker", "/v1/systemone", {"state": "a", "questions": ASKED}, {"questions": ASKED_AT_LENGTH}, 2),
    ("classifier", "/v1/classify", {"input": ["a", "b"], "labels": ["cat"]}, {"labels": ["cat" + LONG]}, 2),
    ("classifier", "/", {"inputs": "a", "parameters": LABELS}, {"parameters": {**LABELS, **AT_LENGTH}}, 1),
]


@pytest.mark.parametrize(("model", "path", "body", "asked", "times"), PROMPTED)
def test_what_is_read_with_every_input_is_admitted_with_it(
    model: str, path: str, body: dict[str, Any], asked: dict[str, Any], times: int, tmp_path: Path
) -> None:
    fields: dict[str, dict[str, Any]] = {
        "embedder": {"prompts": {"long": LONG, "query": LONG}},
        "colbert": {"prompts": {"query": LONG, "document": ""}},
        "classifier": {"classification": Classification(labels=NLI, function="softmax")},
        "reranker": {"rerank_template": TEMPLATE},
    }
    app = App(save_kind(tmp_path / model, model, **fields.get(model, {})))
    try:
        bare, prompted = (admitted_tokens(app, path, fields) for fields in (body, {**body, **asked}))
    finally:
        app.close()
    assert prompted - bare == times * 8


@pytest.mark.parametrize(
    ("model", "path", "body"),
    [
        ("classifier", "/predict", {"inputs": [["a"], ["b"]]}),
        ("classifier", "/classify", {"input": ["a", "b"]}),
        ("classifier", "/", {"inputs": ["a", "b"], "parameters": {}}),
        ("classifier", "/pooling", {"input": ["a", "b"]}),
        ("reranker", "/rerank", {"query": "a", "texts": ["b", "c"]}),
        (
            "reranker",
            "/v1/ranking",
            {**RANKING, "truncate": "END"},
        ),
    ],
)
def test_so_is_what_the_model_itself_has_read(model: str, path: str, body: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for prompts in ({}, {"prompts": {"long": LONG}, "default_prompt_name": "long"}):
        app = App(save_kind(tmp_path / f"{model} {len(prompts)}", model, **prompts))
        try:
            found.append(admitted_tokens(app, path, body))
        finally:
            app.close()
    assert found[1] - found[0] == 2 * 8


def test_so_are_prompts_of_instances(tmp_path: Path) -> None:
    app = App(save_kind(tmp_path / "embedder", "embedder"))
    try:
        bare = admitted_tokens(app, "/vertex", {"instances": [{"inputs": "a"}, {"inputs": "a"}]})
        prompted = {"instances": [{"inputs": "a", "prompt": LONG}, {"inputs": "a", "prompt": LONG}]}
        assert admitted_tokens(app, "/vertex", prompted) - bare == 2 * 8
    finally:
        app.close()


@pytest.mark.parametrize("path", ["/v1/extract", "/v1/extract/spans"])
def test_a_text_that_is_read_in_windows_is_admitted_with_all_of_them(path: str, tmp_path: Path) -> None:
    """A book counted as one window, and went before everybody's texts in the interactive lane."""
    text = "the cat " * 2_000
    body = {"input": text, "labels": ["a"], "items": [{"text": text}], "params": {"labels": ["a"]}}
    app = App(save_kind(tmp_path / "spans", "spans"))
    try:
        (service,) = app.models
        lanes = []
        admit = service._admission.admit

        def noted(*args: Any) -> Any:
            lanes.append((ticket := admit(*args)).lane)
            return ticket

        service._admission.admit = noted
        admitted = admitted_tokens(app, path, body)
        read = post(app, "/v1/extract", **body).json()["usage"]["total_tokens"]
    finally:
        app.close()
    assert set(lanes) == {"bulk"}
    assert read / 2 < admitted < read * 2


def admitted_tokens(app: App, path: str, body: dict[str, Any]) -> int:
    (service,) = app.models
    admit, admitted = type(service).admit, []

    def noted(*args: Any, **options: Any) -> Any:
        admitted.append(admit(service, *args, **options))
        return admitted[-1]

    service.admit = noted
    response = post(app, path, **body)
    assert response.status_code == 200, response.text
    assert service._admission.num_tokens == 0
    return sum(ticket.admitted.num_tokens for ticket in admitted)
