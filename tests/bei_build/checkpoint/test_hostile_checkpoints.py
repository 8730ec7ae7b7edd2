"""Hostile checkpoints are refused by name before any part of them is used; the tables are in
tests/support/hostile_checkpoints.py, and tests/e2e/test_hostile.py starts processes on them."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from bei.errors import CheckpointError, CheckpointNotFoundError, ConfigError, TokenizerError
from bei_build.checkpoint.locate import locate
from bei_build.config import BuildConfig
from bei_build.files.sandbox import SandboxError, run_bounded
from bei_build.files.size_limits import check_sizes
from bei_build.tokenizer.artifact_tokenizer import stored_truncation
from tests.support.builds import build_artifact
from tests.support.checkpoints import save_static, write_json
from tests.support.hostile_checkpoints import EXECUTED, HOSTILE, config, save_good
from tests.support.reading import read


@pytest.fixture
def folder(bert: Path, tmp_path: Path) -> Path:
    return save_good(bert, tmp_path / "tiny")


def opened(folder: Path) -> None:
    """The steps of a build before it compiles."""
    read(folder).weights().close()


def test_there_are_as_many_as_were_asked_for() -> None:
    assert len(HOSTILE) >= 40


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_checkpoint_is_refused_in_one_line(name: str, folder: Path) -> None:
    hostile = HOSTILE[name]
    hostile.spoil(folder)
    with pytest.raises(hostile.error) as caught:
        opened(folder)
    message = str(caught.value)
    assert re.search(hostile.message, message), message
    assert "\n" not in message
    assert len(message) < 2000
    assert not (folder.parent / EXECUTED).exists()


def test_what_they_are_made_of_is_good(folder: Path) -> None:
    opened(folder)
    config(num_labels=7)(folder)
    opened(folder)


# Sizes.


@pytest.mark.parametrize(
    "settings",
    [
        {"num_hidden_layers": 2000, "hidden_size": 1 << 20, "vocab_size": 1 << 24},
        {"rope_theta": 10**10, "eos_token_id": 10**12, "transformers_version": "5"},
        {"head_dim": -1, "use_cache": True, "add_pooling_layer": True, "tie_word_embeddings": False},
        {"max_position_embeddings": 1_000_000, "model_max_length": 10**30, "seq_length": 1_000_000},
        {"layers": 10**9, "no_rope_layers": [10**9], "quantization": {"bits": 4}},
    ],
)
def test_numbers_that_models_have_are_no_sizes_beyond_all_models(settings: dict[str, Any]) -> None:
    check_sizes(Path("config.json"), settings)


@pytest.mark.parametrize(
    "key",
    [
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "num_decoder_layers"),
        *("head_dim", "hidden_size", "d_model", "d_kv", "n_embd", "intermediate_size", "n_inner", "lora_rank"),
        *("num_key_value_heads", "n_heads", "num_experts", "relative_attention_num_buckets", "vocab_size"),
        *("num_labels", "max_position_embeddings", "n_positions"),
    ],
)
def test_every_family_s_sizes_are_bounded(key: str) -> None:
    for nested in ({key: 10**10}, {"text_config": {"deeper": {key: 10**10}}}):
        with pytest.raises(CheckpointError, match=rf"config\.json has {key} = 10000000000, and no model has more"):
            check_sizes(Path("config.json"), nested)


# Names.


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", " ", "a" * 501])
def test_a_name_that_cannot_be_shown_is_refused_before_the_build(name: str, bert: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--name: "):
        build_artifact(bert, tmp_path / "artifact", name=name)


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\nb", "a\udcff"], ids=ascii)  # the last is of bytes that are no UTF-8
def test_a_folder_whose_name_cannot_be_kept_is_refused_before_the_build(name: str, bert: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rename its folder"):
        build_artifact(save_good(bert, tmp_path / name), tmp_path / "artifact", name="good")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_batch_size": 65, "max_num_tokens": 64, "max_seq_len": 16}, "max_batch_size 65 is more than"),
        ({"max_num_tokens": 10**9}, "max_num_tokens must be from 1 to"),
        ({"max_batch_size": 10**9}, "max_batch_size must be from 1 to"),
    ],
)
def test_limits_that_no_server_takes_are_refused_before_the_build(
    settings: dict[str, Any], message: str, bert: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_artifact(bert, tmp_path / "artifact", **settings)


def test_few_tokens_mean_as_few_sequences_at_most(bert: Path, tmp_path: Path) -> None:
    artifact = build_artifact(bert, tmp_path / "artifact", max_num_tokens=48, verify=False)
    assert (artifact.manifest.max_num_tokens, artifact.manifest.max_batch_size) == (48, 48)


# Without a home directory.


def test_without_a_home_directory_a_path_of_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathlib.Path.expanduser", _no_home)
    with pytest.raises(ConfigError, match=r"this user has no home directory .*: set HOME, or give the"):
        locate("~/model")


def test_without_a_home_directory_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CheckpointNotFoundError, match="set HOME or HF_HOME"):
        locate("org/model")


def _no_home(path: Path) -> Path:
    if str(path).startswith("~"):
        raise RuntimeError("Could not determine home directory.")
    return path


# Truncation of static embeddings is read without the vocabulary.


@pytest.mark.parametrize(
    ("stored", "length"), [({"truncation": {"max_length": 12, "x": 1}}, 12), ({"truncation": None}, None), ({}, None)]
)
def test_the_stored_truncation_is_read(stored: dict[str, Any], length: int | None, tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer.json", {**stored, "model": {"vocab": {"a": 1}}})
    assert stored_truncation(tmp_path) == length


@pytest.mark.parametrize("stored", [{"truncation": {"max_length": "12"}}, {"truncation": 7}, []])
def test_a_truncation_of_another_form_is_refused(stored: object, tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer.json", stored)
    with pytest.raises(TokenizerError, match="is not a readable tokenizer"):
        stored_truncation(tmp_path)


def test_static_embeddings_are_hostile_too(tmp_path: Path) -> None:
    folder = save_static(tmp_path / "static", num_layers=10**9)
    with pytest.raises(CheckpointError, match="num_layers = 1000000000"):
        opened(folder)


# Work that never ends.


def test_work_is_ended_when_its_time_is_over() -> None:
    """Even where Python would not return from it."""
    started = time.monotonic()
    with pytest.raises(SandboxError, match=r"it took more than 0\.2 s"):
        run_bounded(lambda: str(10 ** len(str(10**4000)) ** 3), 0.2, 1 << 30)
    assert time.monotonic() - started < 30


def test_memory_beyond_the_bound_is_not_there() -> None:
    with pytest.raises(SandboxError, match="MemoryError"):
        run_bounded(lambda: str(len(bytearray(1 << 30))), 60, 100 << 20)
    assert len(bytearray(1 << 28)) == 1 << 28  # and is there, here


def test_work_that_fails_says_why() -> None:
    with pytest.raises(SandboxError, match="not here"):
        run_bounded(lambda: {"here": ""}["not here"], 60, 1 << 30)


def test_work_that_ends_its_process_gives_nothing() -> None:
    with pytest.raises(SandboxError, match="it ended without an answer"):
        run_bounded(lambda: os._exit(0), 60, 1 << 30)


@pytest.mark.parametrize("text", ["", "é世", "a" * 1_000_000, "\ud800"])
def test_work_within_its_bounds_gives_its_result(text: str) -> None:
    assert run_bounded(lambda: text, 60, 1 << 30) == text


def test_a_build_s_settings_know_their_names() -> None:
    assert BuildConfig(model="x", name="é 世").name == "é 世"
