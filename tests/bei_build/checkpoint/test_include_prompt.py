"""Prompts whose tokens are left out of the mean (INSTRUCTOR), counted as in sentence-transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from bei.config.settings import ServeConfig
from bei.core import Float32Array
from bei.engine.postprocess import unit_length
from bei.errors import CheckpointError, ConfigError
from bei.metrics.registry import Metrics
from bei.scheduler.device_gate import DeviceGate
from bei.service.call import ModelInput
from bei.service.loader import load_service
from bei.tasks.embed import EmbedTask, check_task, embed_inputs
from bei.tokenizer.encoder import EncodingOptions
from tests.support.builds import build_artifact
from tests.support.checkpoints import (
    Dense,
    Normalize,
    add_modules,
    change_json,
    save_checkpoint,
    unigram_tokenizer,
    write_json,
)
from tests.support.reading import read, refused, saved

PROMPT = "the cat: "
TEXTS = ["The cat sat on the mat.", "a", "Hello, world!", "the cat"]


def embed(
    artifact: Path, inputs: Sequence[ModelInput], prompt: str, options: EncodingOptions | None = None
) -> Float32Array:
    async def run() -> Float32Array:
        service = load_service(artifact, ServeConfig(tokenizer_threads=1), Metrics(), DeviceGate())
        try:
            with service.admit(inputs) as ticket:
                task = EmbedTask(inputs, options or EncodingOptions(), prompt=prompt)
                return (await embed_inputs(service, check_task(service, task, "embed"), ticket=ticket)).vectors
        finally:
            await asyncio.get_running_loop().run_in_executor(None, service.close)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = saved(tmp_path_factory.mktemp("t5") / "checkpoint", "T5EncoderModel")
    add_modules(folder, ("mean",), (Normalize(),))
    return folder


def with_prompts(folder: Path, **pooling: object) -> Path:
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": PROMPT}})
    change_json(folder / "1_Pooling" / "config.json", **pooling)
    return folder


@pytest.fixture(scope="module")
def artifact(t5: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_artifact(with_prompts(t5, include_prompt=False), tmp_path_factory.mktemp("t5") / "artifact").path


def expected(folder: Path, texts: Sequence[str], prompt: str) -> Float32Array:
    """sentence-transformers 6: the prompt with its special tokens, except one at its end, is masked."""
    model = transformers.T5EncoderModel.from_pretrained(folder, dtype=torch.float32)
    encode = unigram_tokenizer().encode
    count = len(encode(prompt).ids) - 1 if prompt else 0
    rows = []
    for text in texts:
        with torch.no_grad():
            states = model(input_ids=torch.tensor([encode(prompt + text).ids])).last_hidden_state[0]
        rows.append(states[count:].mean(0).numpy())
    return unit_length(np.stack(rows))


@pytest.mark.parametrize("prompt", ["", PROMPT, "a"])
def test_the_mean_is_over_what_is_behind_the_prompt(t5: Path, artifact: Path, prompt: str) -> None:
    vectors = embed(artifact, TEXTS, prompt)
    np.testing.assert_allclose(vectors, expected(t5, TEXTS, prompt), atol=1e-5)


def test_equal_tokens_behind_another_prompt_are_another_input(t5: Path, artifact: Path) -> None:
    """They are neither merged nor cached: the two differ only in the pooled tokens."""

    async def both() -> list[Float32Array]:
        config = ServeConfig(tokenizer_threads=1, cache_megabytes=1)
        service = load_service(artifact, config, Metrics(), DeviceGate())
        try:
            with service.admit(["x"]) as ticket:
                calls = [(PROMPT, "a mat"), (f"{PROMPT}a ", "mat"), ("", f"{PROMPT}a mat")]
                tasks = [check_task(service, EmbedTask([text], prompt=prompt), "embed") for prompt, text in calls]
                answers = await asyncio.gather(*(embed_inputs(service, task, ticket=ticket) for task in tasks))
                return [answer.vectors for answer in answers]
        finally:
            await asyncio.get_running_loop().run_in_executor(None, service.close)

    first, second, third = asyncio.run(both())
    np.testing.assert_allclose(first, expected(t5, ["a mat"], PROMPT), atol=1e-5)
    np.testing.assert_allclose(second, expected(t5, ["mat"], f"{PROMPT}a "), atol=1e-5)
    np.testing.assert_allclose(third, expected(t5, [f"{PROMPT}a mat"], ""), atol=1e-5)


def test_token_ids_have_no_prompt(t5: Path, artifact: Path) -> None:
    ids = unigram_tokenizer().encode(TEXTS[0]).ids
    np.testing.assert_allclose(embed(artifact, [ids], PROMPT), expected(t5, TEXTS[:1], ""), atol=1e-5)


def test_a_text_that_is_cut_on_the_left_keeps_its_prompt_out_of_the_mean(t5: Path, artifact: Path) -> None:
    text, limit = "the cat sat on " * 10 + "a mat", 16
    options = EncodingOptions(max_tokens=limit, direction="left", truncate=True)
    (row,) = embed(artifact, [text], PROMPT, options)
    first, last = unigram_tokenizer().encode("").ids
    before, inner = (unigram_tokenizer().encode(part, add_special_tokens=False).ids for part in (PROMPT, text))
    ids = [first, *before, *inner[len(inner) - (limit - 2 - len(before)) :], last]
    model = transformers.T5EncoderModel.from_pretrained(t5, dtype=torch.float32)
    with torch.no_grad():
        states = model(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(row, unit_length(states[1 + len(before) :].mean(axis=0)[None])[0], atol=1e-5)


def test_of_a_text_without_room_its_end_is_pooled(t5: Path, artifact: Path) -> None:
    (row,) = embed(artifact, TEXTS[:1], "the cat " * 20, EncodingOptions(max_tokens=5, truncate=True))
    model = transformers.T5EncoderModel.from_pretrained(t5, dtype=torch.float32)
    ids = unigram_tokenizer().encode("the cat " * 20).ids[:4]
    with torch.no_grad():
        states = model(input_ids=torch.tensor([[*ids, 2]])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(row, unit_length(states[-1:])[0], atol=1e-5)


def test_the_user_may_say_it(t5: Path, tmp_path: Path) -> None:
    assert read(with_prompts(t5, include_prompt=False), include_prompt=True).spec.pools_prompt
    assert not read(with_prompts(t5, include_prompt=True), include_prompt=False).spec.pools_prompt
    with_prompts(t5, include_prompt=False)


def test_other_poolings_than_the_mean_are_refused(tmp_path: Path) -> None:
    folder = add_modules(save_checkpoint(tmp_path), ("cls",))
    change_json(folder / "1_Pooling" / "config.json", include_prompt=False)
    refused(folder, CheckpointError, "include_prompt is false, and the pooling is cls")


def test_prompts_left_out_of_a_mean_that_gives_scores_are_refused(tmp_path: Path) -> None:
    folder = add_modules(save_checkpoint(tmp_path), ("mean",), (Dense(1, "Identity"),), booleans=False)
    names = {"module_input_name": "sentence_embedding", "module_output_name": "scores"}
    change_json(folder / "2_Dense" / "config.json", **names)
    change_json(folder / "1_Pooling" / "config.json", include_prompt=False)
    model = {"model_type": "CrossEncoder", "prompts": {"query": "of: "}, "default_prompt_name": "query"}
    write_json(folder / "config_sentence_transformers.json", model)
    refused(folder, CheckpointError, "include_prompt is false, and a Dense gives scores of the mean")
    change_json(folder / "config_sentence_transformers.json", prompts={}, default_prompt_name=None)
    assert read(folder).spec.head("logits")


def test_a_t5_with_prompts_must_say_it(tmp_path: Path) -> None:
    """INSTRUCTOR's files do not, and its library leaves prompts out."""
    folder = saved(tmp_path / "checkpoint", "T5EncoderModel")
    with_prompts(add_modules(folder, ("mean",), (Normalize(),)))
    with pytest.raises(ConfigError, match="Say it: --include-prompt or --no-include-prompt"):
        build_artifact(folder, tmp_path / "artifact")
    built = build_artifact(folder, tmp_path / "artifact", include_prompt=False)
    assert built.manifest.embedding is not None
    assert not built.manifest.embedding.pools_prompt
    write_json(folder / "config_sentence_transformers.json", {})
    build_artifact(folder, tmp_path / "artifact")
