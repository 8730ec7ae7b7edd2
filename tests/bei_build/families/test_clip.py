"""CLIP: the text tower of whole checkpoints, and its pooling position."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from bei.core import Encoding
from bei.errors import CheckpointError
from bei_build.families.clip import FAMILY, VISION
from bei_build.families.siglip import VISION as SIGLIP_VISION
from tests.support.builds import build_artifact, embed, random_encodings, running
from tests.support.checkpoints import bpe_tokenizer, change_config, save_tokenizer
from tests.support.reading import refused, saved

_TEXT = {
    "vocab_size": bpe_tokenizer().get_vocab_size(),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
    "eos_token_id": 9,
    "projection_dim": 24,
}
_IMAGE = {**_TEXT, "image_size": 8, "patch_size": 4}


def whole(folder: Path) -> Path:
    """A CLIPModel like openai's checkpoints, with both towers."""
    config = transformers.CLIPConfig(text_config=_TEXT, vision_config=_IMAGE, projection_dim=24)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        transformers.CLIPModel(config).save_pretrained(folder)
    save_tokenizer(folder, bpe_tokenizer())
    return folder


def test_a_whole_checkpoint_gives_its_text_features(tmp_path: Path) -> None:
    folder = whole(tmp_path / "clip")
    texts = random_encodings((5, 30, 2), _TEXT["vocab_size"])
    artifact = build_artifact(folder, tmp_path / "artifact", normalize=False)
    assert artifact.certificate.reference.startswith("transformers, FP32")
    with running(artifact) as engine:
        actual = embed(engine, texts)
    model = transformers.CLIPTextModelWithProjection.from_pretrained(folder)
    for row, text in zip(actual, texts, strict=True):
        with torch.no_grad():
            expected = model(torch.from_numpy(text.input_ids.astype(np.int64))[None]).text_embeds[0]
        np.testing.assert_allclose(row, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(("ids", "place"), [([7, 9, 5, 9, 3], 1), ([7, 5, 3], 0), ([9], 0), ([4, 6, 9], 2)])
def test_the_first_end_of_text_counts(ids: list[int], place: int, tmp_path: Path) -> None:
    folder = saved(tmp_path / "clip", "CLIPTextModel")
    artifact = build_artifact(folder, tmp_path / "artifact", token_embeddings=True, verify=False)
    texts = [Encoding(np.array(ids, np.int32)), *random_encodings((9,), _TEXT["vocab_size"])]
    with running(artifact) as engine:
        alone = embed(engine, texts[:1])[0]
        pooled = embed(engine, texts)[0]
    model = transformers.CLIPTextModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = model(torch.tensor([ids])).last_hidden_state[0]
    np.testing.assert_allclose(pooled, states[place].numpy(), atol=1e-5)
    np.testing.assert_allclose(alone, states[place].numpy(), atol=1e-5)


def test_a_checkpoint_without_its_texts_config_is_refused(tmp_path: Path) -> None:
    refused(change_config(whole(tmp_path), text_config=None), CheckpointError, "has no text_config")


def test_only_clip_has_parts_that_were_written_again() -> None:
    raw = {"architectures": ["SiglipModel"], "vision_config": {"num_attention_heads": 4}}
    translate = SIGLIP_VISION.family.translate
    assert translate is not None
    assert translate({**raw, "vision_config_dict": {"num_attention_heads": 2}})["num_attention_heads"] == 4


@pytest.mark.parametrize("part", ["text", "vision"])
def test_a_part_that_early_versions_wrote_again_wins_with_its_defaults(part: str, tmp_path: Path) -> None:
    """``CLIPConfig`` takes QuickGELU, the default, where the second writing names no activation."""
    folder, sizes = whole(tmp_path), {**(_TEXT if part == "text" else _IMAGE), "num_attention_heads": 2}
    own = {**sizes, "hidden_act": "gelu", "num_attention_heads": 1}
    change_config(folder, **{f"{part}_config": own, f"{part}_config_dict": sizes})
    translate = (FAMILY if part == "text" else VISION.family).translate
    assert translate is not None
    found = translate(json.loads((folder / "config.json").read_bytes()))
    expected = getattr(transformers.CLIPConfig.from_pretrained(folder), f"{part}_config")
    assert (found["hidden_act"], found["num_attention_heads"]) == ("quick_gelu", 2)
    assert all(found[key] == getattr(expected, key) for key in ("hidden_act", *sizes) if key != "projection_dim")
