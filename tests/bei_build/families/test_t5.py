"""T5: a checkpoint with its decoder, unlimited lengths, and refused configs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bei.errors import CheckpointError
from tests.bei_build.targets.tiny import case_named
from tests.model_matrix import run
from tests.support.builds import build_artifact, random_encodings, running
from tests.support.checkpoints import change_config, change_json, read_tensors, write_tensors
from tests.support.reading import read, refused, saved
from tests.support.zoo import save_case


@pytest.mark.parametrize("name", ["T5EncoderModel", "T5EncoderModel-gated"])
def test_the_decoder_of_a_whole_model_is_left_aside(name: str, tmp_path: Path) -> None:
    encoder = case_named(name)
    whole = save_case(tmp_path / "whole", replace(encoder, architecture="T5ForConditionalGeneration"))
    tensors = read_tensors(whole)
    assert any(tensor.startswith("decoder.") for tensor in tensors)
    alone = save_case(tmp_path / "encoder", encoder)
    write_tensors(alone, {name: tensor for name, tensor in tensors.items() if name.startswith(("shared", "encoder."))})
    encodings = random_encodings((5, 40), encoder.tokenizer().get_vocab_size())
    first, second = (
        run(build_artifact(folder, tmp_path / f"{folder.name}.bei"), "embedding", encodings)[0]
        for folder in (whole, alone)
    )
    np.testing.assert_array_equal(first, second)


def test_a_text_may_be_longer_than_the_farthest_bucket(tmp_path: Path) -> None:
    """Beyond it all distances have one bias, and the graph holds no rows for them."""
    folder = saved(tmp_path / "checkpoint", "T5EncoderModel")
    checkpoint = read(folder, max_seq_len=3000)
    assert checkpoint.max_seq_len == 3000
    artifact = build_artifact(folder, tmp_path / "artifact", max_seq_len=700)
    with running(artifact) as engine:
        assert engine.info.limits.max_seq_len == 700


def test_a_length_that_no_file_says_is_that_of_the_training(tmp_path: Path) -> None:
    folder = saved(tmp_path, "T5EncoderModel")
    assert read(folder).max_seq_len == 512
    change_json(folder / "tokenizer_config.json", model_max_length=77)
    assert read(folder).max_seq_len == 77


def test_another_activation_is_refused(tmp_path: Path) -> None:
    folder = change_config(saved(tmp_path, "T5EncoderModel"), dense_act_fn="laplace")
    refused(folder, CheckpointError, "Activation 'laplace' is not supported")
