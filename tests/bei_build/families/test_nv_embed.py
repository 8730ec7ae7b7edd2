"""NV-Embed: latent attention after a bidirectional Mistral, and means over the tokens after the instruction."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import MistralModel

from bei.artifact.manifest import TOKENIZER
from bei.core import Encoding, Float32Array, PackedBatch
from bei.engine.postprocess import unit_length
from bei.errors import CheckpointError, ConfigError, TokenizerError
from tests.bei_build.families.nv_embed import around, latent_attention
from tests.support.builds import build_artifact, running
from tests.support.checkpoints import add_modules, change_config, change_json, write_json
from tests.support.cpus import needs_bf16
from tests.support.reading import refused, saved

TEXTS = ["the cat sat on the mat", "a", "hello, world! " * 2]


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("nv") / "mistral", "MistralModel")


@pytest.fixture
def folder(mistral: Path, tmp_path: Path) -> Path:
    return around(Path(shutil.copytree(mistral, tmp_path / "checkpoint")))


@torch.inference_mode()
def expected(mistral: Path, folder: Path, ids: list[int], instruction: int) -> Float32Array:
    model = MistralModel.from_pretrained(mistral, attn_implementation="eager", sliding_window=None)
    visible = torch.zeros(1, 1, len(ids), len(ids))
    states = model(torch.tensor([ids]), attention_mask=visible).last_hidden_state[0]
    mean: Float32Array = latent_attention(folder, states)[instruction:].mean(0, keepdim=True).numpy()
    return unit_length(mean)


@pytest.mark.parametrize("instruction", [0, 2])
def test_vectors_are_those_of_the_authors_code(mistral: Path, folder: Path, instruction: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"include_prompt": False} if instruction else {}
    artifact = build_artifact(folder, tmp_path / "artifact", **settings)
    assert artifact.certificate.reference.startswith("transformers, FP32")
    tokenizer = Tokenizer.from_file(str(tmp_path / "artifact" / TOKENIZER))
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    encodings = [Encoding(np.array(row, np.int32), num_unpooled=instruction) for row in ids]
    with running(artifact) as engine:
        found = unit_length(engine.run(PackedBatch.from_encodings(encodings))["embedding"])
    for row, of_text in zip(found, ids, strict=True):
        np.testing.assert_allclose(row, expected(mistral, folder, of_text, instruction)[0], atol=2e-5)
    eos = tokenizer.token_to_id("</s>")
    assert all(row[-1] == eos and row.count(eos) == 1 for row in ids)  # no file of the tokenizer asks for it


@needs_bf16
def test_the_bf16_engine_stays_close(folder: Path, tmp_path: Path) -> None:
    artifact = build_artifact(folder, tmp_path / "bf16", precision="bf16")
    assert artifact.certificate.outputs[0].cosine_min >= 0.999


def test_prompts_need_a_word_about_the_mean(folder: Path, tmp_path: Path) -> None:
    add_modules(folder, ("mean",))
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "find: "}})
    with pytest.raises(ConfigError, match="whether their tokens count in the mean"):
        build_artifact(folder, tmp_path / "artifact")
    change_json(folder / "1_Pooling" / "config.json", include_prompt=False)
    embedding = build_artifact(folder, tmp_path / "artifact").manifest.embedding
    assert embedding is not None
    assert embedding.pools_prompt is False


_SIZES = {"num_latents_value": 7, "num_cross_heads": 3, "cross_dim_head": 10, "latent_dim": 32, "hidden_dim": 32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent_attention_config": None}, "lacks text_config or latent_attention_config"),
        ({"padding_side": "left"}, "padding_side = 'left'"),
        ({"latent_attention_config": {**_SIZES, "latent_dim": 8}}, "latent_dim 8 and hidden_dim 32, and states of 32"),
        (
            {"latent_attention_config": {**_SIZES, "cross_dim_head": "x"}},
            "has cross_dim_head 'x': it must be",
        ),
        ({"latent_attention_config": {**_SIZES, "num_latents_value": 9}}, "Tensor latent.* has shape"),
    ],
)
def test_what_the_family_does_not_describe_is_refused(changes: dict[str, Any], message: str, folder: Path) -> None:
    refused(change_config(folder, **changes), CheckpointError, message)


@pytest.mark.parametrize("named", [{"bos_token": "<s>"}, {"bos_token": "<pad>", "eos_token": "</s>"}])
def test_a_tokenizer_that_cannot_end_texts_in_eos_is_refused(named: dict[str, str], folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", named)
    refused(folder, TokenizerError, "Texts of this model end in EOS")
