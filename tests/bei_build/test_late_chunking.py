"""Late chunking: each chunk is the mean of its tokens' states in the whole document, as the HF model computes them."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from bei.config.settings import ServeConfig
from bei.engine.postprocess import unit_length
from bei.errors import InvalidRequestError
from bei.metrics.registry import Metrics
from bei.scheduler.device_gate import DeviceGate
from bei.service.loader import load_service
from bei.tasks.embed import Embeddings, EmbedTask, check_task, embed_chunks
from tests.support.builds import build_artifact
from tests.support.checkpoints import HIDDEN, Dense, Normalize, add_modules, save_checkpoint, wordpiece_tokenizer

CHUNKS = ["The cat sat on the mat.", "Hello, world!", "a mat"]


def chunked(artifact: Path, chunks: list[str], prompt: str = "") -> Embeddings:
    async def run() -> Embeddings:
        service = load_service(artifact, ServeConfig(tokenizer_threads=1), Metrics(), DeviceGate())
        try:
            with service.admit(chunks) as ticket:
                task = check_task(service, EmbedTask(chunks, prompt=prompt, late_chunking=True), "embed")
                return await embed_chunks(service, task, ticket=ticket)
        finally:
            await asyncio.get_running_loop().run_in_executor(None, service.close)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("prompt", ["", "the world: "])
def test_chunks_are_means_of_the_states_of_the_whole_document(checkpoint: Path, prompt: str, tmp_path: Path) -> None:
    build_artifact(checkpoint, tmp_path / "artifact", token_embeddings=True, pooling="mean", reference="engine")
    answer = chunked(tmp_path / "artifact", CHUNKS, prompt)

    encode = wordpiece_tokenizer().encode
    counts = [len(encode(text, add_special_tokens=False).ids) for text in (prompt, *CHUNKS)]
    ids = torch.tensor([encode(prompt + " ".join(CHUNKS)).ids])
    model = transformers.AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(input_ids=ids).last_hidden_state[0].numpy()
    starts = 1 + np.cumsum([0, *counts])
    means = [states[start:end].mean(axis=0) for start, end in itertools.pairwise(starts[1:])]
    np.testing.assert_allclose(answer.vectors, unit_length(np.stack(means)), atol=1e-4)
    assert answer.num_tokens == ids.shape[1]
    alone = chunked(tmp_path / "artifact", CHUNKS[1:2])
    assert np.abs(alone.vectors[0] - answer.vectors[1]).max() > 1e-3  # or chunks would not have seen each other


def test_a_model_without_token_states_says_how_to_build_it(checkpoint: Path, tmp_path: Path) -> None:
    build_artifact(checkpoint, tmp_path / "artifact", pooling="mean", reference="engine")
    with pytest.raises(InvalidRequestError, match="build it with --token-embeddings"):
        chunked(tmp_path / "artifact", CHUNKS)


def test_other_poolings_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    build_artifact(checkpoint, tmp_path / "artifact", token_embeddings=True, pooling="cls", reference="engine")
    with pytest.raises(InvalidRequestError, match="needs a model with mean pooling"):
        chunked(tmp_path / "artifact", CHUNKS)


def test_a_model_with_a_dense_module_behind_its_mean_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Its chunks would have other vectors than its texts: the states are those before the module."""
    dense = shutil.copytree(checkpoint, tmp_path / "dense")
    add_modules(dense, tail=[Dense(HIDDEN), Normalize()])
    built = build_artifact(dense, tmp_path / "artifact", token_embeddings=True, reference="engine")
    assert built.manifest.dimension("token_embedding") == built.manifest.dimension("embedding")
    with pytest.raises(InvalidRequestError, match="has further layers behind it: send late_chunking false"):
        chunked(tmp_path / "artifact", CHUNKS)


def test_a_chunk_without_tokens_is_named(checkpoint: Path, tmp_path: Path) -> None:
    build_artifact(checkpoint, tmp_path / "artifact", token_embeddings=True, pooling="mean", reference="engine")
    with pytest.raises(InvalidRequestError, match="input 1 has no tokens"):
        chunked(tmp_path / "artifact", ["hello", "\u200b", "world"])


def test_a_document_longer_than_the_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    build_artifact(checkpoint, tmp_path / "artifact", token_embeddings=True, pooling="mean", reference="engine")
    with pytest.raises(InvalidRequestError, match="more than the model's 48 tokens"):
        chunked(tmp_path / "artifact", ["cat " * 30, "mat " * 30])
