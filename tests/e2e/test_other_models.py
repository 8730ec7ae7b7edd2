"""Embedders of ``tests.support.other_models`` from ``bei build`` to HTTP, in one server: what a route answers is what
the artifact's engine computes, which tests of families hold to the authors' code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from bei.artifact.manifest import TOKENIZER, Artifact
from bei.core import Encoding, Float32Array
from bei.engine.postprocess import unit_length
from tests.e2e.process import DEADLINE_S, Server, serve
from tests.support.builds import build_artifact, embed, running
from tests.support.other_models import OTHERS

pytestmark = pytest.mark.slow

TEXTS = ["hello world", "a", "the cat sat on a mat", "Gr\u00fc\u00dfe, \u4e16\u754c!", "hello the world " * 20]
# Others have tests of their own here (test_late_interaction, test_inference_free, test_images) and by route
# (test_jina_reranker).
_NO_EMBEDDERS = (
    *("LFM2.5-ColBERT", "PyLate with a residual", "opensearch-neural-sparse, documents"),
    *("jina-reranker-v3", "jina-reranker-v3.5", "SigLIP, texts"),
)
EMBEDDERS = [name for name in OTHERS if name not in _NO_EMBEDDERS]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """Of each embedder, by name."""
    built = {}
    for number, name in enumerate(EMBEDDERS):
        folder, other = tmp_path_factory.mktemp("other"), OTHERS[name]
        checkpoint = other.save(folder / "checkpoint")
        loras = tuple(f"{lora}={path}" for lora, path in other.lora_folders(checkpoint).items())
        built[name] = build_artifact(
            *(checkpoint, folder / "artifact"), name=f"model-{number}", reference="engine", lora=loras, **other.choice
        )
    return built


@pytest.fixture(scope="module")
def server(artifacts: Mapping[str, Artifact], env: Mapping[str, str], home: Path) -> Iterator[Server]:
    paths = [artifact.path for artifact in artifacts.values()]
    with serve([*paths, "--tokenizer-threads", "1", "--engine-threads", "1"], env, home) as found:
        yield found


def of_the_engine(artifact: Artifact) -> Float32Array:
    """With the last of the model's adapters, if it has any."""
    tokenizer, adapter = Tokenizer.from_file(str(artifact.path / TOKENIZER)), len(artifact.manifest.adapter_names)
    tokenizer.enable_truncation(artifact.manifest.max_seq_len)
    encodings = [Encoding(np.array(one.ids, np.int32), adapter=adapter) for one in tokenizer.encode_batch(TEXTS)]
    with running(artifact) as engine:
        return unit_length(embed(engine, encodings))


@pytest.mark.parametrize("name", EMBEDDERS)
def test_routes_answer_what_the_engine_computes(name: str, artifacts: Mapping[str, Artifact], server: Server) -> None:
    artifact = artifacts[name]
    expected = of_the_engine(artifact)
    model = ":".join((artifact.manifest.name, *artifact.manifest.adapter_names[-1:]))
    with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:

        def answer(texts: list[str]) -> Float32Array:
            response = client.post("/embed", json={"model": model, "inputs": texts, "truncate": True})
            assert response.status_code == 200, response.text
            return unit_length(np.array(response.json(), np.float32))

        np.testing.assert_allclose(answer(TEXTS), expected, atol=2e-5)
        for text, row in zip(TEXTS, expected, strict=True):
            np.testing.assert_allclose(answer([text])[0], row, atol=2e-5)
