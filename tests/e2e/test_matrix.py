"""Cases of the zoo from ``save_pretrained`` to HTTP: what routes answer is what the HF classes compute.

Several models share a server process, as many as start within the deadline. Texts of mixed lengths go in one request
and one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from bei.core import Encoding, Float32Array
from bei.engine.postprocess import unit_length
from tests.e2e.process import DEADLINE_S, Server, serve
from tests.model_matrix import pooled
from tests.support.builds import build_artifact
from tests.support.zoo import CASES, MAX_TOKENS, Case, hf_outputs, save_case

TOLERANCE = 2e-4
MODELS_PER_SERVER = 16

# Each output with each tokenizer. The rest differs in mathematics, which parity tests hold.
_QUICK = {(case.tokenizer, case.output): case for case in reversed(CASES)}.values()


def groups() -> Iterator[Any]:
    """Parameters: the cases of a server, those of the first tier before those of the second."""
    for is_slow in (False, True):
        cases = [case for case in CASES if (case not in _QUICK) == is_slow]
        for start in range(0, len(cases), MODELS_PER_SERVER):
            marks = pytest.mark.slow if is_slow else ()
            yield pytest.param(cases[start : start + MODELS_PER_SERVER], id=cases[start].name, marks=marks)


TEXTS = ["hello world", "a", "the cat sat on a mat", "Gr\u00fc\u00dfe, \u4e16\u754c!", "hello the world " * 20]


@pytest.fixture(scope="module", params=groups())
def served(
    request: pytest.FixtureRequest, env: Mapping[str, str], home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, dict[str, Path]]]:
    """A server of one group's models, and their checkpoints by name."""
    folder = tmp_path_factory.mktemp("matrix")
    checkpoints = {case.name: save_case(folder / case.name, case) for case in request.param}
    for name, checkpoint in checkpoints.items():
        build_artifact(checkpoint, folder / "artifacts" / name, verify=False, max_seq_len=MAX_TOKENS)
    artifacts = [folder / "artifacts" / name for name in checkpoints]
    with serve([*artifacts, "--tokenizer-threads", "1", "--engine-threads", "1"], env, home) as server:
        yield server, checkpoints


def test_routes_answer_what_the_hf_classes_compute(served: tuple[Server, dict[str, Path]]) -> None:
    server, checkpoints = served
    by_name = {case.name: case for case in CASES}
    with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
        for name, checkpoint in checkpoints.items():
            expected = expected_answers(by_name[name], checkpoint)
            alone = [([text], [row]) for text, row in zip(TEXTS, expected, strict=True)]
            for texts, answers in ((TEXTS, expected), *alone):
                actual = answers_over_http(client, by_name[name], texts)
                differences = [np.abs(a - e).max() for a, e in zip(actual, answers, strict=True)]
                assert max(differences) <= TOLERANCE, (name, texts, differences)


def expected_answers(case: Case, checkpoint: Path) -> list[Float32Array]:
    """By the HF class; embeddings at unit length, of tokens without the special ones."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    encoded = tokenizer.encode_batch(TEXTS)
    encodings = [Encoding(np.array(encoding.ids, np.int32)) for encoding in encoded]
    outputs = hf_outputs(checkpoint, case, encodings)
    if case.output == "embedding":
        return list(unit_length(np.stack(pooled(case, outputs, None))))
    if case.output == "token_logits":
        kept = [~np.array(encoding.special_tokens_mask, np.bool_) for encoding in encoded]
        return [rows[mask] for rows, mask in zip(outputs, kept, strict=True)]
    return outputs


def answers_over_http(client: httpx.Client, case: Case, texts: list[str]) -> list[Float32Array]:
    """The same by the route for the case's output, as raw as routes give it."""

    def post(route: str, **body: Any) -> Any:
        response = client.post(route, json={"model": case.name, **body})
        assert response.status_code == 200, response.text
        return response.json()

    batch = [[text] for text in texts]
    if case.output == "embedding":
        return [np.array(row, np.float32) for row in post("/embed", inputs=texts)]
    if case.output == "logits":
        answers = post("/predict", inputs=batch, raw_scores=True)
        scores = [{entry["label"]: entry["score"] for entry in answer} for answer in answers]
        return [np.array([row[f"LABEL_{index}"] for index in range(len(row))], np.float32) for row in scores]
    if case.output == "token_logits":
        answers = post("/predict_tokens", inputs=batch, raw_scores=True)
        return [np.array([list(token["results"].values()) for token in answer], np.float32) for answer in answers]
    vectors = []
    for answer in post("/embed_sparse", inputs=texts):
        vector = np.zeros(case.tokenizer().get_vocab_size(), np.float32)
        vector[[entry["index"] for entry in answer]] = [entry["value"] for entry in answer]
        vectors.append(vector)
    return vectors
